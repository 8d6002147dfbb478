"""Estimates of candidates that were not executed, from those that were.

An option changes time and memory in nearly the same way whatever the other axes are set to: it multiplies the time
that the GPU is busy and the time that the CPU is, the longer of which is the time of a step, and it makes parts of the
memory smaller or larger (``outcomes.py``).  So the effect of an option is read off two executed candidates that differ
in nothing else, and an unknown candidate is an executed one with the effects of the options in which they differ.
Between batch sizes, both times are linear in the number of micro-batches, and parts of the memory in the batch size.

Estimates decide only what to execute next and what to leave out; no estimate is ever shown.  Times carry a margin,
which widens with the number of effects and with the distance between the batch sizes.  Memory is the least that is
plausible: of two changes of one part it is not known whether their savings add or multiply, so the smaller result
counts; and what an option adds to a part counts only if that part was as large where the option was seen.  The tests
compare what is left out with whole spaces (``tests/search/test_exploration.py``, ``test_peaks.py``), and so does
``trainatomy fit --exhaustive``.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trainatomy.lookup import on_line
from trainatomy.search.outcomes import Effect, Outcome, effect_between, grows_with_batch
from trainatomy.search.space import Point, Space

TIME_MARGIN = 0.02
"""Relative margin of a time for each effect that is carried over."""
TIME_MARGIN_PER_OCTAVE = 0.02
"""Further margin for each factor of two between the batch sizes."""
MEMORY_MARGIN = 0.05
"""Margin of the memory that depends on the batch, for each effect that is carried over."""
MEMORY_MARGIN_BYTES = 256 * 2**20
"""Further margin of the memory: what the allocator's rounding and cached blocks may add or save."""
_ALIKE = 0.1
"""Share by which a part may differ between two candidates in which an option adds the same to it."""
_AS_NEAR = 0.5
"""Distance up to which further candidates count as near as the nearest one."""


