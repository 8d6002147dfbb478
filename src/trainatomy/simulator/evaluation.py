"""Evaluations in a simulated training: batches that repeat are copied, and host arrays have no data.

Each batch of an evaluation does the same as the one before.  This is checked: a batch becomes a template if it ran the
same operations, allocations and releases as the one before it, and left only its outputs behind.  Later batches of the
same shapes are then written as copies of the template.  What the Trainer does between batches, such as gathering
outputs, is executed each time, because it grows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from trainatomy.errors import SimulationError
from trainatomy.results.operations import Operations
from trainatomy.results.trace import Event, Origin
from trainatomy.simulator.operations import Recording
from trainatomy.simulator.recorder import Recorder


@dataclass(frozen=True, slots=True)
class ExecutedEvaluation:
    """An evaluation in the trace: its events, the number of its batches, and its operations."""

    events: range
    batches: int
    operations: Operations


_PLAIN = (bool, int, float, str, type(None))
_OWN, _BATCH, _OLDER = "own", "batch", "older"
_Name = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Output:
    """An output of a batch: its allocation (one of its own, or a tensor of the batch), and its layout."""

    name: _Name
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True)
class _Window:
    """Trace and outputs of one executed batch."""

    shapes: Any
    batch: dict[int, int]
    event: int
    numbers: range
    functions: list[Any]
    state: Any
    entries: list[tuple[Any, ...]]
    outputs: tuple[list[Any], TreeSpec] | None = None
    recording: Recording | None = None

    def name(self, number: int) -> _Name:
        """Return how this batch refers to an allocation."""
        if number in self.numbers:
            return _OWN, number - self.numbers.start
        return (_BATCH, self.batch[number]) if number in self.batch else (_OLDER, number)


class RepeatedBatches:
    """Follows the batches of evaluations and copies those that repeat.

    Args:
        recorder: Recorder of the run.
        host_state: Returns what a batch may change on the host (random numbers, counters of modules).
    """

    def __init__(self, recorder: Recorder, host_state: Callable[[], Any]) -> None:
        self._recorder = recorder
        self._host_state = host_state
        self._before: _Window | None = None
        self._template: _Window | None = None
        self._open: _Window | None = None
        self._described: tuple[Any, dict[int, int]] | None = None

    def repeat(self, batch: Any) -> Any:
        """Write a copy of the template as this batch and return its outputs; None if it has to be executed."""
        self._described = self._describe(batch)
        template = self._template
        if self._described is None or template is None or template.shapes != self._described[0]:
            return None
        return self._copy(template, self._described[1], tree_leaves(dict(batch)))

    def begin(self) -> None:
        """Begin to follow a batch that is executed."""
        trace = self._recorder.trace
        if self._described is None:
            return
        shapes, numbers = self._described
        functions: list[Any] = []
        start = len(trace.origins)
        self._open = _Window(shapes, numbers, len(trace.events), range(start, start), functions, self._host_state(), [])
        self._recorder.functions = functions
        self._recorder.operations.begin_recording(self._recorder.step)

    def end(self, outputs: Any) -> None:
        """End a batch that was executed: compare it with the one before."""
        window, self._open, self._described = self._open, None, None
        self._recorder.functions = None
        if window is None:
            return
        window.recording = self._recorder.operations.end_recording()
        window.numbers = range(window.numbers.start, len(self._recorder.trace.origins))
        window.entries = list(self._entries(window))
        window.outputs = self._outputs(window, outputs)
        unchanged = self._host_state() == window.state
        before, self._before = self._before, window if unchanged else None
        alike = before is not None and before.shapes == window.shapes and before.functions == window.functions
        if unchanged and alike and before is not None and before.entries == window.entries and self._may_repeat(window):
            self._template = window

    def _may_repeat(self, window: _Window) -> bool:
        """Return whether a batch left its outputs behind and nothing else, and no outputs share memory."""
        recorder = self._recorder
        if window.outputs is None or window.recording is None:
            return False
        if recorder.communicates or recorder.streams.in_use or recorder.trace.stream_uses:
            return False
        freed = {entry[1] for entry in window.entries if entry[0] == "free"}
        survivors = {number for number in range(len(window.numbers)) if (_OWN, number) not in freed}
        kept = [one.name[1] for one in window.outputs[0] if isinstance(one, _Output) and one.name[0] == _OWN]
        return survivors == set(kept) and len(kept) == len(survivors) and all(name[0] == _OWN for name in freed)

    def _entries(self, window: _Window) -> Iterator[tuple[Any, ...]]:
        trace = self._recorder.trace
        for index in range(window.event, len(trace.events)):
            action, number, size, stream = trace.events[index]
            name = window.name(number)
            if action != "alloc":
                yield action, name, size, stream
                continue
            origin = trace.origins[number]
            labels = trace.labels.get(number), trace.choices.get(number)
            yield action, name, size, stream, origin.operation, origin.module, origin.phase, *labels

    def _describe(self, batch: Any) -> tuple[Any, dict[int, int]] | None:
        """Return the shapes of a batch, and the places of its tensors by their allocations."""
        leaves, structure = tree_flatten(dict(batch))
        shapes: list[Any] = []
        numbers: dict[int, int] = {}
        with torch._C.DisableTorchFunction():
            for place, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
                    shapes.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.is_meta))
                    number = self._recorder.number_of(leaf)
                    if number is not None and number >= 0:
                        numbers.setdefault(number, place)
                elif isinstance(leaf, _PLAIN):
                    shapes.append((type(leaf), leaf))
                else:
                    return None
        return (str(structure), tuple(shapes)), numbers

    def _outputs(self, window: _Window, outputs: Any) -> tuple[list[Any], TreeSpec] | None:
        """Return how to make a batch's outputs again; None if that is not possible."""
        leaves, structure = tree_flatten(outputs)
        found: list[Any] = []
        with torch._C.DisableTorchFunction():
            for leaf in leaves:
                if isinstance(leaf, _PLAIN):
                    found.append(leaf)
                    continue
                number = self._recorder.number_of(leaf) if isinstance(leaf, torch.Tensor) else None
                if number is None or number < 0 or leaf.storage_offset():
                    return None
                name = window.name(number)
                if name[0] == _OLDER:
                    return None
                found.append(_Output(name, leaf.shape, leaf.stride(), leaf.dtype))
        return found, structure

    def _copy(self, template: _Window, batch: dict[int, int], leaves: list[Any]) -> Any:
        """Write the template once more and return its outputs."""
        recorder, trace = self._recorder, self._recorder.trace
        assert template.recording is not None and template.outputs is not None
        places = {place: number for number, place in batch.items()}
        start, first_event = len(trace.origins), len(trace.events)

        def number_of(name: _Name) -> int:
            kind, number = name
            return {_OWN: start + number, _BATCH: places.get(number, -1), _OLDER: number}[kind]

        for entry in template.entries:
            action, name, size, stream = entry[:4]
            number = number_of(name) if name[1] >= 0 else -1
            trace.events.append(Event(action, number, size, stream))
            if action != "alloc":
                continue
            operation, module, phase, label, choice = entry[4:]
            trace.origins.append(Origin(operation, module, phase, recorder.step))
            if label is not None:
                trace.labels[number] = label
            if choice is not None:
                trace.choices[number] = choice
        held = [tuple(number_of(template.name(one)) for one in each.outputs) for each in template.recording.operations]
        recorder.operations.write_again(template.recording, first_event - template.event, held)
        kept, structure = template.outputs
        return tree_unflatten([self._output(one, start, leaves) for one in kept], structure)

    def _output(self, one: Any, start: int, leaves: list[Any]) -> Any:
        """Return an output of a copied batch: a tensor for its allocation, or an alias of one of the batch."""
        if not isinstance(one, _Output):
            return one
        kind, number = one.name
        if kind == _OWN:
            return self._recorder.ledger.stand_in(one.shape, one.strides, one.dtype, start + number)
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            return leaves[number].detach().as_strided(one.shape, one.strides)


