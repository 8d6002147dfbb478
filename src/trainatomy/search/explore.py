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

Executing candidates of a search, several at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Literal, Protocol

from trainatomy.errors import TrainatomyError
from trainatomy.results.fit import SearchCounts
from trainatomy.results.prediction import Prediction
from trainatomy.search.estimates import Estimate, Estimator
from trainatomy.search.outcomes import Outcome, outcome_of
from trainatomy.search.space import Point, Space
from trainatomy.workload.schema import Workload

AHEAD = 16
"""Candidates among which a free process finds one that it is ready for."""


class Executor(Protocol):
    """Predictor of training runs, several at a time."""

    @property
    def jobs(self) -> int:
        """Number of training runs that are predicted at a time."""

    def kinship(self, workload: Workload) -> str | None:
        """Return what is equal for training runs of which one is predicted faster after another."""

    def pick(self, kinships: Sequence[str | None]) -> int:
        """Return the place of the training to begin next."""

    def submit(self, workload: Workload) -> Future[Prediction | TrainatomyError]:
        """Begin to predict a training; the result may be the error that prevented it."""


class Observer:
    """Receives the progress of a search; this one ignores it."""

    def executed(self, count: int, best: Outcome | None) -> None:
        """Handle the end of an execution, with their number and the best candidate so far."""

    def compiling(self) -> None:
        """Handle the begin of compiling the best candidate, which takes long."""


@dataclass(slots=True)
class Execution:
    """The candidates of a search that were executed, and those that are being executed.

    Attributes:
        space: The candidates.
        usable_bytes: Limit of device memory.
        executor: Executes candidates.
        observer: Receives the progress.
        prior: Outcomes of the same space on another GPU, or on another number of them.
        estimator: The outcomes so far, and estimates of the rest.
        errors: Candidates that could not be predicted.
        interrupted: Whether Ctrl-C ended it.
    """

    space: Space
    usable_bytes: int
    executor: Executor
    observer: Observer = field(default_factory=Observer)
    prior: Estimator | None = None
    estimator: Estimator = field(init=False)
    errors: dict[Point, TrainatomyError] = field(default_factory=dict)
    interrupted: bool = False
    _running: dict[Future[Prediction | TrainatomyError], Point] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.estimator = Estimator(self.space, self.prior)

    @property
    def outcomes(self) -> dict[Point, Outcome]:
        """The executed candidates."""
        return self.estimator.outcomes

    @property
    def best(self) -> Outcome | None:
        """The fastest candidate that fits."""
        return min(self.fitting, key=lambda outcome: outcome.seconds, default=None)

    @property
    def fitting(self) -> list[Outcome]:
        """The executed candidates of the space that fit."""
        return [outcome for point, outcome in self.outcomes.items() if outcome.fits and self.is_in_space(point)]

    def is_in_space(self, point: Point) -> bool:
        """Return whether the search may choose a candidate; prices are also of changes that were not allowed."""
        return all(option in self.space.options(axis) for axis, option in zip(self.space.axes, point, strict=True))

    def execute(
        self,
        points: Iterable[Point],
        related: Iterable[Point] = (),
        until: Callable[[], bool] = lambda: False,
        meanwhile: Iterable[Point] = (),
    ) -> None:
        """Execute candidates, unless they have been executed already.

        Args:
            points: Candidates, in this order.
            related: Candidates that follow; a free process takes one of the next that it is ready for.
            until: Once it is true, no further candidate is begun.
            meanwhile: See ``run``.
        """
        first, take = iter(points), self._taking(related)

        def choose() -> Point | None:
            if until():
                return None
            return point if (point := next(first, None)) is not None else take()

        self.run(choose, meanwhile)

    def add(self, point: Point, prediction: Prediction) -> None:
        """Record a candidate that was executed."""
        per_token = "sequence-length" in self.space.allowed
        self.estimator.add(outcome_of(point, prediction, self.usable_bytes, per_token=per_token))

    def run(self, choose: Callable[[], Point | None], meanwhile: Iterable[Point] = ()) -> None:
        """Execute candidates, several at a time.

        Args:
            choose: Called whenever a process is free; returns the next candidate, or ``None`` if there is none until
                another execution has ended.
            meanwhile: Candidates for processes that would wait otherwise; they need not have ended when this returns.
        """
        spare, extra = self._taking(meanwhile), set[Point]()
        try:
            while True:
                while len(self._running) < self.executor.jobs and (point := choose()) is not None:
                    extra.discard(point)
                    self.begin(point)
                if extra.issuperset(self._running.values()):
                    return
                while len(self._running) < self.executor.jobs and (point := spare()) is not None:
                    if self.begin(point):
                        extra.add(point)
                self._collect()
        except KeyboardInterrupt:
            self.interrupted = True
            raise

    def _taking(self, points: Iterable[Point]) -> Callable[[], Point | None]:
        """Return a function that takes one of the next candidates: one that a free process is ready for."""
        rest, waiting = iter(points), list[tuple[Point, str | None]]()

        def take() -> Point | None:
            waiting.extend((point, self._kinship(point)) for point in islice(rest, AHEAD - len(waiting)))
            return waiting.pop(self.executor.pick([kinship for _, kinship in waiting]))[0] if waiting else None

        return take

    def _kinship(self, point: Point) -> str | None:
        try:
            return self.executor.kinship(self.space.workload_at(point))
        except TrainatomyError:
            return None  # reported when it is submitted

    def begin(self, point: Point) -> bool:
        """Begin to execute a candidate, and return whether that was needed and possible."""
        if point in self.outcomes or point in self.errors or point in self._running.values():
            return False
        try:
            workload = self.space.workload_at(point)
        except TrainatomyError as error:
            self.errors[point] = error
            return False
        self._running[self.executor.submit(workload)] = point
        return True

    def _collect(self) -> None:
        """Wait until an execution ends, and record those that have."""
        done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        for future in done:
            point = self._running.pop(future)
            result = future.result()
            if isinstance(result, TrainatomyError):
                self.errors[point] = result
                continue
            self.add(point, result)
            self.observer.executed(len(self.outcomes), self.best)


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

    def of_space(self, space: Space, usable_bytes: int | None = None) -> Exploration:
        """Return another search by the same processes, by default with the same limit of device memory."""
        return Exploration(space, usable_bytes or self.usable_bytes, self.executor, self.observer)

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
