"""The observer of a step on a GPU: times, and what the card holds between steps. It takes no memory on the card."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainatomy.measurement.process.job import WARM_UP_STEPS
from trainatomy.measurement.process.reporting import Reporter
from trainatomy.measurement.step.stopwatch import Stopwatch
from trainatomy.training.observer import Silent

if TYPE_CHECKING:
    from trainatomy.measurement.device.meter import Meter


class EnoughSteps(BaseException):
    """Ends a run whose steps have been timed for long enough. No failure, so no ``Exception`` that a loop may catch."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a run goes on: at most ``steps`` steps; fewer, from ``least`` on, once the timed ones took
    ``seconds``."""

    steps: int
    least: int
    seconds: float

    def over(self, seconds: float, steps: int) -> bool:
        """Whether ``steps`` steps, of which those that are timed took ``seconds``, are enough."""
        return self.least <= steps < self.steps and seconds >= self.seconds


class Watch(Silent):
    """Reads the card at the ends of warm-up steps, and the GPU's own time stamps at the ends of the steps after them.

    The steps that are timed run as they would unwatched: nothing waits for the GPU between them, so the host may issue
    a step's beginning while the GPU is still at the end of the one before.  A step lasts from the end of the one before
    to its own end: the Trainer fetches a step's batches before it begins.  ``step`` and ``phase`` tell where the run
    is.  Raises ``EnoughSteps`` where ``patience`` is over.
    """

    def __init__(
        self,
        meter: Meter,
        *,
        warm_up: int = WARM_UP_STEPS,
        reporter: Reporter | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._meter = meter
        self._reporter = reporter or Reporter()
        self._patience = patience
        self._clock = Stopwatch()
        self._timed_since = 0.0
        self.steps = 0
        self.warm_up = warm_up
        self.model_bytes: int | None = None
        self.step = -1
        self.phase = "load"

    @property
    def timed(self) -> list[float]:
        """Seconds of each step after the warm-up."""
        return self._clock.seconds

    @property
    def step_seconds(self) -> float | None:
        """The median of the steps after the warm-up; ``None`` where there are none."""
        return median(self.timed) if self.timed else None

    def loaded(self, model: nn.Module) -> None:
        self.model_bytes = torch.cuda.memory_allocated()
        self._reporter.stage("model loaded", self._meter.stage("model loaded"))
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

    def step_end(self, step: int) -> None:
        self.steps += 1
        held = self._warmed() if self.steps <= self.warm_up else None
        if self.steps >= self.warm_up:
            self._clock.tick()
        self._reporter.step(self.steps, self._patience.steps if self._patience else 0, held)
        if self._patience is not None and self._patience.over(self._timed_for(), self.steps):
            raise EnoughSteps

    def _warmed(self) -> int | None:
        torch.cuda.synchronize()
        self._timed_since = time.perf_counter()
        return self._meter.read()

    def _timed_for(self) -> float:
        """Seconds of the host since the last wait, 0 during the warm-up; the GPU, which is behind the host, takes as
        long or longer for these steps."""
        return time.perf_counter() - self._timed_since if self.steps > self.warm_up else 0.0

    def failed(self) -> None:
        """The step raised, and the frames of what raised it still hold their tensors."""

    def over(self) -> None:
        """The run is over, however it ended."""
        self._clock.finish()