@contextlib.contextmanager
def arrays_without_data(recorder: Recorder) -> Iterator[None]:
    """Let the Trainer's gathered outputs on the host have shapes but no data: they may be larger than this machine.

    What is converted and joined there is written as operations of the CPU, with the bytes that it reads and writes.
    Source: ``nested_numpify`` and ``numpy_pad_and_concatenate`` (transformers/trainer_pt_utils.py, 5.0-5.17).
    """
    import numpy as np
    from transformers import trainer_pt_utils as of_trainer

    def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
        return np.broadcast_to(np.zeros((), dtype), shape)

    def work(name: str, moved: int) -> None:
        recorder.operations.write_one(f"numpy::{name}", (), (), {"bytes": moved}, (), len(recorder.trace.events))

    def numpify(tensors: Any) -> Any:
        if isinstance(tensors, list | tuple):
            return type(tensors)(numpify(each) for each in tensors)
        if isinstance(tensors, dict):
            return type(tensors)({name: numpify(each) for name, each in tensors.items()})
        with contextlib.suppress(SimulationError):  # integers whose values nobody knows
            tensors.cpu()
        if tensors.dtype == torch.bfloat16:  # which NumPy does not have
            work("convert", 3 * tensors.nbytes)
            return zeros(tuple(tensors.shape), "float32")
        return zeros(tuple(tensors.shape), str(tensors.dtype).removeprefix("torch."))

    def concatenate(array1: Any, array2: Any, padding_index: int = -100) -> Any:
        one, other = np.shape(np.atleast_1d(array1)), np.shape(np.atleast_1d(array2))
        width = () if len(one) == 1 else (max(one[1], other[1]),)
        joined = zeros((one[0] + other[0], *width, *one[2:]), array1.dtype)
        work("concatenate", np.atleast_1d(array1).nbytes + np.atleast_1d(array2).nbytes + joined.nbytes)
        return joined

    with (
        mock.patch.object(of_trainer, "nested_numpify", numpify),
        mock.patch.object(of_trainer, "numpy_pad_and_concatenate", concatenate),
    ):
        yield
