"""Calls that repeat an earlier one in the trace: what is remembered of one, and how it is written once more.

A call is a stretch of the run with tensors as inputs and outputs: the forward pass of a batch, or of a layer.  It
refers to allocations by names that are the same in each call, so that two calls that do the same are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from trainatomy.simulator.operations import Recording
from trainatomy.simulator.recorder import Recorder
from trainatomy.simulator.stretches import INPUT, OLDER, OWN, WEIGHT, Columns, Entry, Inputs, Name, read, remains, write

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


class Output(NamedTuple):
    """A tensor that a call returns: its allocation (one of its own, or of an input), and its layout there."""

    name: Name
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    elements: int
    dtype: torch.dtype


class Module(NamedTuple):
    """The module whose forward a call is: its path, and the allocations of its weights."""

    path: str = ""
    weights: tuple[int, ...] = ()

    def relative(self, module: str) -> tuple[bool, str]:
        """Return whether a module is inside this one, and its path there, or else its whole path."""
        is_inside = module.startswith(self.path)
        return is_inside, module[len(self.path) :] if is_inside else module

    def absolute(self, relative: tuple[bool, str]) -> str:
        """Return the path of a module that is to this one what ``relative`` says."""
        is_inside, path = relative
        return self.path + path if is_inside else path


_NO_MODULE = Module()


@dataclass(slots=True)
class Window:
    """Trace and outputs of one executed call."""

    inputs: Inputs
    module: Module
    event: int
    numbers: range
    functions: list[Any]
    entries: Sequence[Entry] = ()
    outputs: tuple[list[Any], TreeSpec] | None = None
    recording: Recording | None = None
    _columns: Columns | None = None

    @property
    def columns(self) -> Columns:
        """The entries, set out to be written again."""
        if self._columns is None:
            self._columns = Columns(self.entries)
        return self._columns

    def name(self, number: int) -> Name:
        """Return how this call refers to an allocation."""
        if number in self.numbers:
            return OWN, number - self.numbers.start
        if number in self.inputs.places:
            return INPUT, self.inputs.places[number]
        weights = self.module.weights
        return (WEIGHT, weights.index(number)) if number in weights else (OLDER, number)

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
        trace = self._recorder.trace
        events = range(window.event, len(trace.events))
        window.entries = tuple(read(trace, events, window.name, module_of=window.module.relative))
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
        if window.outputs is None or not self._recorder.is_alone:
            return False
        left, released = remains(window.entries, len(window.numbers))
        kept = [each.name[1] for each in window.outputs[0] if isinstance(each, Output) and each.name[0] == OWN]
        return left == set(kept) and len(kept) == len(left) and released <= ({OWN, INPUT} if frees_inputs else {OWN})

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
            if kind == OWN:
                return start + number
            if kind == INPUT:
                return numbers[number]
            return to.weights[number] if kind == WEIGHT else number

        columns = template.columns
        write(trace, columns, number_of, recorder.step, to.absolute)
        with torch._C.DisableTorchFunction():
            for kind, place in columns.names:
                if kind == INPUT:  # an input that a call refers to is one that it releases
                    recorder.ledger.take(leaves[place].untyped_storage())
        if (recording := template.recording) is not None:
            held = [tuple(number_of(template.name(number)) for number in each.outputs) for each in recording.operations]
            recorder.operations.write_again(
                _moved(recording, template.module.path, to.path), first_event - template.event, held
            )
        kept, structure = template.outputs
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            found = [self._output(each, start, leaves) for each in kept]
        return tree_unflatten(found, structure)

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
                if name[0] not in (OWN, INPUT):
                    return None
                elements = leaf.untyped_storage().nbytes() // leaf.itemsize
                offset = int(leaf.storage_offset())
                found.append(Output(name, leaf.shape, leaf.stride(), offset, elements, leaf.dtype))
        return found, structure

    def _output(self, output: Any, start: int, leaves: list[Any]) -> Any:
        """Return an output of a copied call: a tensor for its allocation, or an alias of an input."""
        if not isinstance(output, Output):
            return output
        (kind, number), shape, strides, offset, elements, dtype = output
        if kind == INPUT:
            return leaves[number].detach().as_strided(shape, strides, offset)
        made = torch.empty_strided((elements,), (1,), dtype=dtype, device="meta")
        self._recorder.ledger.assign(made.untyped_storage(), start + number)
        return made.as_strided(shape, strides, offset)


def _moved(recording: Recording, path: str, to: str) -> Recording:
    """Return the operations of a module as those of another one."""
    if path == to:
        return recording
    operations = [
        each._replace(module=to + each.module[len(path) :]) if each.module.startswith(path) else each
        for each in recording.operations
    ]
    return replace(recording, operations=operations)
