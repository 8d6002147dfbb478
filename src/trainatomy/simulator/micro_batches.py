"""Memory of the micro-batches that a simulation executed, to recognise and to copy those that repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trainatomy.results.trace import AllocationTrace
from trainatomy.simulator.operations import Recording

OWN, BATCH, LOSS, FIRST, OLDER = "own", "batch", "loss", "first", "older"
Name = tuple[str, int]
"""Allocation as a micro-batch refers to it: its own, by number; of its batch, by place; the loss that the loop kept of
the one before; of the first micro-batch of the step, by number; an older one, by its number in the trace."""


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
    """Facts of the trace and the loop about one executed micro-batch."""

    step: int
    micro_step: int
    shapes: Any
    batch: dict[int, int]
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

    def name(self, number: int) -> Name:
        """Return how this micro-batch refers to an allocation; -1 stands for none."""
        if number < 0:
            return OLDER, number
        if number in self.numbers:
            return OWN, number - self.numbers.start
        if number in self.batch:
            return BATCH, self.batch[number]
        if number == self.kept_before:
            return LOSS, 0
        if number in self.of_first:
            return FIRST, number - self.of_first.start
        return OLDER, number

    def entries(self, trace: AllocationTrace, own: list[int] | None = None) -> Iterator[tuple[Any, ...]]:
        """Yield what the micro-batch wrote to the trace, with allocations by their names.

        Args:
            trace: The trace of its run.
            own: Its allocations that count, by default all.
        """
        places = None if own is None else {number: place for place, number in enumerate(own)}
        marks = iter(trace.marks[self.marks.start : self.marks.stop])
        mark = next(marks, None)
        for index in self.events:
            while mark is not None and mark.event <= index:
                yield "mark", mark.name
                mark = next(marks, None)
            action, number, size, stream = trace.events[index]
            is_own = number in self.numbers
            if is_own and places is not None and number not in places:
                continue
            name = (OWN, places[number]) if is_own and places is not None else self.name(number)
            if action != "alloc":
                yield action, name, size, stream
                continue
            origin = trace.origins[number]
            label, choice = trace.labels.get(number), trace.choices.get(number)
            yield action, name, size, stream, origin.operation, origin.module, origin.phase, label, choice
        while mark is not None:
            yield "mark", mark.name
            mark = next(marks, None)


@dataclass(slots=True)
class Template:
    """A micro-batch that can be copied, with its entries in the trace."""

    window: Window
    entries: list[tuple[Any, ...]]
    outputs: list[tuple[Name, ...]] = field(default_factory=list)

    @classmethod
    def of(cls, window: Window, entries: list[tuple[Any, ...]]) -> Template:
        """Return a recorded micro-batch as a template."""
        operations = () if window.recording is None else window.recording.operations
        return cls(window, entries, [tuple([window.name(number) for number in one.outputs]) for one in operations])


def leaves_only(window: Window, entries: list[tuple[Any, ...]], left: set[int]) -> bool:
    """Return whether a micro-batch released all its allocations but some, and of others only the loss before."""
    freed = {entry[1] for entry in entries if entry[0] == "free"}
    survivors = {number for number in range(len(window.numbers)) if (OWN, number) not in freed}
    return survivors == left and all(name[0] in (OWN, LOSS) for name in freed)
