"""Memory of the micro-batches that a simulation executed, to recognise and to copy those that repeat.

Earlier runs of a training with other optimizers, whose micro-batches this run need not execute.

The micro-batches of a training do not depend on its optimizer.  A run that began as an earlier one did, to the last
event of its first micro-batch, therefore copies the others from it: the further ones of the first step, and the first
one of the second step, which it would otherwise execute to see whether they repeat.  What refers to anything that was
made after the first micro-batch (by the optimizer, for example) is not copied, but executed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trainatomy.results.trace import AllocationTrace, Event, Mark, Origin
from trainatomy.simulator.cards import Card
from trainatomy.simulator.operations import Recording
from trainatomy.simulator.stretches import FIRST, INPUT, LOSS, OLDER, OWN, Columns, Entry, Inputs, Name, read, remains


@dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient that a micro-batch left: its place among the parameters, its number in the trace, its layout."""

    place: int
    number: int
    layout: tuple[torch.Size, tuple[int, ...], torch.dtype]


def gradients(parameters: Sequence[nn.Parameter], number_of: Callable[[torch.Tensor], int]) -> list[Gradient] | None:
    """Return the gradients of parameters; None if one of them does not have an allocation for itself."""
    found: list[Gradient] = []
    with torch._C.DisableTorchFunction():
        for place, parameter in enumerate(parameters):
            grad = parameter.grad
            if grad is None:
                continue
            if grad.layout != torch.strided or grad.storage_offset() or number_of(grad) < 0:
                return None
            found.append(Gradient(place, number_of(grad), (grad.shape, grad.stride(), grad.dtype)))
    return found if len({one.number for one in found}) == len(found) else None


@dataclass(slots=True)
class Window:
    """Facts of the trace and the loop about one executed micro-batch.

    ``exchanges``: it worked with other ranks or between streams, which is not compared.
    """

    step: int
    micro_step: int
    batch: Inputs
    kept_before: int
    events: range
    numbers: range
    marks: range
    functions: list[Any]
    is_stateful: bool
    of_first: range
    origins_before_step: int
    loss: tuple[torch.Size, tuple[int, ...], torch.dtype] | None = None
    kept: int = -1
    gradients: list[Gradient] | None = None
    recording: Recording | None = None
    exchanges: bool = False

    def name(self, number: int) -> Name:
        """Return how this micro-batch refers to an allocation; -1 stands for none."""
        if number < 0:
            return OLDER, number
        if number in self.numbers:
            return OWN, number - self.numbers.start
        if number in self.batch.places:
            return INPUT, self.batch.places[number]
        if number == self.kept_before:
            return LOSS, 0
        if number in self.of_first:
            return FIRST, number - self.of_first.start
        return OLDER, number

    def entries(self, trace: AllocationTrace, own: Sequence[int] | None = None) -> list[Entry]:
        """Return what the micro-batch wrote to the trace; ``own``: its allocations that count, by default all."""
        places = {number: place for place, number in enumerate(self.numbers if own is None else own)}

        def name_of(number: int) -> Name | None:
            if number not in self.numbers:
                return self.name(number)
            return (OWN, places[number]) if number in places else None

        return list(read(trace, self.events, name_of, self.marks))


@dataclass(slots=True)
class Template:
    """A micro-batch that can be copied, with its entries in the trace."""

    window: Window
    entries: list[Entry]
    columns: Columns
    outputs: list[tuple[Name, ...]] = field(default_factory=list)

    @classmethod
    def of(cls, window: Window, entries: list[Entry]) -> Template:
        """Return a recorded micro-batch as a template."""
        operations = () if window.recording is None else window.recording.operations
        outputs = [tuple([window.name(number) for number in one.outputs]) for one in operations]
        return cls(window, entries, Columns(entries), outputs)


def leaves_only(window: Window, entries: list[Entry], left: set[int]) -> bool:
    """Return whether a micro-batch released all its allocations but some, and of others only the loss before."""
    kept, released = remains(entries, len(window.numbers))
    return kept == left and released <= {OWN, LOSS}


@dataclass(frozen=True, slots=True)
class Beginning:
    """State of a run when its first micro-batch was over: its trace, and the operators that it ran."""

    events: list[Event]
    origins: list[Origin]
    marks: list[Mark]
    labels: dict[int, str]
    choices: dict[int, int]
    functions: list[Any]
    shapes: Any

    @classmethod
    def of(cls, trace: AllocationTrace, window: Window) -> Beginning:
        """Return the beginning of the run whose first micro-batch is over."""
        parts = list(trace.events), list(trace.origins), list(trace.marks), dict(trace.labels), dict(trace.choices)
        return cls(*parts, window.functions, window.batch.shapes)


@dataclass(frozen=True, slots=True)
class RememberedRun:
    """A run that may be repeated.

    Attributes:
        key: What tells its training from others, except for what shows in how a run begins, and for the optimizer.
        beginning: What it did first.
        first: The first micro-batch of its second step; None if it cannot be copied.
        further: A further micro-batch of its first step, which repeats; None if there is none.
        served: Other GPUs whose sizes its entries know.
    """

    key: str
    beginning: Beginning
    first: Template | None
    further: Template | None
    served: frozenset[Card] = frozenset()


@dataclass(frozen=True, slots=True)
class Recollections:
    """The runs that this process remembers, for a run of the training with this key.

    Attributes:
        runs: The runs, the one that was used last at the end.
        key: See ``RememberedRun``.
    """

    runs: deque[RememberedRun]
    key: str

    def recall(self, beginning: Beginning) -> RememberedRun | None:
        """Return the earlier run that began in this way."""
        for place, run in enumerate(self.runs):
            if run.key == self.key and run.beginning == beginning:
                del self.runs[place]
                self.runs.append(run)
                return run
        return None

    def remember(
        self,
        beginning: Beginning,
        first: Template | None,
        further: Template | None,
        served: frozenset[Card] = frozenset(),
    ) -> None:
        """Remember a run; the one that was not used for the longest time makes room for it."""
        kept = [None if one is None or not _is_independent(one, beginning) else one for one in (first, further)]
        if any(kept):
            self.runs.append(RememberedRun(self.key, beginning, kept[0], kept[1], served))


def _is_independent(template: Template, beginning: Beginning) -> bool:
    """Return whether a micro-batch refers to nothing that was made after the beginning, except for its own."""
    start, made = template.window.of_first.start, len(beginning.origins)
    names = {name for names in template.outputs for name in names} | {
        entry.name for entry in template.entries if entry.action != "mark"
    }
    choices = {entry.made.choice for entry in template.entries if entry.made is not None} - {None}
    older = (number + (start if kind == FIRST else 0) for kind, number in names if kind in (FIRST, OLDER))
    return choices <= set(beginning.choices.values()) and all(number < made for number in older)
