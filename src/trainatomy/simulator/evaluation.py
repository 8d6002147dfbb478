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
from math import prod
from typing import Any
from unittest import mock

import torch

from trainatomy.errors import SimulationError
from trainatomy.results.operations import Operations
from trainatomy.simulator.recorder import Recorder
from trainatomy.simulator.repeated_calls import Inputs, RepeatedCalls, Window


@dataclass(frozen=True, slots=True)
class ExecutedEvaluation:
    """An evaluation in the trace: its events, the number of its batches, and its operations."""

    events: range
    batches: int
    operations: Operations


class RepeatedBatches:
    """Follows the batches of evaluations and copies those that repeat.

    Args:
        recorder: Recorder of the run.
        host_state: Returns what a batch may change on the host (random numbers, counters of modules).
    """

    def __init__(self, recorder: Recorder, host_state: Callable[[], Any]) -> None:
        self._recorder = recorder
        self._host_state = host_state
        self._calls = RepeatedCalls(recorder)
        self._before: Window | None = None
        self._template: Window | None = None
        self._open: tuple[Window, Any] | None = None
        self._inputs: Inputs | None = None

    def repeat(self, batch: Any) -> Any:
        """Write a copy of the template as this batch and return its outputs; None if it has to be executed."""
        self._inputs = self._calls.describe(dict(batch))
        template = self._template
        if self._inputs is None or template is None or template.inputs.shapes != self._inputs.shapes:
            return None
        return self._calls.write_again(template, self._inputs, dict(batch))

    def begin(self) -> None:
        """Begin to follow a batch that is executed."""
        if self._inputs is None:
            return
        self._open = self._calls.begin(self._inputs), self._host_state()

    def end(self, outputs: Any) -> None:
        """End a batch that was executed: compare it with the one before."""
        opened, self._open, self._inputs = self._open, None, None
        if opened is None:
            return
        window, state = opened
        self._calls.end(window, outputs)
        unchanged = self._host_state() == state
        before, self._before = self._before, window if unchanged else None
        repeats = before is not None and window.recording is not None and window.did_as(before)
        if unchanged and repeats and self._calls.may_repeat(window):
            self._template = window


@contextlib.contextmanager
def arrays_without_data(recorder: Recorder, above: int = 0) -> Iterator[None]:
    """Let the Trainer's gathered outputs on the host have shapes but no data: they may be larger than this machine.

    Arrays of fewer elements than ``above`` are made as ever.  What is converted and joined there is written as
    operations of the CPU, with the bytes that it reads and writes.
    Source: ``nested_numpify`` and ``numpy_pad_and_concatenate`` (transformers/trainer_pt_utils.py, 5.0-5.17).
    """
    import numpy as np
    from transformers import trainer_pt_utils as of_trainer

    def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
        return np.broadcast_to(np.zeros((), dtype), shape)

    def work(name: str, moved: int) -> None:
        recorder.operations.write_one(f"numpy::{name}", (), (), {"bytes": moved}, (), len(recorder.trace.events))

    numpified, concatenated = of_trainer.nested_numpify, of_trainer.numpy_pad_and_concatenate

    def numpify(tensors: Any) -> Any:
        if isinstance(tensors, list | tuple):
            return type(tensors)(numpify(each) for each in tensors)
        if isinstance(tensors, dict):
            return type(tensors)({name: numpify(each) for name, each in tensors.items()})
        if tensors.numel() < above:
            return numpified(tensors)
        with contextlib.suppress(SimulationError):  # integers whose values nobody knows
            tensors.cpu()
        if tensors.dtype == torch.bfloat16:  # which NumPy does not have
            work("convert", 3 * tensors.nbytes)
            return zeros(tuple(tensors.shape), "float32")
        return zeros(tuple(tensors.shape), str(tensors.dtype).removeprefix("torch."))

    def concatenate(array1: Any, array2: Any, padding_index: int = -100) -> Any:
        one, other = np.shape(np.atleast_1d(array1)), np.shape(np.atleast_1d(array2))
        width = () if len(one) == 1 else (max(one[1], other[1]),)
        shape = (one[0] + other[0], *width, *one[2:])
        if prod(shape) < above:
            return concatenated(array1, array2, padding_index)
        joined = zeros(shape, array1.dtype)
        work("concatenate", np.atleast_1d(array1).nbytes + np.atleast_1d(array2).nbytes + joined.nbytes)
        return joined

    with (
        mock.patch.object(of_trainer, "nested_numpify", numpify),
        mock.patch.object(of_trainer, "numpy_pad_and_concatenate", concatenate),
    ):
        yield
