"""A stretch of the allocation trace: what it did, in relative names, to be compared with another and written again.

A micro-batch, the forward pass of a batch or of a layer, a call of ``generate()``: each refers to allocations by names
that are the same in all its repetitions, so that stretches that do the same have equal entries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch.utils._pytree import tree_flatten

from trainatomy.results.trace import Action, AllocationTrace, Event, Mark, shared_origin
from trainatomy.simulator.recorder import Recorder

OWN, INPUT, WEIGHT, LOSS, FIRST, OLDER = "own", "input", "weight", "loss", "first", "older"
Name = tuple[str, int]
"""Allocation as a stretch refers to it: its own, by number; of its inputs or of its module's weights, by place; the
loss that the loop kept of the micro-batch before; of the first micro-batch of the step, by number; an older one, by its
number in the trace."""
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
event_of: Callable[[tuple[Any, ...]], Event] = partial(tuple.__new__, Event)
"""Makes an event of its fields in half the time that the class takes: a call of ``generate()`` has a million."""


class Made(NamedTuple):
    """An allocation of a stretch: its ``Origin`` but for the step, its label, and the decision that it belongs to."""

    operation: str
    module: Any
    phase: str
    label: str | None
    choice: int | None


class Entry(NamedTuple):
    """An event of a stretch, with a name in place of the allocation's number; a mark has its own name there."""

    action: Action | Literal["mark"]
    name: Name
    bytes: int = 0
    stream: int = 0
    made: Made | None = None


def _unchanged(value: Any) -> Any:
    return value


def read(
    trace: AllocationTrace,
    events: range,
    name_of: Callable[[int], Name | None],
    marks: range = range(0),
    *,
    module_of: Callable[[str], Any] = _unchanged,
) -> Iterator[Entry]:
    """Yield the entries of a stretch of a trace.

    Args:
        trace: The trace.
        events: The stretch, by indices of its events.
        name_of: Returns the name of an allocation; None leaves its events out.
        marks: Indices of the marks in the stretch.
        module_of: Returns what stands for the module of an allocation in its entry.
    """
    waiting = deque(trace.marks[marks.start : marks.stop])
    for index in events:
        while waiting and waiting[0].event <= index:
            yield Entry("mark", (waiting.popleft().name, -1))
        action, number, size, stream = trace.events[index]
        if (name := name_of(number)) is None:
            continue
        made = None
        if action == "alloc":
            operation, module, phase, _ = trace.origins[number]
            labels = trace.labels.get(number), trace.choices.get(number)
            made = Made(operation, module_of(module), phase, *labels)
        yield Entry(action, name, size, stream, made)
    for mark in waiting:
        yield Entry("mark", (mark.name, -1))


class Columns:
    """The entries of a stretch, set out to be written several times.

    Attributes:
        names: The allocations that it refers to.
        events: Its events, with places among the names.
        made: Operations, modules and phases of its own allocations.
        labels: Labels of allocations, by places among the names.
        choices: Their decisions.
        marks: Numbers of events before marks, and their names.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        places: dict[Name, int] = {}
        self.events: list[tuple[Any, int, int, int]] = []
        self.made: list[tuple[str, Any, str]] = []
        self.labels: list[tuple[int, str]] = []
        self.choices: list[tuple[int, int]] = []
        self.marks: list[tuple[int, str]] = []
        for action, name, size, stream, made in entries:
            if action == "mark":
                self.marks.append((len(self.events), name[0]))
                continue
            place = places.setdefault(name, len(places))
            self.events.append((action, place, size, stream))
            if made is None:
                continue
            self.made.append(made[:3])
            if made.label is not None:
                self.labels.append((place, made.label))
            if made.choice is not None:
                self.choices.append((place, made.choice))
        self.names = list(places)
        self.modules = {module for _, module, _ in self.made}


def write(
    trace: AllocationTrace,
    stretch: Columns,
    number_of: Callable[[Name], int],
    step: int,
    module_of: Callable[[Any], str] = _unchanged,
) -> None:
    """Write a stretch at the end of a trace.

    Args:
        trace: The trace.
        stretch: The stretch.
        number_of: Returns the number of an allocation by its name; own ones count from the next number of the trace.
        step: The step that the copy belongs to.
        module_of: Returns the module of an allocation by what stands for it in its entry.
    """
    numbers, begin = list(map(number_of, stretch.names)), len(trace.events)
    modules = {module: module_of(module) for module in stretch.modules}
    trace.events += map(
        event_of, ((action, numbers[place], size, stream) for action, place, size, stream in stretch.events)
    )
    trace.origins += [
        shared_origin(operation, modules[module], phase, step) for operation, module, phase in stretch.made
    ]
    trace.labels.update((numbers[place], label) for place, label in stretch.labels)
    trace.choices.update((numbers[place], choice) for place, choice in stretch.choices)
    trace.marks += [Mark(begin + event, name, step) for event, name in stretch.marks]


def remains(entries: Iterable[Entry], count: int) -> tuple[set[int], set[str]]:
    """Return which of its ``count`` allocations a stretch did not release, and the kinds of names that it released."""
    freed = {entry.name for entry in entries if entry.action == "free"}
    return {number for number in range(count) if (OWN, number) not in freed}, {kind for kind, _ in freed}


@dataclass(slots=True)
class Inputs:
    """Inputs of a stretch: their shapes and plain values, and the place of each allocation among them."""

    shapes: Any
    places: dict[int, int]


def describe(recorder: Recorder, inputs: Any) -> Inputs | None:
    """Describe the inputs of a stretch; None if they are not all tensors and plain values."""
    leaves, structure = tree_flatten(inputs)
    shapes: list[Any] = []
    places: dict[int, int] = {}
    with torch._C.DisableTorchFunction():
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
                number = recorder.number_of(leaf)
                shared = places.setdefault(number, place) if number is not None and number >= 0 else None
                shapes.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.is_meta, shared))
            elif isinstance(leaf, _PLAIN):
                shapes.append((type(leaf), leaf))
            else:
                return None
    return Inputs((structure, tuple(shapes)), places)
