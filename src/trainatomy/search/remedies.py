"""Remedies for a training that runs out of memory: changes of settings, more GPUs, larger ones, each executed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainatomy.catalog.gpus import GPU, gpus
from trainatomy.results.fit import Change, Remedy, Shortage
from trainatomy.search.estimates import Outcome
from trainatomy.search.explore import RESCUES, Executor, Exploration, Observer
from trainatomy.search.fitting import alternatives, candidate_of
from trainatomy.search.more_gpus import more_gpus
from trainatomy.search.options import SearchOptions, space_of, usable_bytes
from trainatomy.search.space import Point, Space
from trainatomy.workload.schema import Workload

_LARGER_GPUS = 2
"""Larger GPUs that are tried: the smallest ones that should suffice."""


def shortage_of(
    workload: Workload, options: SearchOptions, executor: Executor, observer: Observer | None = None
) -> Shortage:
    """Return what a training needs and, if it does not fit, what would make it fit.

    Args:
        workload: The training, with the batch size that it has; the effective batch size is kept.
        options: ``headroom`` and ``keep`` apply.
        executor: Executes candidates.
        observer: Receives the progress.

    Raises:
        TrainatomyError: The workload cannot be predicted.
    """
    usable = usable_bytes(workload, options.headroom)
    exploration = Exploration(space_of(workload, options), usable, executor, observer or Observer())
    point = exploration.space.point()
    exploration.execute([point])
    if point in exploration.errors:
        raise exploration.errors[point]
    return remedied(exploration, options, point)


def remedied(exploration: Exploration, options: SearchOptions, point: Point) -> Shortage:
    """Return the shortage of an executed point with its remedies.

    After Ctrl-C these are the remedies found so far.
    """
    began = time.perf_counter()
    search = _Search(exploration, exploration.outcomes[point])
    given = candidate_of(exploration, search.given)
    remedies: list[Remedy] = []
    interrupted = False
    try:
        if not search.given.fits:
            search.execute()
            remedies += search.remedies()
            remedies += more_gpus(exploration, options, search.given)
            remedies += search.larger_gpus()
    except KeyboardInterrupt:
        interrupted = True
        remedies = remedies or search.remedies()
    seconds = time.perf_counter() - began
    return Shortage(given, exploration.usable_bytes, options.headroom, tuple(remedies), seconds, interrupted)


def smallest_point(space: Space) -> Point:
    """Return the candidate that should need the least memory without changing what is trained."""
    point = (str(space.batches[0]), *space.point()[1:])
    checkpointing = space.axis("gradient_checkpointing")
    if checkpointing is not None and space.is_free(checkpointing):
        point = space.replaced(point, "gradient_checkpointing", "on")
    return point


@dataclass(slots=True)
class _Search:
    """The search for the remedies of one training."""

    exploration: Exploration
    given: Outcome

    @property
    def space(self) -> Space:
        return self.exploration.space

    def execute(self) -> None:
        """Execute single changes, the combinations that keep what is trained, and those that do not until one fits."""
        self.exploration.execute(self._singles())
        if self._kept_fit():
            return
        self._combine(smallest_point(self.space), self._shrinking(kept=True))
        if not any(outcome.fits for outcome in self.exploration.outcomes.values()):
            smallest = min(self._permitted(), key=lambda outcome: outcome.device_bytes)
            self._combine(smallest.point, self._shrinking(kept=False))

    def remedies(self) -> list[Remedy]:
        """Return every executed change, those that suffice first, and of these the ones that keep what is trained."""
        found = [self._remedy(outcome) for outcome in self.exploration.outcomes.values() if outcome is not self.given]
        useful = [each for each in found if each.candidate.fits or (len(each.changes) == 1 and each.device_bytes < 0)]
        return sorted(useful, key=_order)

    def larger_gpus(self) -> Iterator[Remedy]:
        """Yield the smallest known GPUs on which the training fits as it is."""
        found = 0
        for gpu in sorted(gpus(), key=lambda each: each.memory_bytes):
            if found == _LARGER_GPUS:
                return
            usable = gpu.memory_bytes * (self.exploration.usable_bytes / self._gpu.memory_bytes)
            if gpu.memory_bytes <= self._gpu.memory_bytes or usable < self.given.floor_bytes:
                continue
            remedy = self._on(gpu, int(usable))
            if remedy is not None and remedy.candidate.fits:
                found += 1
                yield remedy

    @property
    def _gpu(self) -> GPU:
        return self.space.workload.resolve_gpu()

    def _on(self, gpu: GPU, usable: int) -> Remedy | None:
        workload = self.space.workload.replace("gpu", gpu.id)
        space = Space(workload, self.space.axes, self.space.allowed, self.space.kept)
        exploration = Exploration(space, usable, self.exploration.executor, self.exploration.observer)
        exploration.execute([self.given.point])
        outcome = exploration.outcomes.get(self.given.point)
        if outcome is None:
            return None
        candidate = candidate_of(exploration, outcome)
        return Remedy("larger GPU", (), candidate, outcome.device_bytes - self.given.device_bytes, None)

    def _singles(self) -> Iterator[Point]:
        """Yield each single change, and every smaller batch size."""
        size = self.space.batch(self.given.point)
        for batch in reversed(self.space.batches):
            if batch < size:
                yield (str(batch), *self.given.point[1:])
        for point in alternatives(self.space, self.given.point):
            if self.space.batch(point) <= size:
                yield point

    def _kept_fit(self) -> bool:
        return any(outcome.fits for outcome in self._permitted())

    def _permitted(self) -> list[Outcome]:
        outcomes = self.exploration.outcomes.items()
        return [outcome for point, outcome in outcomes if not any(c.permission for c in self.space.changes(point))]

    def _shrinking(self, *, kept: bool) -> list[tuple[str, str]]:
        """Return the changes that save memory, the one that saves most first, at most one for each axis."""
        savings: dict[str, tuple[int, str]] = {}
        for point, outcome in self.exploration.outcomes.items():
            changes = self.space.changes(point, self.given.point)
            saved = self.given.device_bytes - outcome.device_bytes
            if len(changes) != 1 or saved <= 0 or bool(changes[0].permission) == kept:
                continue
            (change,) = changes
            if change.axis not in ("batch", "gradient_checkpointing"):
                savings[change.axis] = max(savings.get(change.axis, (0, "")), (saved, change.option))
        return [(axis, option) for axis, (_, option) in sorted(savings.items(), key=lambda item: -item[1][0])]

    def _combine(self, point: Point, changes: Sequence[tuple[str, str]]) -> None:
        """Execute a point with one change more each time, until it fits."""
        self.exploration.execute([point])
        for axis, option in changes:
            if (outcome := self.exploration.outcomes.get(point)) is not None and outcome.fits:
                return
            changed = self.space.replaced(point, axis, option)
            if self.space.is_valid(changed):
                point = changed
                self.exploration.execute([point])

    def _remedy(self, outcome: Outcome) -> Remedy:
        changes = self.space.changes(outcome.point, self.given.point)
        kept = not any(change.permission for change in changes)
        return Remedy(
            kind="same training" if kept else "changes training",
            changes=changes,
            candidate=candidate_of(self.exploration, outcome),
            device_bytes=outcome.device_bytes - self.given.device_bytes,
            step_seconds=outcome.seconds / self.given.seconds - 1,
        )


def _order(remedy: Remedy) -> tuple[bool, bool, int, float]:
    """Return a key: what suffices, without changing what is trained, with few changes, in the least time."""
    changes: tuple[Change, ...] = remedy.changes
    minor = sum(change.axis in RESCUES for change in changes)
    cost = remedy.step_seconds if remedy.candidate.fits else float(remedy.device_bytes)
    return (not remedy.candidate.fits, remedy.kind != "same training", len(changes) + minor, cost or 0.0)
