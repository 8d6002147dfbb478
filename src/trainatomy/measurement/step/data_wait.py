"""Time how long each step of a training waits for its DataLoader, on the CPU and on the GPU.

Around each fetch of a batch an event is recorded on the GPU.  The GPU passes the first one when it has finished the
work before it, and the second one when it gets there and the batch has arrived: what lies between them is time in which
the GPU had nothing to do because of the data.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import dataloader

from trainatomy.results.data_wait import DataWait


class DataWaits:
    """Times the batches that this thread fetches from DataLoaders while it is attached."""

    def __init__(self, device: int | None = None) -> None:
        """Record events on GPU ``device`` (``None``: the current one)."""
        self._device = device
        self._host: list[float] = []
        self._gpu: list[float] = []
        self._host_seconds = 0.0
        self._pending: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._undo: Any = None

    def attach(self) -> None:
        """Wrap the method of PyTorch's iterators that returns the next batch."""
        kind: Any = dataloader._BaseDataLoaderIter
        original, thread = kind.__next__, threading.get_ident()

        def timed_next(iterator: Any) -> Any:
            if threading.get_ident() != thread or self._undo is None:
                return original(iterator)
            before, began = self._event(), time.perf_counter()
            try:
                return original(iterator)
            finally:
                self._host_seconds += time.perf_counter() - began
                self._pending.append((len(self._host), before, self._event()))

        def undo() -> None:
            if kind.__next__ is timed_next:
                kind.__next__ = original

        kind.__next__, self._undo = timed_next, undo

    def begin(self) -> None:
        """Begin the first step: forget what was fetched before."""
        self._pending.clear()
        self._host_seconds = 0.0

    def end_step(self) -> None:
        """End a step."""
        self._host.append(self._host_seconds)
        self._gpu.append(0.0)
        self._host_seconds = 0.0
        self._read()

    def detach(self) -> None:
        """Put PyTorch's method back and read what the GPU has passed."""
        if self._undo is not None:
            undo, self._undo = self._undo, None
            undo()
        with suppress(RuntimeError):  # after a CUDA error every query raises it again
            self._read()

    def result(self, skipped: int = 0) -> DataWait | None:
        """Return the waits of all steps but the first ``skipped``; ``None`` if no DataLoader was used."""
        if not any(self._host):
            return None
        return DataWait(tuple(self._host[skipped:]), tuple(self._gpu[skipped:]))

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _read(self) -> None:
        while self._pending and self._pending[0][0] < len(self._gpu) and self._pending[0][2].query():
            step, before, after = self._pending.popleft()
            self._gpu[step] += before.elapsed_time(after) / 1000
