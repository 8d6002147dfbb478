"""Figures of executed candidates, and the effects of options that they show."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from trainatomy.results.prediction import Prediction
from trainatomy.search.footprint import Footprint, footprint_of, grows_with_batch
from trainatomy.search.space import Point

_SAVING_BYTES = 16 * 2**20
"""What an option must save in some part to count as one that saves memory."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of an executed candidate.

    Attributes:
        point: The candidate.
        prediction: Its prediction.
        seconds: Duration of a step, for each token of a sample where the sequence length varies.
        gpu_seconds: Time that the GPU is busy, per token where ``seconds`` is.
        cpu_seconds: Time that the CPU is busy, likewise.
        footprint: What it holds at the moments that may become its peak.
        floor_bytes: Device memory if the allocator held no cache.
        fits: Whether it fits with the headroom.
    """

    point: Point
    prediction: Prediction
    seconds: float
    gpu_seconds: float
    cpu_seconds: float
    footprint: Footprint
    floor_bytes: int
    fits: bool

    @property
    def device_bytes(self) -> int:
        """Device memory at the peak."""
        return self.prediction.memory.device_bytes


def outcome_of(point: Point, prediction: Prediction, usable_bytes: int, *, per_token: bool) -> Outcome:
    """Return the figures of an executed candidate.

    Args:
        point: The candidate.
        prediction: Its prediction, with a time and a timeline.
        usable_bytes: The limit of device memory.
        per_token: Whether times are per token, so that sequences of different lengths can be ranked.
    """
    memory, time = prediction.memory, prediction.time
    assert time is not None
    tokens = 1.0
    if per_token and time.tokens_per_second:
        tokens = time.tokens_per_second / time.samples_per_second
    return Outcome(
        point=point,
        prediction=replace(prediction, timeline=()),
        seconds=time.step_seconds / tokens,
        gpu_seconds=time.gpu_seconds / tokens,
        cpu_seconds=time.host_seconds / tokens,
        footprint=footprint_of(prediction),
        floor_bytes=memory.device_bytes - memory.components.cache,
        fits=prediction.fits and memory.device_bytes <= usable_bytes,
    )


class Effect(NamedTuple):
    """The effect of one option instead of another, in two executed candidates that differ in nothing else.

    Logarithms of the factors of the GPU's and the CPU's time, the bytes of each part before and after, the batch size,
    and the candidate before.
    """

    log_gpu: float
    log_cpu: float
    before: Mapping[str, float]
    after: Mapping[str, float]
    batch: int
    seen_at: Point

    @property
    def is_slower(self) -> bool:
        """True if the option takes at least as much of the GPU's and of the CPU's time as the other."""
        return self.log_gpu >= 0 and self.log_cpu >= 0

    def sizes(self, part: str, batch: int) -> tuple[float, float]:
        """Return the bytes of a part before and after, at a batch size."""
        scale = batch / self.batch if grows_with_batch(part) else 1.0
        return self.before.get(part, 0.0) * scale, self.after.get(part, 0.0) * scale

    def adds_to(self, part: str) -> bool:
        """Return whether the option makes a part larger."""
        return self.after.get(part, 0.0) > self.before.get(part, 0.0)

    @property
    def saves_memory(self) -> bool:
        """True if the option makes some part smaller, whether that is at the peak or not."""
        return any(size - self.after.get(part, 0.0) > _SAVING_BYTES for part, size in self.before.items())


def effect_between(before: Outcome, after: Outcome, batch: int) -> Effect:
    """Return the effect of the option in which two candidates of a batch size differ."""
    return Effect(
        math.log(after.gpu_seconds / before.gpu_seconds),
        math.log(after.cpu_seconds / before.cpu_seconds),
        before.footprint.largest,
        after.footprint.largest,
        batch,
        before.point,
    )
