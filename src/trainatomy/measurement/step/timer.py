"""Time training steps on the GPU without slowing them down. Takes no GPU memory."""

from __future__ import annotations

import fcntl
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from trainatomy.measurement.process.job import COMPILING_STEPS, WARM_UP_STEPS, Reporter
from trainatomy.measurement.step.instruments import Monitors, Stopwatch
from trainatomy.measurement.step.recorder import GenerationTimes
from trainatomy.results.tasks import RestoringPurpose
from trainatomy.training.loops.generation import cache_size
from trainatomy.training.observer import Observer

if TYPE_CHECKING:
    from trainatomy.measurement.device.meter import Meter
    from trainatomy.measurement.step.group import RankGroup


SYNCHRONIZED_STEPS = 3
"""Steps on several GPUs that are timed with a synchronisation after each."""


class EnoughSteps(BaseException):
    """Ends a run that has been timed for long enough; not an ``Exception``, which a loop might catch."""


@dataclass(frozen=True, slots=True)
class StepLimit:
    """Limits of a run.

    Attributes:
        max_steps: Steps after which it ends at the latest.
        min_steps: Steps from which on it ends where ``seconds`` were timed.
        seconds: Seconds to time.
        quiet: Timed steps do not begin while another process holds a lock on this file.
        until: The time (``time.monotonic``) from which on no further step is timed.
    """

    max_steps: int
    min_steps: int
    seconds: float
    quiet: Path | None = None
    until: float = math.inf

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


def wait_until_unlocked(path: Path) -> None:
    """Wait while another process holds a lock on a file; one that is gone is not waited for."""
    with suppress(OSError), path.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)


def _peaks() -> tuple[int, int]:
    """Return the peaks of allocated and reserved memory so far."""
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


class StepTimer(Observer):
    """Observer that reads GPU memory after warm-up steps and times the steps after them.

    The timed steps run as they would without it: nothing synchronises between them, so the CPU may launch the next
    step while the GPU still works on the one before.  A step lasts from the end of the one before to its own end,
    because the Trainer fetches a step's batches before ``step_begin``.  ``step`` and ``phase`` give the position in the
    run.  Raises ``EnoughSteps`` when ``limit`` is reached.

    The processes of a ``group`` agree at the end of the warm-up on how many steps they time, because a collective waits
    for all of them; after those steps come ``SYNCHRONIZED_STEPS``, each of which ends with the CPU waiting for the GPU.

    Where the model is compiled (``compiles``), peaks are those after the first ``COMPILING_STEPS`` steps, in which
    PyTorch compiles and tries its kernels; ``compiling`` holds the peaks of allocated and reserved memory until then.

    ``monitors`` watch the host's pace, the DataLoader and the GPU's power during the timed steps.  ``is_late`` tells
    that ``limit.until`` ended them.
    """

    def __init__(
        self,
        meter: Meter,
        *,
        warm_up: int = WARM_UP_STEPS,
        reporter: Reporter | None = None,
        limit: StepLimit | None = None,
        group: RankGroup | None = None,
        monitors: Monitors | None = None,
        compiles: bool = False,
    ) -> None:
        self.meter = meter
        self.monitors = monitors or Monitors()
        self.compiling: tuple[int, int] | None = None
        self._compiles = compiles
        self.is_late = False
        self._group = None if group is None or group.size == 1 else group
        self._asynchronous_steps: int | None = None
        self._synchronized: list[float] = []
        self._reporter = reporter or Reporter()
        self._limit = limit
        self._stopwatch = Stopwatch()
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
        if (limit := self._limit) is not None:
            self.is_late = self._group is None and self.steps > self.warm_up and time.monotonic() > limit.until
            if self.is_late or limit.is_reached(self._seconds_since_warm_up(), self.steps):
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
        if self.steps == self.warm_up and (limit := self._limit) is not None:
            if limit.quiet is not None:
                wait_until_unlocked(limit.quiet)
            if self._group is not None:
                self._agree(self._group, limit, now - self._timed_since)
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
        in_time = self.steps + max((limit.until - time.monotonic()) / max(step_seconds, 1e-6) - SYNCHRONIZED_STEPS, 1)
        chosen = min(max(limit.min_steps, wanted), most, in_time)
        self._asynchronous_steps = round(group.agree("steps", chosen))
        self._limit = replace(limit, min_steps=self._asynchronous_steps + SYNCHRONIZED_STEPS, seconds=0.0)

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
