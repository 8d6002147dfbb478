"""The observer of a step on a GPU: times, and what the card holds between steps. It takes no memory on the card."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainatomy.training.observer import Silent

if TYPE_CHECKING:
    from trainatomy.gpu.meter import Meter

WARM_UP_STEPS = 2
"""Steps that load kernels, make optimizer states and grow the allocator's cache; not timed."""


class Watch(Silent):
    """Reads clock and card at the ends of steps, after waiting for the GPU (which changes nothing in memory).

    A step lasts from the end of the one before to its own end: the Trainer fetches a step's batches before it begins.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._began = 0.0
        self._seconds: list[float] = []
        self.model_bytes: int | None = None

    @property
    def steps(self) -> int:
        """Steps that came to their end."""
        return len(self._seconds)

    @property
    def step_seconds(self) -> float | None:
        """The median of a step, or ``None`` where none ran beyond the warm-up."""
        timed = self._seconds[WARM_UP_STEPS:]
        return median(timed) if timed else None

    def loaded(self, model: nn.Module) -> None:
        self.model_bytes = torch.cuda.memory_allocated()
        self._meter.read()

    def ready(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._began = time.perf_counter()

    def step_end(self, step: int) -> None:
        torch.cuda.synchronize()
        self._seconds.append(time.perf_counter() - self._began)
        self._meter.read()
        self._began = time.perf_counter()
