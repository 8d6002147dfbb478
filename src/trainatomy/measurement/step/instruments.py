"""Instruments beside the steps of a measured run, which neither wait for the GPU nor take its memory.

``Stopwatch`` times steps on the GPU by CUDA events.  ``DataWaits`` times how long each step waits for its DataLoader,
on the CPU and on the GPU: around each fetch of a batch an event is recorded.  The GPU passes the first one when it has
finished the work before it, and the second one when it gets there and the batch has arrived; what lies between them is
time in which the GPU had nothing to do because of the data.  ``Monitors`` bundles it with the host's pace and the GPU's
power.  ``HostPhases`` tells a ``HostSampler`` where the training is.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import dataloader

from trainatomy.measurement.device.power import PowerSampler, power_use
from trainatomy.measurement.host_memory import HostSampler
from trainatomy.results.loader import DataWait
from trainatomy.results.measurement import HostPace, PowerUse
from trainatomy.results.tasks import RestoringPurpose
from trainatomy.training.observer import Observer

if TYPE_CHECKING:
    from trainatomy.measurement.device.host import HostProbe


class Stopwatch:
    """CUDA events at each ``tick``; the time between two is a step.  They are read once the GPU has passed them.

    Attributes:
        seconds: Duration of each step.
        ends: End of each step in GPU seconds since the first tick, what was left out included.
    """

    def __init__(self, device: int | None = None) -> None:
        """Time GPU ``device`` (``None``: the current device at each tick)."""
        self._device = device
        self._pending: deque[tuple[torch.cuda.Event, bool]] = deque()
        self._since_first_tick = 0.0
        self.seconds: list[float] = []
        self.ends: list[float] = []

    def tick(self) -> None:
        """Record an event behind the work that the GPU has queued so far."""
        self._record(ends_step=True)

    def leave_out(self) -> None:
        """Leave the time since the last tick out of the next step.

        While the GPU is behind, that is no time at all, and the work that was left out delayed nothing.
        """
        self._record(ends_step=False)

    def _record(self, *, ends_step: bool) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._pending.append((event, ends_step))
        self._read()

    def finish(self) -> None:
        """Read the events that the GPU has passed: all of them after a synchronisation.

        After a CUDA error, which every later query raises again, the events left cannot be read.
        """
        with suppress(RuntimeError):
            self._read()

    def _read(self) -> None:
        while len(self._pending) > 1 and self._pending[1][0].query():
            begin, _ = self._pending.popleft()
            end, ends_step = self._pending[0]
            seconds = begin.elapsed_time(end) / 1000
            self._since_first_tick += seconds
            if ends_step:
                self.seconds.append(seconds)
                self.ends.append(self._since_first_tick)


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


class Monitors:
    """Watches from the beginning of the first timed step to the end of the last one; each part may be missing.

    The time that the probe takes between steps is left out of them.  ``between`` is False where other ranks would wait
    for it: then it runs before and after the steps only.
    """

    def __init__(
        self,
        host_probe: HostProbe | None = None,
        data_waits: DataWaits | None = None,
        power: PowerSampler | None = None,
        *,
        between: bool = True,
    ) -> None:
        self.host_probe, self.data_waits, self.power = host_probe, data_waits, power
        self._between = between
        self._stopwatch: Stopwatch | None = None
        self._began = 0.0
        self._first_step = 0
        self._ended = False

    def prepare(self) -> None:
        """Attach what needs to be in place before the training's loop begins."""
        if self.data_waits is not None:
            self.data_waits.attach()

    def begin(self, stopwatch: Stopwatch, first_step: int) -> None:
        """Begin to watch, just before the first tick of ``stopwatch``; ``first_step``: number of the first step."""
        self._stopwatch, self._first_step = stopwatch, first_step
        if self.host_probe is not None:
            self.host_probe.before()
        if self.power is not None:
            self.power.start()
        if self.data_waits is not None:
            self.data_waits.begin()
        self._began = time.perf_counter()

    def step_ended(self) -> None:
        """End a step, just after its tick, and take the host's pace if it is due."""
        if self.data_waits is not None:
            self.data_waits.end_step()
        if self.host_probe is not None and self._between and self._stopwatch is not None and self.host_probe.is_due():
            self.host_probe.between()
            self._stopwatch.leave_out()

    def end(self) -> None:
        """Stop watching, however the run ended."""
        if self.data_waits is not None:
            self.data_waits.detach()
        if self._ended or self._stopwatch is None:
            return
        self._ended = True
        if self.power is not None:
            self.power.stop()
        if self.host_probe is not None:
            self.host_probe.after()

    def host_pace(self) -> HostPace | None:
        """Return how fast the CPU was."""
        return None if self.host_probe is None else self.host_probe.result()

    def data_wait(self, skipped: int = 0) -> DataWait | None:
        """Return how long all steps but the first ``skipped`` waited for data."""
        return None if self.data_waits is None else self.data_waits.result(skipped)

    def power_use(self, samples: float, tokens: float | None) -> PowerUse | None:
        """Return the power during the timed steps of this many samples and tokens each."""
        if self.power is None or self._stopwatch is None:
            return None
        return power_use(self.power, self._began, self._stopwatch.ends, self._first_step, samples, tokens)


def pinned_bytes() -> int:
    """Return the host memory that PyTorch has pinned in this process, with what it keeps for later."""
    if not torch.cuda.is_initialized() or not hasattr(torch._C, "_cuda_hostMemoryStats"):
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def host_sampler() -> HostSampler:
    """Return a sampler that knows what PyTorch has pinned."""
    return HostSampler(pinned=pinned_bytes)


class HostPhases(Observer):
    """Observer of a loop that begins a sampler's phases."""

    def __init__(self, sampler: HostSampler) -> None:
        self._sampler = sampler

    def loaded(self, model: nn.Module) -> None:
        self._sampler.phase("training")

    def evaluation_begin(self, batches: int) -> None:
        self._sampler.phase("evaluation")

    def evaluation_end(self) -> None:
        self._sampler.phase("training")

    def saving_begin(self) -> None:
        self._sampler.phase("saving")

    def saving_end(self, files: Mapping[str, int], folder: Path) -> None:
        self._sampler.phase("training")

    def restoring_begin(self, purpose: RestoringPurpose) -> None:
        self._sampler.phase("restoring")

    def restoring_end(self) -> None:
        self._sampler.phase("training")
