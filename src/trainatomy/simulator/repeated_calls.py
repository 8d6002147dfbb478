"""Calls that repeat an earlier one in the trace: what is remembered of one, and how it is written once more.

A call is a stretch of the run with tensors as inputs and outputs: the forward pass of a batch, or of a layer.  It
refers to allocations by names that are the same in each call, so that two calls that do the same are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from trainatomy.results.trace import Event, Origin
from trainatomy.simulator.operations import Recording
from trainatomy.simulator.recorder import Recorder

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_OWN, _INPUT, _WEIGHT, _OLDER = "own", "input", "weight", "older"
Name = tuple[str, int]
"""Allocation as a call refers to it: its own, by number; of its inputs or its module, by place; an older one, by its
number."""


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that a call returns: its allocation (one of its own, or of an input), and its layout there."""

    name: Name
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    elements: int
    dtype: torch.dtype


@dataclass(slots=True)
class Inputs:
    """Inputs of a call: their shapes and plain values, and the place of each allocation among them."""

    shapes: Any
    places: dict[int, int]


class Module(NamedTuple):
    """The module whose forward a call is: its path, and the allocations of its weights."""

    path: str = ""
    weights: tuple[int, ...] = ()


_NO_MODULE = Module()


@dataclass(slots=True)
class Window:
    """Trace and outputs of one executed call."""

    inputs: Inputs
    module: Module
    event: int
    numbers: range
    functions: list[Any]
    entries: Sequence[tuple[Any, ...]] = ()
    outputs: tuple[list[Any], TreeSpec] | None = None
    recording: Recording | None = None

    def name(self, number: int) -> Name:
        """Return how this call refers to an allocation."""
        if number in self.numbers:
            return _OWN, number - self.numbers.start
        if number in self.inputs.places:
            return _INPUT, self.inputs.places[number]
        weights = self.module.weights
        return (_WEIGHT, weights.index(number)) if number in weights else (_OLDER, number)

    def did_as(self, other: Window) -> bool:
        """Return whether another call had the same inputs and did the same."""
        return (
            self.inputs.shapes == other.inputs.shapes
            and self.functions == other.functions
            and self.entries == other.entries
            and self.outputs == other.outputs
        )


