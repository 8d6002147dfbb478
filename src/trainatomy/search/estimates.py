"""Estimates of candidates that were not executed, from those that were.

Memory and time of a training change with each axis in nearly the same way whatever the other axes are set to: memory
has a part that does not depend on the batch and one that is proportional to it, and an option multiplies the time that
the GPU is busy and the time that the CPU is; the longer of the two is the time of a step.  So the effect of an option
is read off two executed candidates that differ in nothing else, and an unknown candidate is an executed one with the
effects of the options in which they differ.  Between batch sizes, both times are linear in the number of micro-batches.

Estimates decide only what to execute next and what to leave out; no estimate is ever shown.  Each carries a margin,
which widens with the number of effects and with the distance between the batch sizes.  The tests compare what is left
out with whole spaces (``tests/search/test_exploration.py``), and so does ``trainatomy fit --exhaustive``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from trainatomy.results.prediction import Prediction
from trainatomy.search.space import Point, Space

TIME_MARGIN = 0.02
"""Relative margin of a time for each effect that is carried over."""
TIME_MARGIN_PER_OCTAVE = 0.02
"""Further margin for each factor of two between the batch sizes."""
MEMORY_MARGIN = 0.05
"""Margin of the memory that depends on the batch, for each effect that is carried over."""
MEMORY_MARGIN_BYTES = 256 * 2**20
"""Further margin of the memory: what the allocator's rounding and cached blocks may add or save."""

