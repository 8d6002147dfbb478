"""Time training steps on the GPU without slowing them down. Takes no GPU memory.

Time steps on the GPU by CUDA events, without waiting for them.  Takes no GPU memory.

Time how long each step of a training waits for its DataLoader, on the CPU and on the GPU.

Around each fetch of a batch an event is recorded on the GPU.  The GPU passes the first one when it has finished the
work before it, and the second one when it gets there and the batch has arrived: what lies between them is time in which
the GPU had nothing to do because of the data.

Monitors beside the steps of a measured run: the host's pace, waiting for data, and the GPU's power.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import dataloader

from trainatomy.measurement.device.power import power_use
from trainatomy.measurement.process.job import COMPILING_STEPS, WARM_UP_STEPS, Reporter
from trainatomy.measurement.step.recorder import GenerationTimes
from trainatomy.results.loader import DataWait
from trainatomy.training.loops.generation import cache_size
from trainatomy.training.observer import Silent

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from trainatomy.measurement.device.host import HostProbe
    from trainatomy.measurement.device.meter import Meter
    from trainatomy.measurement.device.power import PowerSampler
    from trainatomy.measurement.step.group import RankGroup
    from trainatomy.results.measurement import HostPace, PowerUse
    from trainatomy.results.tasks import RestoringPurpose


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


SYNCHRONIZED_STEPS = 3
"""Steps on several GPUs that are timed with a synchronisation after each."""


class EnoughSteps(BaseException):
    """Ends a run that has been timed for long enough; not an ``Exception``, which a loop might catch."""


@dataclass(frozen=True, slots=True)
class StepLimit:
    """Limits on the length of a run: at most ``max_steps``; from ``min_steps`` on, until ``seconds`` were timed."""

    max_steps: int
    min_steps: int
    seconds: float

    def is_reached(self, seconds: float, steps: int) -> bool:
        """Return whether to stop early after ``steps`` steps, of which the timed ones took ``seconds``."""
        return self.min_steps <= steps < self.max_steps and seconds >= self.seconds


class EvaluationStart(NamedTuple):
    """Number of batches, peaks of memory so far, and the time at which an evaluation began."""

    batches: int
    allocated_bytes: int
    reserved_bytes: int
    began: float


class EvaluationFigures(NamedTuple):
    """Number of batches, peaks of memory before and after an evaluation, and its duration."""

    batches: int
    allocated_before_bytes: int
    reserved_before_bytes: int
    allocated_after_bytes: int
    reserved_after_bytes: int
    seconds: float


def _peaks() -> tuple[int, int]:
    """Return the peaks of allocated and reserved memory so far."""
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


class StepTimer(Silent):
    """Observer that reads GPU memory after warm-up steps and times the steps after them.

    The timed steps run as they would without it: nothing synchronises between them, so the CPU may launch the next
    step while the GPU still works on the one before.  A step lasts from the end of the one before to its own end,
    because the Trainer fetches a step's batches before ``step_begin``.  ``step`` and ``phase`` give the position in the
    run.  Raises ``EnoughSteps`` when ``limit`` is reached.

    The processes of a ``group`` agree at the end of the warm-up on how many steps they time, because a collective waits
    for all of them; after those steps come ``SYNCHRONIZED_STEPS``, each of which ends with the CPU waiting for the GPU.

    Where the model is compiled (``compiles``), peaks are those after the first ``COMPILING_STEPS`` steps, in which
    PyTorch compiles and tries its kernels; ``compiling`` holds the peaks of allocated and reserved memory until then.

    ``monitors`` watch the host's pace, the DataLoader and the GPU's power during the timed steps.
    """

    def __init__(
        self,
        meter: Meter,
        *,
        warm_up: int = WARM_UP_STEPS,
        reporter: Reporter | None = None,
        limit: StepLimit | None = None,
        device: int | None = None,
        group: RankGroup | None = None,
        monitors: Monitors | None = None,
        compiles: bool = False,
    ) -> None:
        self.meter = meter
        self.monitors = monitors or Monitors()
        self.compiling: tuple[int, int] | None = None
        self._compiles = compiles
        self._group = None if group is None or group.size == 1 else group
        self._asynchronous_steps: int | None = None
        self._synchronized: list[float] = []
        self._reporter = reporter or Reporter()
        self._limit = limit
        self._stopwatch = Stopwatch(device)
        self._timed_since = 0.0
        self.steps = 0
        self.warm_up = warm_up
        self.model_bytes: int | None = None
        self.step = -1
        self.phase = "load"
        self.generation = GenerationTimes()
        self.saved: tuple[dict[str, int], int, int] | None = None
        self._before_saving = 0
        self.restored: dict[RestoringPurpose, tuple[int, int]] = {}
        self._restoring: RestoringPurpose = "resume"
        self.evaluation: EvaluationFigures | None = None
        self._evaluation: EvaluationStart | None = None

    @property
    def timed_seconds(self) -> list[float]:
        """Seconds of each step after the warm-up."""
        return self._stopwatch.seconds

    @property
    def step_seconds(self) -> float | None:
        """Median of the steps after the warm-up; ``None`` if there are none."""
        return median(self.timed_seconds) if self.timed_seconds else None

    @property
    def mean_step_seconds(self) -> float | None:
        """Mean of the steps after the warm-up; ``None`` if there are none."""
        return fmean(self.timed_seconds) if self.timed_seconds else None

    @property
    def synchronized_step_seconds(self) -> float | None:
        """Median of the steps after which the CPU waited for the GPU; ``None`` if there are none."""
        return median(self._synchronized) if self._synchronized else None

    def loaded(self, model: nn.Module) -> None:
        self.monitors.prepare()
        self.model_bytes = torch.cuda.memory_allocated()
        self._reporter.stage("model loaded", self.meter.stage("model loaded"))
        self.phase = "other"

    def step_begin(self, step: int) -> None:
        self.step = step

    def micro_step_begin(self, micro_step: int) -> None:
        self.phase = "forward"

    def forward_end(self) -> None:
        self.phase = "backward"

    def micro_step_end(self, micro_step: int) -> None:
        self.phase = "other"

    def optimizer_begin(self) -> None:
        self.phase = "optimizer"

    def optimizer_end(self) -> None:
        self.phase = "other"

    def evaluates_after(self, step: int) -> bool:
        return step + 2 == self.warm_up

    def evaluation_begin(self, batches: int) -> None:
        torch.cuda.synchronize()
        self.phase = "evaluation"
        self._evaluation = EvaluationStart(batches, *_peaks(), time.perf_counter())

    def evaluation_end(self) -> None:
        torch.cuda.synchronize()
        self.phase = "other"
        assert self._evaluation is not None
        batches, allocated, reserved, began = self._evaluation
        self.meter.read()
        self.evaluation = EvaluationFigures(
            batches, allocated, reserved, *_peaks(), seconds=time.perf_counter() - began
        )
        self._timed_since = time.perf_counter()

    def saving_begin(self) -> None:
        self.phase = "saving"
        self._before_saving = torch.cuda.max_memory_allocated()

    def saving_end(self, files: Mapping[str, int], folder: Path) -> None:
        self.phase = "other"
        self.saved = dict(files), self._before_saving, torch.cuda.max_memory_allocated()

    def restoring_begin(self, purpose: RestoringPurpose) -> None:
        self.phase = "restoring"
        self._restoring = purpose
        self.restored.setdefault(purpose, (torch.cuda.max_memory_allocated(), 0))

    def restoring_end(self) -> None:
        self.phase = "other"
        before, _ = self.restored[self._restoring]
        self.restored[self._restoring] = before, torch.cuda.max_memory_allocated()

    def generation_begin(self, tokens: int) -> None:
        self.phase = "prefill"
        self.generation.began(tokens)

    def token_begin(self, token: int) -> None:
        self.phase = "decode"
        if token == 1:
            self.generation.first_token()

    def cached(self, tensors: list[torch.Tensor]) -> None:
        if tensors:
            self.generation.cache = cache_size(tensors)

    def generation_end(self) -> None:
        self.phase = "other"
        self.generation.ended()

    def step_end(self, step: int) -> None:
        self.steps += 1
        held = self._end_warm_up_step() if self.steps <= self.warm_up else None
        if self._asynchronous_steps is not None and self.steps > self._asynchronous_steps:
            self._end_synchronized_step()
        elif self.steps >= self.warm_up:
            self._tick()
        self._reporter.step(self.steps, self._limit.max_steps if self._limit else 0, held)
        if self._limit is not None and self._limit.is_reached(self._seconds_since_warm_up(), self.steps):
            raise EnoughSteps
        if self.steps == self._asynchronous_steps:
            torch.cuda.synchronize()
            self._timed_since = time.perf_counter()

    def finish(self) -> None:
        """Read the remaining times after the run, however it ended."""
        self._stopwatch.finish()
        self.monitors.end()

    def _end_warm_up_step(self) -> int | None:
        torch.cuda.synchronize()
        now = time.perf_counter()
        if self._compiles and self.steps == COMPILING_STEPS:
            self._end_compiling()
        if self.steps == self.warm_up and self._group is not None and self._limit is not None:
            self._agree(self._group, self._limit, now - self._timed_since)
        self._timed_since = time.perf_counter()
        return self.meter.read()

    def _end_compiling(self) -> None:
        """Let the peak of allocated memory begin anew: compiling allocates what no later step does.

        The allocator keeps its cache, as in any training, so that reserved memory counts from the start.
        """
        self.compiling = _peaks()
        torch.cuda.reset_peak_memory_stats()

    def _tick(self) -> None:
        """Take the time at the end of a step; the one that ends the warm-up begins the first timed step."""
        if self.steps == self.warm_up:
            self.monitors.begin(self._stopwatch, self.steps)
        self._stopwatch.tick()
        if self.steps > self.warm_up:
            self.monitors.step_ended()

    def _agree(self, group: RankGroup, limit: StepLimit, step_seconds: float) -> None:
        """Set the number of steps in all ranks alike, from rank 0's time of the last step of the warm-up."""
        if limit.max_steps <= limit.min_steps:
            return  # exactly as many as were asked for
        wanted = self.steps + math.ceil(limit.seconds / max(step_seconds, 1e-6))
        most = limit.max_steps - SYNCHRONIZED_STEPS
        self._asynchronous_steps = round(group.agree("steps", min(max(limit.min_steps, wanted), most)))
        self._limit = StepLimit(limit.max_steps, self._asynchronous_steps + SYNCHRONIZED_STEPS, 0.0)

    def _end_synchronized_step(self) -> None:
        torch.cuda.synchronize()
        now = time.perf_counter()
        self._synchronized.append(now - self._timed_since)
        self._timed_since = now

    def _seconds_since_warm_up(self) -> float:
        """Return CPU seconds since the last synchronisation, 0 during the warm-up.

        The GPU, which is behind the CPU, takes at least as long for these steps.
        """
        return time.perf_counter() - self._timed_since if self.steps > self.warm_up else 0.0