class Estimate(NamedTuple):
    """Estimated figures of a candidate, memory at the least, with margins as absolute values."""

    seconds: float
    device_bytes: float
    floor_bytes: float
    seconds_margin: float
    bytes_margin: float

    @property
    def least_bytes(self) -> float:
        """The least device memory that is plausible."""
        return self.device_bytes - self.bytes_margin

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
    _families: dict[Point, list[Outcome]] = field(default_factory=dict)
    _effects: dict[tuple[int, str, str], list[Effect]] = field(default_factory=dict)
    _estimates: dict[Point, Estimate | None] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        """Add an executed candidate."""
        self.outcomes[outcome.point] = outcome
        insort(self._families.setdefault(outcome.point[1:], []), outcome, key=lambda each: self.space.batch(each.point))
        self._effects.clear()
        self._estimates.clear()

    def estimate(self, point: Point) -> Estimate | None:
        """Return the estimate of a candidate, or ``None`` if the effect of one of its options is unknown."""
        if point not in self._estimates:
            self._estimates[point] = self._estimated(point)
        return self._estimates[point]

    def _estimated(self, point: Point) -> Estimate | None:
        """Return the estimate from the nearest candidate, with the least memory by one that is about as near."""
        distances = (
            (self.distance(each.point, point), place, each) for place, each in enumerate(self.outcomes.values())
        )
        found: Estimate | None = None
        limit = math.inf
        for distance, _, outcome in sorted(distances):
            if distance > limit:
                break
            if (estimate := self._from(outcome, point)) is None:
                continue
            if found is None:
                found, limit = estimate, distance + _AS_NEAR
            elif estimate.least_bytes < found.least_bytes:
                found = estimate._replace(seconds=found.seconds, seconds_margin=found.seconds_margin)
        return found

    def is_dominated(self, point: Point, fitting: Outcome) -> bool:
        """Return whether a candidate cannot be faster than a fitting one with the same batch size.

        That is where every option in which they differ was at least as slow where it was observed.
        """
        if fitting.point[0] != point[0]:
            return False
        return all(effect is not None and effect.is_slower for effect in self._effects_between(fitting, point))

    def needs_as_much(self, point: Point, other: Outcome) -> bool:
        """Return whether a candidate cannot need less than another one: no option in which they differ saves memory."""
        if self.space.batch(point) < self.space.batch(other.point):
            return False
        return all(effect is not None and not effect.saves_memory for effect in self._effects_between(other, point))

    def _effects_between(self, outcome: Outcome, point: Point) -> Iterator[Effect | None]:
        """Yield the effect of each option in which a point differs from an executed one."""
        for axis in self._differing(outcome, point):
            yield self.effect(axis, outcome.point[axis], point[axis], point)

    def effect(self, axis: int, old: str, new: str, near: Point) -> Effect | None:
        """Return the effect of an option, seen in the candidates nearest to a point."""
        if observed := self._observed(axis, old, new):
            return self._nearest(observed, near)
        return self._interpolated(axis, old, new, near)

    def _nearest(self, observed: Sequence[Effect], point: Point) -> Effect:
        return min(observed, key=lambda effect: self.distance(effect.seen_at, point))

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
                effect_between(before, after, self.space.batch(before.point))
                for before, after in zip(without, with_it, strict=True)
                if after is not None
            ] or (self.prior._observed(axis, old, new) if self.prior else [])
        return self._effects[key]

    def _interpolated(self, axis: int, old: str, new: str, near: Point) -> Effect | None:
        """Return the effect of checkpointing every n-th layer: that share of the effect of checkpointing all layers."""
        if self.space.axes[axis].name != "gradient_checkpointing":
            return None
        if not (observed := self._observed(axis, "off", "on")):
            return None
        seen, more, less = self._nearest(observed, near), checkpointed_share(new), checkpointed_share(old)

        def part(log_factor: float) -> float:
            slower = math.expm1(log_factor)
            return math.log1p(more * slower) - math.log1p(less * slower)

        def held(share: float) -> dict[str, float]:
            before, after = seen.before, seen.after
            return {name: (1 - share) * before.get(name, 0) + share * after.get(name, 0) for name in {*before, *after}}

        return seen._replace(
            log_gpu=part(seen.log_gpu), log_cpu=part(seen.log_cpu), before=held(less), after=held(more)
        )

    def distance(self, known: Point, point: Point) -> float:
        """Return how much two candidates differ: in how many options, and by how many factors of two in the batch."""
        differing = sum(own != other for own, other in zip(known[1:], point[1:], strict=True))
        return differing + 0.3 * abs(math.log2(self.space.batch(known) / self.space.batch(point)))

    def _from(self, near: Outcome, point: Point) -> Estimate | None:
        """Return the estimate that starts from an executed candidate."""
        old, new = self.space.batch(near.point), self.space.batch(point)
        log_gpu = math.log(near.gpu_seconds) + self._batch_effect(near.point, new)
        log_cpu = math.log(near.cpu_seconds * self._cpu_factor(near.point, new))
        octaves, effects = abs(math.log2(new / old)), list[Effect]()
        for effect in self._effects_between(near, point):
            if effect is None:
                return None
            log_gpu += effect.log_gpu
            log_cpu += effect.log_cpu
            octaves += abs(math.log2(new / effect.batch))
            effects.append(effect)
        overlap = near.seconds / max(near.gpu_seconds, near.cpu_seconds)
        seconds = overlap * math.exp(max(log_gpu, log_cpu))
        need, count = near.footprint.resized(self._sizes(near, point, effects)), len(effects)
        return Estimate(
            seconds=seconds,
            device_bytes=need.held_bytes + need.cache_bytes,
            floor_bytes=need.held_bytes,
            seconds_margin=seconds * (TIME_MARGIN * count + TIME_MARGIN_PER_OCTAVE * octaves),
            bytes_margin=MEMORY_MARGIN * (count + (new != old)) * need.by_batch_bytes + MEMORY_MARGIN_BYTES,
        )

    def _sizes(self, near: Outcome, point: Point, effects: Sequence[Effect]) -> dict[str, float]:
        """Return the least that each part may take: what it takes in a near candidate, with another batch and effects.

        What options save multiplies.  Of what they add, only the most that is known counts.
        """
        batch = self.space.batch(point)
        sizes = self._with_batch(near, batch)
        for part in {*sizes, *(part for effect in effects for part in effect.after)}:
            size, factor, added = sizes.get(part, 0.0), 1.0, 0.0
            for effect in effects:
                before, after = effect.sizes(part, batch)
                if after <= before:
                    factor *= after / before if before else 1.0
                elif self._adds_as_much(effect, near, point, part, effects):
                    added = max(added, min(after - before, size * (after / before - 1)) if before else after)
            sizes[part] = (size + added) * factor
        return sizes

    def _adds_as_much(self, effect: Effect, near: Outcome, point: Point, part: str, effects: Sequence[Effect]) -> bool:
        """Return whether an option adds to a part what it added where it was seen, or more.

        It does where nothing else differs, or where it was seen in the near candidate and everything else adds to the
        part, too.  Otherwise another option may leave less of the part, which need not show where the effects were
        seen: of activations that are recomputed anyway, LoRA saves none.  Only parts that no batch makes larger are as
        independent as they look.
        """
        if sum(own != other for own, other in zip(effect.seen_at[1:], point[1:], strict=True)) == 1:
            return True
        if effect.seen_at[1:] == near.point[1:] and all(other.adds_to(part) for other in effects):
            return True
        before, size = effect.before.get(part, 0.0), near.footprint.largest.get(part, 0.0)
        return not grows_with_batch(part) and before > 0 and abs(size - before) <= _ALIKE * max(size, before)

    def _with_batch(self, near: Outcome, batch: int) -> dict[str, float]:
        """Return what each part takes with another batch size: by the line through two sizes that were executed."""
        old, sizes = self.space.batch(near.point), near.footprint.largest
        if batch == old:
            return dict(sizes)
        known = sorted(self._family(near.point), key=lambda other: abs(self.space.batch(other.point) - old))
        if len(known) < 2:
            return {part: size * (batch / old if grows_with_batch(part) else 1.0) for part, size in sizes.items()}
        other, run = known[1].footprint.largest, batch - old
        per_sample = {
            part: (other.get(part, 0.0) - size) / (self.space.batch(known[1].point) - old)
            for part, size in sizes.items()
        }
        return {part: max(size + per_sample[part] * run, 0.0) for part, size in sizes.items()}

    def _family(self, point: Point) -> list[Outcome]:
        """Return the executed candidates that differ from a point in the batch size at most, by batch size."""
        return self._families.get(point[1:], [])

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
        return math.log(on_line(curve, 1 / new) / on_line(curve, 1 / old))

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
        return series if len(series) > 1 else max(self._families.values(), key=len, default=[])


def checkpointed_share(option: str) -> float:
    """Return the share of layers that recompute their activations: 0.5 for ``every_2``."""
    if option in ("off", "on"):
        return float(option == "on")
    return 1 / int(option.removeprefix("every_"))
