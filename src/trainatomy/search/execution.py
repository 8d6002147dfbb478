"""Executing candidates of a search, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from trainatomy.errors import TrainatomyError
from trainatomy.results.prediction import Prediction
from trainatomy.search.estimates import Estimator
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
        first, rest, waiting = iter(points), iter(related), list[tuple[Point, str | None]]()

        def choose() -> Point | None:
            if until():
                return None
            if (point := next(first, None)) is not None:
                return point
            waiting.extend((point, self._kinship(point)) for point in islice(rest, AHEAD - len(waiting)))
            return waiting.pop(self.executor.pick([kinship for _, kinship in waiting]))[0] if waiting else None

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
        spare, extra = iter(meanwhile), set[Point]()
        try:
            while True:
                while len(self._running) < self.executor.jobs and (point := choose()) is not None:
                    extra.discard(point)
                    self._submit(point)
                if extra.issuperset(self._running.values()):
                    return
                while len(self._running) < self.executor.jobs and (point := next(spare, None)) is not None:
                    if self._submit(point):
                        extra.add(point)
                self._collect()
        except KeyboardInterrupt:
            self.interrupted = True
            raise

    def _kinship(self, point: Point) -> str | None:
        try:
            return self.executor.kinship(self.space.workload_at(point))
        except TrainatomyError:
            return None  # reported when it is submitted

    def _submit(self, point: Point) -> bool:
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
