"""The observer of a step on a GPU: times, and what the card holds between steps. It takes no memory on the card."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainatomy.gpu.process.job import WARM_UP_STEPS
from trainatomy.gpu.process.reporting import Reporter
from trainatomy.training.observer import Silent

if TYPE_CHECKING:
    from trainatomy.gpu.card.meter import Meter


class EnoughSteps(BaseException):
    """Ends a run whose steps have been timed for long enough. No failure, so no ``Exception`` that a loop may catch."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a run goes on: at most ``steps`` steps; fewer, from ``least`` on, once the timed ones took
    ``seconds``."""

    steps: int
    least: int
    seconds: float

    def over(self, timed: list[float], steps: int) -> bool:
        """Whether ``steps`` steps, of which ``timed`` were timed, are enough."""
        return self.least <= steps < self.steps and sum(timed) >= self.seconds


class Watch(Silent):
    """Reads clock and card at the ends of steps, after waiting for the GPU (which changes nothing in memory).

    A step lasts from the end of the one before to its own end: the Trainer fetches a step's batches before it begins.
    ``step`` and ``phase`` tell where the run is.  Raises ``EnoughSteps`` where ``patience`` is over.
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
        self._began = 0.0
        self._seconds: list[float] = []
        self.warm_up = warm_up
        self.model_bytes: int | None = None
        self.step = -1
        self.phase = "load"

    @property
    def steps(self) -> int:
        """Steps that came to their end."""
        return len(self._seconds)

    @property
    def timed(self) -> list[float]:
        """Seconds of each step after the warm-up."""
        return self._seconds[self.warm_up :]

    @property
    def step_seconds(self) -> float | None:
        """The median of a step, or ``None`` where none ran beyond the warm-up."""
        return median(self.timed) if self.timed else None

    def loaded(self, model: nn.Module) -> None:
        self.model_bytes = torch.cuda.memory_allocated()
        self._reporter.stage("model loaded", self._meter.stage("model loaded"))
        self.phase = "other"

    def ready(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._began = time.perf_counter()

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
        torch.cuda.synchronize()
        self._seconds.append(time.perf_counter() - self._began)
        held = self._meter.read()
        of = self._patience.steps if self._patience else 0
        self._reporter.step(self.steps, of, held)
        if self._patience is not None and self._patience.over(self.timed, self.steps):
            raise EnoughSteps
        self._began = time.perf_counter()

    def failed(self) -> None:
        """The step raised, and the frames of what raised it still hold their tensors."""

    def over(self) -> None:
        """The run is over, however it ended."""
