"""Figures of executed candidates, and the effects of options that they show.

What a training holds at the moments that may become its peak.

The peak of a training is that of one moment, and another moment is the peak after a change of settings: with AdamW it
may be the optimizer's step, in which gradient checkpointing saves nothing, and with LoRA the end of forward, where it
saves most.  So an executed candidate is kept as the moments that would be its peak if some of what it holds weighed
nothing, each with what it holds by part.  A change makes parts smaller or larger, and the largest moment is the peak.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import NamedTuple

from trainatomy.results.memory import OUTSIDE
from trainatomy.results.prediction import Prediction
from trainatomy.search.space import Point

_TEMPORARY = "temporary"
_VARYING = 5
"""Parts, the largest ones, whose moments are kept in case they shrink."""
_ALWAYS_HELD = "optimizer_states"
"""A part that is held at every moment once it exists."""
ACTIVATIONS = frozenset({"activations", *(f"{_TEMPORARY} {phase}" for phase in ("forward", "recompute", "backward"))})
"""Parts that are about proportional to the batch."""


class Moment(NamedTuple):
    """Bytes by part at an instant: components without cache, with temporary buffers apart for each phase."""

    phase: str
    parts: Mapping[str, float]


class Need(NamedTuple):
    """What parts take at the peak, how much of that and of the cache grows with the batch, and the cache."""

    held_bytes: float
    by_batch_bytes: float
    cache_bytes: float


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of a training.

    Attributes:
        moments: What it holds at those moments that may become its peak.
        largest: The most that each part takes.
        cache_bytes: What the allocator keeps in its cache at the peak.
    """

    moments: tuple[Moment, ...]
    largest: Mapping[str, float]
    cache_bytes: float

    def resized(self, sizes: Mapping[str, float]) -> Need:
        """Return what a training needs of which each part takes at most these sizes instead."""
        largest = self.largest
        new = 0.0 if _ALWAYS_HELD in largest else sizes.get(_ALWAYS_HELD, 0.0)
        totals = []
        for moment in self.moments:
            parts = {part: size * sizes[part] / largest[part] for part, size in moment.parts.items()}
            totals.append((sum(parts.values()) + new, _by_batch(parts)))
        held, by_batch = max(totals)
        passing = _by_batch(largest)  # the cache is what was freed of it
        cache = self.cache_bytes * min(_by_batch(sizes) / passing, 1.0) if passing else self.cache_bytes
        return Need(held, by_batch + cache, cache)


def footprint_of(prediction: Prediction) -> Footprint:
    """Return the footprint of a training by its timeline, or without one by its peak alone."""
    memory = prediction.memory
    at_peak = memory.components.as_dict()
    cache = at_peak.pop("cache")
    outside = {name: at_peak[name] for name in ("context", *OUTSIDE) if name in at_peak}
    moments = [_moment(point.phase, {**point.components, **outside}) for point in prediction.timeline]
    moments = moments or [_moment(memory.peak.phase, at_peak)]
    largest = _largest(moments)
    return Footprint(_decisive(moments, largest), largest, cache)


def grows_with_batch(part: str) -> bool:
    """Return whether a part is about proportional to the batch size."""
    return part in ACTIVATIONS


def _by_batch(parts: Mapping[str, float]) -> float:
    return sum(size for part, size in parts.items() if grows_with_batch(part))


def _moment(phase: str, components: Mapping[str, int]) -> Moment:
    parts = {(f"{name} {phase}" if name == _TEMPORARY else name): float(size) for name, size in components.items()}
    return Moment(phase, {part: size for part, size in parts.items() if size})


def _largest(moments: Iterable[Moment]) -> dict[str, float]:
    """Return the most that each part takes."""
    found: dict[str, float] = {}
    for moment in moments:
        for part, size in moment.parts.items():
            found[part] = max(size, found.get(part, 0.0))
    return found


def _decisive(moments: Sequence[Moment], largest: Mapping[str, float]) -> tuple[Moment, ...]:
    """Return the moments that are the peak of their phase, or would be if some of the largest parts were nothing."""
    varying = sorted(largest, key=lambda part: -largest[part])[:_VARYING]
    by_phase: dict[str, dict[tuple[float, ...], int]] = {}
    for place, moment in enumerate(moments):
        sizes = tuple(moment.parts.get(part, 0.0) for part in varying)
        by_phase.setdefault(moment.phase, {}).setdefault((*sizes, sum(moment.parts.values()) - sum(sizes)), place)
    highest = zip(*(_highest_without(list(some), list(some.values())) for some in by_phase.values()), strict=True)
    return tuple(moments[place] for place in dict.fromkeys(chain.from_iterable(highest)))


def _highest_without(rows: Sequence[tuple[float, ...]], places: Sequence[int]) -> list[int]:
    """Return the place of the row with the largest sum: without none of its parts, without one, and so on.

    The last number of a row stays in each sum.  Bytes are whole numbers: in which order they are added is no matter.
    """
    sums: dict[tuple[int, ...], list[float]] = {(): [sum(row) for row in rows]}
    *parts, _ = zip(*rows, strict=True)
    for count in range(1, len(parts)):
        for without in combinations(range(len(parts)), count):
            left = sums[without[:-1]]
            sums[without] = [total - size for total, size in zip(left, parts[without[-1]], strict=True)]
    return [places[totals.index(max(totals))] for totals in sums.values()]


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