class RepeatedCalls:
    """Follows calls and writes copies of them.

    Args:
        recorder: Recorder of the run.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._functions: list[Any] | None = None
        self._records = False

    @property
    def are_followed(self) -> bool:
        """False in a run with several streams or processes: what they do is not compared."""
        return self._recorder.is_alone

    def describe(self, inputs: Any) -> Inputs | None:
        """Describe the inputs of a call; None if they are not all tensors and plain values."""
        leaves, structure = tree_flatten(inputs)
        shapes: list[Any] = []
        places: dict[int, int] = {}
        with torch._C.DisableTorchFunction():
            for place, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
                    number = self._recorder.number_of(leaf)
                    shared = places.setdefault(number, place) if number is not None and number >= 0 else None
                    shapes.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.is_meta, shared))
                elif isinstance(leaf, _PLAIN):
                    shapes.append((type(leaf), leaf))
                else:
                    return None
        return Inputs((structure, tuple(shapes)), places)

    def begin(self, inputs: Inputs, module: Module = _NO_MODULE, *, records: bool = True) -> Window:
        """Begin to follow a call that is executed; ``records``: whether its operations are recorded for copies."""
        recorder = self._recorder
        start = len(recorder.trace.origins)
        self._functions, recorder.functions = recorder.functions, []
        self._records = records
        if records:
            recorder.operations.begin_recording(recorder.step)
        return Window(inputs, module, len(recorder.trace.events), range(start, start), recorder.functions)

    def end(self, window: Window, outputs: Any) -> None:
        """End a call that was executed."""
        if self._records:
            window.recording = self._recorder.operations.end_recording()
        self._recorder.functions, self._functions = self._functions, None
        window.numbers = range(window.numbers.start, len(self._recorder.trace.origins))
        window.entries = tuple(self._entries(window))
        window.outputs = self._outputs(window, outputs)

    def abandon(self) -> None:
        """Follow a call no further that ended with an error."""
        if self._records:
            self._recorder.operations.end_recording()
        self._recorder.functions, self._functions = self._functions, None

    def may_repeat(self, window: Window, *, frees_inputs: bool = False) -> bool:
        """Return whether a call left its outputs behind and nothing else, and no outputs share memory.

        Args:
            window: The call.
            frees_inputs: Whether it may release inputs.
        """
        if window.outputs is None or not self.are_followed:
            return False
        freed = {entry[1] for entry in window.entries if entry[0] == "free"}
        survivors = {number for number in range(len(window.numbers)) if (_OWN, number) not in freed}
        kept = [each.name[1] for each in window.outputs[0] if isinstance(each, Output) and each.name[0] == _OWN]
        released = {_OWN, _INPUT} if frees_inputs else {_OWN}
        return survivors == set(kept) and len(kept) == len(survivors) and all(name[0] in released for name in freed)

    def write_again(self, template: Window, inputs: Inputs, given: Any, to: Module = _NO_MODULE) -> Any:
        """Write a call once more and return its outputs.

        Args:
            template: The call.
            inputs: Description of the inputs of the copy.
            given: These inputs themselves.
            to: The module whose forward it is, if it is one.
        """
        recorder, trace, leaves = self._recorder, self._recorder.trace, tree_leaves(given)
        assert template.outputs is not None
        numbers = {place: number for number, place in inputs.places.items()}
        start, first_event = len(trace.origins), len(trace.events)

        def number_of(name: Name) -> int:
            kind, number = name
            if kind == _OWN:
                return start + number
            if kind == _INPUT:
                return numbers[number]
            return to.weights[number] if kind == _WEIGHT else number

        for action, name, size, stream, *rest in template.entries:
            number = number_of(name)
            trace.events.append(Event(action, number, size, stream))
            if action == "free" and name[0] == _INPUT:
                with torch._C.DisableTorchFunction():
                    recorder.ledger.take(leaves[name[1]].untyped_storage())
            if not rest:
                continue
            operation, is_inside, module, phase, label, choice = rest
            trace.origins.append(Origin(operation, to.path + module if is_inside else module, phase, recorder.step))
            if label is not None:
                trace.labels[number] = label
            if choice is not None:
                trace.choices[number] = choice
        if (recording := template.recording) is not None:
            held = [tuple(number_of(template.name(number)) for number in each.outputs) for each in recording.operations]
            recorder.operations.write_again(
                _moved(recording, template.module.path, to.path), first_event - template.event, held
            )
        kept, structure = template.outputs
        return tree_unflatten([self._output(each, start, leaves) for each in kept], structure)

    def _entries(self, window: Window) -> Iterator[tuple[Any, ...]]:
        trace, path = self._recorder.trace, window.module.path
        for index in range(window.event, len(trace.events)):
            action, number, size, stream = trace.events[index]
            name = window.name(number)
            if action != "alloc":
                yield action, name, size, stream
                continue
            origin = trace.origins[number]
            labels = trace.labels.get(number), trace.choices.get(number)
            is_inside = origin.module.startswith(path)
            module = origin.module[len(path) :] if is_inside else origin.module
            yield action, name, size, stream, origin.operation, is_inside, module, origin.phase, *labels

    def _outputs(self, window: Window, outputs: Any) -> tuple[list[Any], TreeSpec] | None:
        """Return how to make the outputs of a call again; None if that is not possible."""
        leaves, structure = tree_flatten(outputs)
        found: list[Any] = []
        with torch._C.DisableTorchFunction():
            for leaf in leaves:
                if isinstance(leaf, _PLAIN):
                    found.append(leaf)
                    continue
                number = self._recorder.number_of(leaf) if isinstance(leaf, torch.Tensor) else None
                if number is None or number < 0:
                    return None
                name = window.name(number)
                if name[0] not in (_OWN, _INPUT):
                    return None
                elements = leaf.untyped_storage().nbytes() // leaf.itemsize
                offset = int(leaf.storage_offset())
                found.append(Output(name, leaf.shape, leaf.stride(), offset, elements, leaf.dtype))
        return found, structure

    def _output(self, output: Any, start: int, leaves: list[Any]) -> Any:
        """Return an output of a copied call: a tensor for its allocation, or an alias of an input."""
        if not isinstance(output, Output):
            return output
        kind, number = output.name
        layout = output.shape, output.strides, output.offset
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            if kind == _INPUT:
                return leaves[number].detach().as_strided(*layout)
            size = torch.Size([output.elements])
            return self._recorder.ledger.stand_in(size, (1,), output.dtype, start + number).as_strided(*layout)


def _moved(recording: Recording, path: str, to: str) -> Recording:
    """Return the operations of a module as those of another one."""
    if path == to:
        return recording
    operations = [
        each._replace(module=to + each.module[len(path) :]) if each.module.startswith(path) else each
        for each in recording.operations
    ]
    return replace(recording, operations=operations)
