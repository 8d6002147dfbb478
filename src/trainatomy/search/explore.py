"""Best-first exploration of a space: execute the candidate that promises most until no other one can win.

First the workload is executed at two batch sizes, at the largest one that should fit, and at smaller ones, which may be
faster.  If it fits at none, the search begins at the candidate with all that saves memory.  At the fastest batch size,
every option is tried on its own, which shows what it does to memory and time.  From then on the candidate with the
shortest estimated step is executed, unless it is left out for one of these reasons:

- *too large*: the least memory that it may need by its estimate exceeds the limit (``estimates.py``);
- *slower*: its estimated step takes longer than the best one that fits, by more than the margin;
- *dominated*: it differs from a fitting candidate of the same batch size only in options that were at least as slow
  where they were tried, so it cannot be faster; or an option that was at least as slow as another one of its axis, and
  saved no memory, at the peak or elsewhere, is not tried again.

Allocator settings and emptying the cache are tried only where the plain candidate does not fit, and only if its tensors
alone would.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from trainatomy.results.fit import SearchCounts
from trainatomy.search.estimates import Estimate
from trainatomy.search.execution import Execution
from trainatomy.search.outcomes import Outcome
from trainatomy.search.space import Point

RESCUES = frozenset({"allocator", "torch_empty_cache_steps"})
"""Axes that are of use only where memory is short: they change how tensors are cached, not which exist."""
DERIVED = frozenset({"every_3", "every_4"})
"""Options whose effect follows from that of others, so that they are not tried on their own."""

Reason = Literal["too_large", "slower", "dominated"]


@dataclass(slots=True)
class Exploration(Execution):
    """A search in progress.

    Attributes:
        wanted_later: Returns candidates that will be executed after the search, if its best one is that point.
        live: Options by axis that are still considered.
        reasons: Why each candidate that was not executed was left out.
    """

    wanted_later: Callable[[Point], Iterable[Point]] = lambda point: ()
    live: dict[str, set[str]] = field(init=False)
    reasons: dict[Point, Reason] = field(default_factory=dict)
    _began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        Execution.__post_init__(self)
        self.live = {axis.name: set(self.space.options(axis)) for axis in self.space.axes}

    def explore(self) -> None:
        """Execute candidates until no other one can win.

        Raises:
            TrainatomyError: The workload itself cannot be predicted.
        """
        first = self.first_point()
        if not self._fits(first):
            first = self._with_all_that_saves(first)
        if self._fits(first):
            given = {axis.name: {option} for axis, option in zip(self.space.axes[1:], first[1:], strict=True)}
            self.run(partial(self._promising, self.live | given), self._near_best(self._alternatives))
            first = min(self.fitting, key=lambda outcome: outcome.seconds).point
        self.execute((), related=self._alternatives(first), meanwhile=self._near_best(self.wanted_later))
        self._drop_useless_options()
        self.run(partial(self._promising, self.live), self._near_best(self.wanted_later))

    def exhaust(self) -> None:
        """Execute every candidate of the space."""
        self.execute((), related=self.space.points(self.live))

    def first_point(self) -> Point:
        """Execute the workload at a few batch sizes, and return the largest one that fits, or else the smallest."""
        batches = self.space.batches
        given = self.space.point()
        probes = [] if self.prior else [batches[-1], batches[(len(batches) - 1) // 2]]
        points = [self._at(given, batch) for batch in dict.fromkeys(probes)]
        self.execute(points)
        for point in points:
            if point in self.errors:
                raise self.errors[point]
        for batch in reversed(batches):
            point = self._at(given, batch)
            if not self._may_fit(point):
                continue
            smaller = [self._at(given, other) for other in batches[: batches.index(batch)]]
            self.execute([point, *smaller[-1:]], meanwhile=self._alternatives(point))
            if point in self.errors:
                raise self.errors[point]
            if self.outcomes[point].fits:
                return point
        smallest = self._at(given, batches[0])
        self.execute([smallest])
        return smallest

    def _with_all_that_saves(self, smallest: Point) -> Point:
        """Execute the candidate that should need the least memory, and return it.

        If it cannot be predicted, what saves memory is added one by one, and what cannot be is left out.
        """
        leanest = self.space.leanest()
        self.execute([leanest])
        if leanest in self.outcomes:
            return leanest
        point = smallest
        for axis, option in zip(self.space.axes, leanest, strict=True):
            changed = self.space.replaced(point, axis.name, option)
            if self.space.is_valid(changed):
                self.execute([changed])
                point = changed if changed in self.outcomes else point
        return point

    def _fits(self, point: Point) -> bool:
        return point in self.outcomes and self.outcomes[point].fits

    def counts(self) -> SearchCounts:
        """Return how the candidates were dealt with."""
        executed = sum(self.is_in_space(point) for point in self.outcomes)
        failed = sum(self.is_in_space(point) for point in self.errors)
        by_reason = dict.fromkeys(("too_large", "slower", "dominated"), 0)
        for reason in self.reasons.values():
            by_reason[reason] += 1
        rest = self.space.size - executed - failed - sum(by_reason.values())
        if not self.interrupted:  # the options that were dropped from their axis
            by_reason["dominated"] += rest
            rest = 0
        return SearchCounts(
            space=self.space.size,
            executed=executed,
            failed=failed,
            unexplored=rest,
            seconds=time.perf_counter() - self._began,
            **by_reason,
        )

    def _at(self, point: Point, batch: int) -> Point:
        return (str(batch), *point[1:])

    def _may_fit(self, point: Point) -> bool:
        """Return whether a candidate fits as far as is known: by its execution, or by its estimate without margin."""
        if point in self.outcomes:
            return self.outcomes[point].fits
        estimate = self.estimator.estimate(point) or (self.prior and self.prior.estimate(point))
        return not estimate or estimate.device_bytes <= self.usable_bytes

    def _alternatives(self, point: Point) -> Iterator[Point]:
        """Yield a point with every other option of its free axes, one at a time, and with what that option needs."""
        for axis in self.space.axes[1:]:
            if axis.name in RESCUES or self._is_known(axis.name):
                continue
            for option in self.space.options(axis):
                changed = self.space.changed(point, axis.name, option)
                if option not in DERIVED and self.space.is_valid(changed):
                    yield changed

    def _is_known(self, name: str) -> bool:
        """Return whether another search has tried the options of an axis; plans differ with the number of GPUs."""
        if name == "plan":
            return False
        place = [axis.name for axis in self.space.axes].index(name)
        return self.prior is not None and len({outcome.point[place] for outcome in self.prior.outcomes.values()}) > 1

    def _drop_useless_options(self) -> None:
        """Drop options that failed, and those that another option of the axis beats in both time and memory."""
        for place, axis in enumerate(self.space.axes):
            if not place or axis.name in RESCUES:
                continue
            live = self.live[axis.name]
            live -= {
                point[place] for point in self.errors if point[place] != axis.given and self._is_to_blame(point, place)
            }
            for option in sorted(live - {axis.given}):
                if any(self._beats(place, other, option) for other in live - {option}):
                    live.discard(option)

    def _is_to_blame(self, failed: Point, place: int) -> bool:
        """Return whether a candidate that cannot be predicted could be with another option of one axis."""
        return any(
            point[:place] == failed[:place] and point[place + 1 :] == failed[place + 1 :] for point in self.outcomes
        )

    def _beats(self, place: int, better: str, worse: str) -> bool:
        near = next(iter(self.outcomes))
        effect = self.estimator.effect(place, better, worse, near)
        return effect is not None and effect.is_slower and not effect.saves_memory

    def _promising(self, live: Mapping[str, set[str]]) -> Point | None:
        """Return the candidate of these options with the shortest estimated step that may win, or ``None``.

        One with an option that was never seen comes first, that which differs least from the best one.
        """
        chosen: tuple[float, Point] | None = None
        known = {*self.outcomes, *self.errors, *self._running.values()}
        fitting, best, unseen = self.fitting, self.best, list[Point]()
        self.reasons.clear()
        for point in self.space.points(live):
            if point in known:
                continue
            plain = self._plain(point)
            estimate = self.estimator.estimate(plain)
            if estimate is None:
                unseen += [plain] * (plain not in known)
                continue
            reason = self._reason_against(point, plain, estimate, fitting, best)
            if reason is not None:
                self.reasons[point] = reason
            elif chosen is None or estimate.seconds < chosen[0]:
                chosen = estimate.seconds, point
        if unseen:
            near = best.point if best is not None else next(iter(self.outcomes))
            return min(unseen, key=lambda point: self.estimator.distance(near, point))
        return chosen[1] if chosen else None

    def _reason_against(
        self, point: Point, plain: Point, estimate: Estimate, fitting: list[Outcome], best: Outcome | None
    ) -> Reason | None:
        """Return why a candidate is left out, or ``None`` if it may be the best one."""
        least = estimate.least_bytes
        if point != plain:
            executed = self.outcomes.get(plain)
            if executed.fits if executed else least <= self.usable_bytes and not self._exceeds_another(plain):
                return "dominated"
            least = executed.floor_bytes if executed else estimate.floor_bytes - estimate.bytes_margin
        if least > self.usable_bytes:
            return "too_large"
        if best is not None and estimate.shortest >= best.seconds:
            return "slower"
        if self._exceeds_another(point):
            return "too_large"
        if any(self.estimator.is_dominated(plain, outcome) for outcome in fitting):
            return "dominated"
        return None

    def _exceeds_another(self, point: Point) -> bool:
        """Return whether a candidate cannot need less than an executed one that does not fit.

        What is of use only where memory is short saves no more than the cache.
        """
        rescues = [place for place, axis in enumerate(self.space.axes) if axis.name in RESCUES]
        return any(
            self.estimator.needs_as_much(point, outcome)
            for outcome in self.outcomes.values()
            if outcome.floor_bytes > self.usable_bytes
            or (not outcome.fits and all(outcome.point[place] == point[place] for place in rescues))
        )

    def _plain(self, point: Point) -> Point:
        """Return a point without the options that are of use only where memory is short."""
        return tuple(
            axis.given if axis.name in RESCUES else option for axis, option in zip(self.space.axes, point, strict=True)
        )

    def _near_best(self, others: Callable[[Point], Iterable[Point]]) -> Iterator[Point]:
        """Yield candidates near the best one, which is the best at the time of the first."""
        if self.best is not None:
            yield from others(self.best.point)