_STATIC = ("weights", "optimizer_states", "gradients", "functionality", "context")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of an executed candidate.

    Attributes:
        point: The candidate.
        prediction: Its prediction.
        seconds: Duration of a step, for each token of a sample where the sequence length varies.
        gpu_seconds: Time that the GPU is busy, per token where ``seconds`` is.
        cpu_seconds: Time that the CPU is busy, likewise.
        static_bytes: Device memory that does not depend on the batch.
        batch_bytes: Device memory that does.
        floor_bytes: Device memory if the allocator held no cache.
        fits: Whether it fits with the headroom.
    """

    point: Point
    prediction: Prediction
    seconds: float
    gpu_seconds: float
    cpu_seconds: float
    static_bytes: int
    batch_bytes: int
    floor_bytes: int
    fits: bool

    @property
    def device_bytes(self) -> int:
        """Device memory at the peak."""
        return self.static_bytes + self.batch_bytes


def outcome_of(point: Point, prediction: Prediction, usable_bytes: int, *, per_token: bool) -> Outcome:
    """Return the figures of an executed candidate.

    Args:
        point: The candidate.
        prediction: Its prediction, with a time.
        usable_bytes: The limit of device memory.
        per_token: Whether times are per token, so that sequences of different lengths can be ranked.
    """
    memory, time = prediction.memory, prediction.time
    assert time is not None
    tokens = 1.0
    if per_token and time.tokens_per_second:
        tokens = time.tokens_per_second / time.samples_per_second
    static = sum(memory.components[name] for name in (*_STATIC, *memory.components.others))
    return Outcome(
        point=point,
        prediction=prediction,
        seconds=time.step_seconds / tokens,
        gpu_seconds=time.gpu_seconds / tokens,
        cpu_seconds=time.host_seconds / tokens,
        static_bytes=static,
        batch_bytes=memory.device_bytes - static,
        floor_bytes=memory.device_bytes - memory.components.cache,
        fits=prediction.fits and memory.device_bytes <= usable_bytes,
    )


class Effect(NamedTuple):
    """The effect of one option instead of another.

    Logarithms of the factors of the GPU's and the CPU's time, and bytes: independent of the batch, and per sample.
    ``batch`` is the batch size at which it was observed.
    """

    log_gpu: float
    log_cpu: float
    static_bytes: float
    sample_bytes: float
    batch: int

    @property
    def is_slower(self) -> bool:
        """True if the option takes at least as much of the GPU's and of the CPU's time as the other."""
        return self.log_gpu >= 0 and self.log_cpu >= 0


class Estimate(NamedTuple):
    """Estimated figures of a candidate, with margins as absolute values."""

    seconds: float
    device_bytes: float
    floor_bytes: float
    seconds_margin: float
    bytes_margin: float

    @property
    def shortest(self) -> float:
        """The least time that is plausible."""
        return self.seconds - self.seconds_margin


@dataclass(slots=True)
class Estimator:
    """Estimates from executed candidates.

    Attributes:
        space: The space that the candidates belong to.
        prior: Estimates of the same space on another GPU, whose effects hold here too, other than its figures.
        outcomes: The executed candidates.
    """

    space: Space
    prior: Estimator | None = None
    outcomes: dict[Point, Outcome] = field(default_factory=dict)
    _effects: dict[tuple[int, str, str], list[Effect]] = field(default_factory=dict)
    _estimates: dict[Point, Estimate | None] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        """Add an executed candidate."""
        self.outcomes[outcome.point] = outcome
        self._effects.clear()
        self._estimates.clear()

    def estimate(self, point: Point) -> Estimate | None:
        """Return the estimate of a candidate, or ``None`` if the effect of one of its options is unknown."""
        if point not in self._estimates:
            near = sorted(self.outcomes.values(), key=lambda outcome: self._distance(outcome.point, point))
            found = (self._from(outcome, point) for outcome in near)
            self._estimates[point] = next((estimate for estimate in found if estimate is not None), None)
        return self._estimates[point]

    def is_dominated(self, point: Point, fitting: Outcome) -> bool:
        """Return whether a candidate cannot be faster than a fitting one with the same batch size.

        That is where every option in which they differ was at least as slow where it was observed.
        """
        if fitting.point[0] != point[0]:
            return False
        effects = [
            self.effect(axis, fitting.point[axis], point[axis], point) for axis in self._differing(fitting, point)
        ]
        return all(effect is not None and effect.is_slower for effect in effects)

    def effect(self, axis: int, old: str, new: str, near: Point) -> Effect | None:
        """Return the effect of an option, observed at the batch size nearest to that of a point."""
        if observed := self._observed(axis, old, new):
            return min(observed, key=lambda effect: abs(math.log2(effect.batch / self.space.batch(near))))
        return self._interpolated(axis, old, new)

    def _differing(self, outcome: Outcome, point: Point) -> list[int]:
        pairs = enumerate(zip(outcome.point, point, strict=True))
        return [axis for axis, (own, other) in pairs if axis and own != other]

    def _observed(self, axis: int, old: str, new: str) -> list[Effect]:
        """Return the effects seen in pairs of candidates that differ in this axis alone, or else the prior ones."""
        key = (axis, old, new)
        if key not in self._effects:
            without = [outcome for outcome in self.outcomes.values() if outcome.point[axis] == old]
            with_it = [self.outcomes.get((*each.point[:axis], new, *each.point[axis + 1 :])) for each in without]
            self._effects[key] = [
                _effect(before, after, self.space.batch(before.point))
                for before, after in zip(without, with_it, strict=True)
                if after is not None
            ] or (self.prior._observed(axis, old, new) if self.prior else [])
        return self._effects[key]

    def _interpolated(self, axis: int, old: str, new: str) -> Effect | None:
        """Return the effect of checkpointing every n-th layer: that share of the effect of checkpointing all layers."""
        if self.space.axes[axis].name != "gradient_checkpointing":
            return None
        if not (observed := self._observed(axis, "off", "on")):
            return None
        found, more, less = observed[0], checkpointed_share(new), checkpointed_share(old)

        def part(log_factor: float) -> float:
            slower = math.expm1(log_factor)
            return math.log1p(more * slower) - math.log1p(less * slower)

        return Effect(
            part(found.log_gpu),
            part(found.log_cpu),
            (more - less) * found.static_bytes,
            (more - less) * found.sample_bytes,
            found.batch,
        )

    def _distance(self, known: Point, point: Point) -> float:
        differing = sum(own != other for own, other in zip(known[1:], point[1:], strict=True))
        return differing + 0.3 * abs(math.log2(self.space.batch(known) / self.space.batch(point)))

    def _from(self, near: Outcome, point: Point) -> Estimate | None:
        """Return the estimate that starts from an executed candidate."""
        old, new = self.space.batch(near.point), self.space.batch(point)
        log_gpu = math.log(near.gpu_seconds) + self._batch_effect(near.point, new)
        log_cpu = math.log(near.cpu_seconds * self._cpu_factor(near.point, new))
        static, sample = float(near.static_bytes), near.batch_bytes / old
        octaves, count = abs(math.log2(new / old)), 0
        if slope := self._slope(near.point):
            static, sample = near.device_bytes - slope * old, slope
        for axis in self._differing(near, point):
            effect = self.effect(axis, near.point[axis], point[axis], point)
            if effect is None:
                return None
            log_gpu += effect.log_gpu
            log_cpu += effect.log_cpu
            static += effect.static_bytes
            sample += effect.sample_bytes
            octaves += abs(math.log2(new / effect.batch))
            count += 1
        overlap = near.seconds / max(near.gpu_seconds, near.cpu_seconds)
        seconds = overlap * math.exp(max(log_gpu, log_cpu))
        variable = max(sample * new, 0.0)
        share_of_floor = near.floor_bytes / near.device_bytes
        return Estimate(
            seconds=seconds,
            device_bytes=static + variable,
            floor_bytes=(static + variable) * share_of_floor,
            seconds_margin=seconds * (TIME_MARGIN * count + TIME_MARGIN_PER_OCTAVE * octaves),
            bytes_margin=MEMORY_MARGIN * (count + (new != old)) * variable + MEMORY_MARGIN_BYTES,
        )

    def _family(self, point: Point) -> list[Outcome]:
        """Return the executed candidates that differ from a point in the batch size at most, by batch size."""
        same = [outcome for outcome in self.outcomes.values() if outcome.point[1:] == point[1:]]
        return sorted(same, key=lambda outcome: self.space.batch(outcome.point))

    def _slope(self, point: Point) -> float | None:
        """Return the bytes per sample between the two nearest batch sizes that were executed, if there are two."""
        family = self._family(point)
        if len(family) < 2:
            return None
        batch = self.space.batch(point)
        near = sorted(family, key=lambda outcome: abs(self.space.batch(outcome.point) - batch))[:2]
        first, second = sorted(near, key=lambda outcome: self.space.batch(outcome.point))
        return (second.device_bytes - first.device_bytes) / (
            self.space.batch(second.point) - self.space.batch(first.point)
        )

    def _batch_effect(self, point: Point, new: int) -> float:
        """Return the logarithm of the factor by which the GPU's time for a step changes with the batch size.

        It is read off the candidates that differ in the batch size alone, or else off any other such series; beyond
        its ends the time is taken as constant.
        """
        old = self.space.batch(point)
        series = self._series(point)
        if len(series) < 2:
            return 0.0
        curve = [(1 / self.space.batch(each.point), each.gpu_seconds) for each in reversed(series)]
        return math.log(_interpolate(curve, 1 / new) / _interpolate(curve, 1 / old))

    def _cpu_factor(self, point: Point, new: int) -> float:
        """Return the factor by which the CPU's time for a step changes with the batch size.

        It is linear in the number of micro-batches, by the two ends of the series; without a series it is taken as
        proportional to them.
        """
        old = self.space.batch(point)
        series = self._series(point)
        if len(series) < 2:
            return old / new
        first, last = series[0], series[-1]
        few, many = 1 / self.space.batch(last.point), 1 / self.space.batch(first.point)
        slope = (first.cpu_seconds - last.cpu_seconds) / (many - few)

        def at(batch: int) -> float:
            return max(last.cpu_seconds + slope * (1 / batch - few), 0.01 * last.cpu_seconds)

        return at(new) / at(old)

    def _series(self, point: Point) -> list[Outcome]:
        """Return candidates that differ in the batch size alone: those of a point, or else the longest series."""
        series = self._family(point)
        return series if len(series) > 1 else max(map(self._family, self.outcomes), key=len, default=[])


def checkpointed_share(option: str) -> float:
    """Return the share of layers that recompute their activations: 0.5 for ``every_2``."""
    if option in ("off", "on"):
        return float(option == "on")
    return 1 / int(option.removeprefix("every_"))


def _effect(before: Outcome, after: Outcome, batch: int) -> Effect:
    return Effect(
        math.log(after.gpu_seconds / before.gpu_seconds),
        math.log(after.cpu_seconds / before.cpu_seconds),
        after.static_bytes - before.static_bytes,
        (after.batch_bytes - before.batch_bytes) / batch,
        batch,
    )


def _interpolate(curve: list[tuple[float, float]], place: float) -> float:
    """Return the value of a piecewise linear curve, constant beyond its ends."""
    if place <= curve[0][0]:
        return curve[0][1]
    for (left, low), (right, high) in pairwise(curve):
        if place <= right:
            return low + (high - low) * (place - left) / (right - left)
    return curve[-1][1]
