"""Remedies for a training that runs out of memory: changes of settings, more GPUs, larger ones, each executed.

A single change is tried if it may suffice by what it can make smaller at the moments that do not fit.  If none suffices
that keeps what is trained, sets of changes are: all that save memory, then without each that is not needed.

Several GPUs as a way to make a training fit: FSDP2 over 2, 4 and 8 of them, at the same effective batch size.

With DeepSpeed they share what its configuration says.  Gradient checkpointing is switched on where the activations
alone would not fit.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainatomy.catalog.gpus import GPU, gpus
from trainatomy.errors import WorkloadError
from trainatomy.requests.fitting import FitRequest, usable_bytes
from trainatomy.results.fit import Change, Permission, Remedy, Shortage
from trainatomy.results.prediction import Prediction
from trainatomy.search.axes import batch_axis, checkpointing_axis, divisors
from trainatomy.search.explore import RESCUES, Executor, Exploration, Observer
from trainatomy.search.fitting import alternatives, candidate_of
from trainatomy.search.outcomes import ACTIVATIONS, Outcome
from trainatomy.search.plans import Axis, fully_sharded
from trainatomy.search.space import Point, Space, space_of
from trainatomy.workload.schema import Workload
from trainatomy.workload.sentence_transformers import compares_in_batch
from trainatomy.workload.sweep import effective_batch_size_of

COUNTS = (2, 4, 8)
"""Numbers of GPUs that are tried: those of one machine."""
_AXES = ("plan", "gpus")
_SHARDED = frozenset({"weights", "optimizer_states", "gradients"})


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The training on more GPUs, or on a larger one.

    Attributes:
        exploration: A search of its own.
        point: The training in it.
        changes: What is changed.
    """

    exploration: Exploration
    point: Point
    changes: tuple[Change, ...] = ()

    def begin(self) -> None:
        """Begin to execute it, if other processes do."""
        if self.exploration.executor.jobs > 1:
            self.exploration.begin(self.point)

    def outcome(self) -> Outcome | None:
        """Execute it, unless that was begun; None if it cannot be predicted."""
        self.exploration.execute([self.point])
        return self.exploration.outcomes.get(self.point)


def more_gpus(exploration: Exploration, request: FitRequest, given: Outcome) -> Iterator[Elsewhere]:
    """Yield a training that does not fit, spread over more GPUs.

    The batch size of each GPU stays, or becomes the largest smaller one that divides the samples of a step.  Fewer
    samples than GPUs become one for each, and the effective batch size grows.

    Args:
        exploration: The search that executed the training.
        request: How to search.
        given: The training.
    """
    workload = exploration.space.workload_at(given.point)
    parallel, samples = workload.parallel, effective_batch_size_of(workload)
    if parallel.nodes > 1 or parallel.tp_size > 1 or compares_in_batch(workload) or set(request.keep) & set(_AXES):
        return
    counts = [count for count in COUNTS if count > parallel.gpus]
    counts = [count for count in counts if samples % count == 0] or counts
    for count in counts:
        for checkpointed in (False, True):
            if _held(given, count, checkpointed=checkpointed) > exploration.usable_bytes:
                continue
            changes = _changes(workload, count, checkpointed=checkpointed)
            settings = {key: value for change in changes for key, value in change.settings.items()}
            if request.applies(settings) and (space := _spread(workload, settings, request)) is not None:
                yield Elsewhere(exploration.of_space(space), space.point(), changes)
            break


def _held(given: Outcome, count: int, *, checkpointed: bool) -> float:
    """Return about how much each of several GPUs holds at least: its share of the states, and its own activations."""

    def share(part: str, size: float) -> float:
        if part in ACTIVATIONS:
            return 0.0 if checkpointed else size
        return size / count if part in _SHARDED else size

    return max(sum(share(part, size) for part, size in moment.parts.items()) for moment in given.footprint.moments)


def _changes(workload: Workload, count: int, *, checkpointed: bool) -> tuple[Change, ...]:
    """Return the changes to this many GPUs; if they do not divide the samples of a step, each gets one sample."""
    samples, size = effective_batch_size_of(workload), workload.train.per_device_train_batch_size
    share = samples // count if samples % count == 0 else 1
    largest = max(each for each in divisors(share) if each <= size)
    changes = [Change("gpus", str(count), {"parallel.gpus": count})]
    if workload.train.deepspeed is None:
        changes.append(Change("plan", "fsdp2", fully_sharded(workload)))
    changes.append(batch_axis(workload, divisors(share), share).change(str(largest)))
    if samples % count:
        changes.append(Change("effective_batch_size", str(count), {}))
    if checkpointed and not workload.train.gradient_checkpointing:
        changes.append(checkpointing_axis(workload).change("on"))
    return tuple(changes)


def _spread(workload: Workload, settings: Mapping[str, Any], request: FitRequest) -> Space | None:
    """Return the space of a training with settings for more GPUs; None if it cannot have them."""
    try:
        return space_of(workload.replace(settings), replace(request, effective_batch_size=None))
    except WorkloadError:
        return None


_LARGER_GPUS = 2
"""Larger GPUs that are named: the smallest ones that suffice."""
_LARGER = 1.1
"""Memory of the second of them as a multiple of the first one's, at least."""
_SAME_MEMORY = 4 * 2**30
"""Memory that tells GPUs apart."""
_NEEDED = 0.97
"""Share of the memory that a training needs on one GPU that it may need on another, whose kernels differ."""
_RELIEVED: dict[str, frozenset[str]] = {
    "batch": ACTIVATIONS,
    "mini_batch": ACTIVATIONS,
    "gradient_checkpointing": ACTIVATIONS,
    "attention": ACTIVATIONS,
    "optimizer_implementation": frozenset({"temporary optimizer"}),
    "allocator": frozenset(),
    "torch_empty_cache_steps": frozenset(),
    "optimizer": frozenset({"optimizer_states", "temporary optimizer"}),
    "lora": ACTIVATIONS | {"optimizer_states", "gradients", "communication_buffers", "temporary optimizer"},
    "quantization": frozenset({"weights"}),
    "sequence_length": ACTIVATIONS | {"gathered_outputs", "temporary evaluation"},
    "evaluation": frozenset({"gathered_outputs", "temporary evaluation"}),
    "eval_batch": frozenset({"temporary evaluation"}),
}
"""Parts that the options of an axis can make smaller; those of other axes may any."""
_SETS: tuple[tuple[Permission, ...], ...] = (
    (),
    ("lora",),
    ("lora", "quantization"),
    ("precision", "optimizer"),
    ("precision", "optimizer", "lora", "quantization", "sequence-length"),
)
"""What sets of changes may change, one after the other; none but the first is tried if that suffices."""
_SUFFICIENT_SETS = 2
_UNSURE = frozenset({"precision", "evaluation"})
"""Axes of which another option than the leanest may need less memory."""
_LAST_RESORT = (
    "sequence_length",
    "quantization",
    "lora",
    "precision",
    "optimizer",
    "evaluation",
    "torch_empty_cache_steps",
    "allocator",
)
"""Axes whose changes are left out of a set first, if they are not needed; then the others, as they come."""


def shortage_of(
    workload: Workload,
    request: FitRequest,
    executor: Executor,
    observer: Observer | None = None,
    prediction: Prediction | None = None,
) -> Shortage:
    """Return what a training needs and, if it does not fit, what would make it fit.

    Args:
        workload: The training, with the batch size that it has; the effective batch size is kept.
        request: ``headroom`` and ``keep`` apply.
        executor: Executes candidates.
        observer: Receives the progress.
        prediction: The prediction of the training with its time and timeline, if there is one.

    Raises:
        TrainatomyError: The workload cannot be predicted.
    """
    usable = usable_bytes(workload, request.headroom)
    exploration = Exploration(space_of(workload, request, as_given=True), usable, executor, observer or Observer())
    point = exploration.space.point()
    if prediction is not None:
        exploration.add(point, prediction)
    exploration.execute([point])
    if point in exploration.errors:
        raise exploration.errors[point]
    return remedied(exploration, request, point)


def remedied(exploration: Exploration, request: FitRequest, point: Point) -> Shortage:
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
            spread = list(more_gpus(exploration, request, search.given))
            for elsewhere in (*spread, *search.likely_gpus()):
                elsewhere.begin()
            search.execute()
            remedies += search.remedies()
            remedies += search.spread(spread)
            remedies += search.larger_gpus()
    except KeyboardInterrupt:
        interrupted = True
        remedies = remedies or search.remedies()
    seconds = time.perf_counter() - began
    return Shortage(given, exploration.usable_bytes, request.headroom, tuple(remedies), seconds, interrupted)


@dataclass(slots=True)
class _Search:
    """The search for the remedies of one training."""

    exploration: Exploration
    given: Outcome
    sets: list[Point] = field(default_factory=list)
    _on_gpus: dict[str, Elsewhere] = field(default_factory=dict)

    @property
    def space(self) -> Space:
        return self.exploration.space

    def execute(self) -> None:
        """Execute single changes, and sets of changes if no single one keeps what is trained and suffices."""
        sets = [self._freed(permissions).leanest(self.given.point) for permissions in _SETS]
        singles = [self._leanest(axis) for axis in self._helpful_axes() if axis.leanest]
        self.exploration.execute(self._possible(singles))
        self.exploration.execute((), related=self._possible(self._further_singles()))
        if self._kept_fit():
            return
        for place, permissions in enumerate(_SETS):
            smallest = self._smallest(permissions, meanwhile=sets[place + 1 : place + 2])
            if smallest is None or not self._fits(smallest):
                continue
            self.sets.append(self._without_needless(smallest))
            if not permissions or len(set(self.sets)) == _SUFFICIENT_SETS:
                return

    def remedies(self) -> list[Remedy]:
        """Return single changes and sets, those that suffice first, and of these the ones that keep what is trained."""
        outcomes = self.exploration.outcomes
        singles = (point for point in outcomes if len(self.space.changes(point, self.given.point)) == 1)
        found = [self._remedy(outcomes[point]) for point in dict.fromkeys([*singles, *self.sets])]
        return sorted((each for each in found if each.candidate.fits or each.device_bytes < 0), key=_order)

    def spread(self, over_more: Iterable[Elsewhere]) -> Iterator[Remedy]:
        """Yield what can be predicted of the training on more GPUs."""
        for elsewhere in over_more:
            if (outcome := elsewhere.outcome()) is not None:
                yield Remedy(
                    kind="more GPUs",
                    changes=elsewhere.changes,
                    candidate=replace(candidate_of(elsewhere.exploration, outcome), changes=elsewhere.changes),
                    device_bytes=outcome.device_bytes - self.given.device_bytes,
                    step_seconds=outcome.seconds / self.given.seconds - 1,
                )

    def likely_gpus(self) -> list[Elsewhere]:
        """Return the training on the GPUs that will be named if it fits on those that should suffice."""
        found: list[GPU] = []
        while len(found) < _LARGER_GPUS and (gpu := next(self._larger_than(found), None)) is not None:
            found.append(gpu)
        return [self._on(gpu) for gpu in found]

    def larger_gpus(self) -> Iterator[Remedy]:
        """Yield the smallest known GPUs on which the training fits as it is."""
        found: list[GPU] = []
        tried = set[str]()
        while len(found) < _LARGER_GPUS:
            gpu = next((gpu for gpu in self._larger_than(found) if gpu.id not in tried), None)
            if gpu is None:
                return
            tried.add(gpu.id)
            if (remedy := self._fitting(self._on(gpu))) is not None:
                found.append(gpu)
                yield remedy

    def _larger_than(self, found: Sequence[GPU]) -> Iterator[GPU]:
        """Yield GPUs of the same maker that are larger than those named already and may suffice, the smallest first."""
        smallest = found[-1].memory_bytes * _LARGER if found else self._gpu.memory_bytes + 1
        for gpu in sorted(gpus(), key=_size):
            if (
                gpu.is_amd == self._gpu.is_amd
                and gpu.memory_bytes >= smallest
                and self._usable(gpu) >= _NEEDED * self.given.device_bytes
            ):
                yield gpu

    @property
    def _gpu(self) -> GPU:
        return self.space.workload.resolve_gpu()

    def _usable(self, gpu: GPU) -> int:
        return int(gpu.memory_bytes * (self.exploration.usable_bytes / self._gpu.memory_bytes))

    def _on(self, gpu: GPU) -> Elsewhere:
        """Return the training on another GPU."""
        if gpu.id not in self._on_gpus:
            workload = self.space.workload.replace("gpu", gpu.id)
            space = Space(workload, self.space.axes, self.space.allowed, self.space.kept)
            exploration = self.exploration.of_space(space, self._usable(gpu))
            self._on_gpus[gpu.id] = Elsewhere(exploration, self.given.point)
        return self._on_gpus[gpu.id]

    def _fitting(self, elsewhere: Elsewhere) -> Remedy | None:
        """Return the training on another GPU if it fits there, be it because the allocator frees its cache."""
        outcome = elsewhere.outcome()
        if outcome is None or not outcome.prediction.fits:
            return None
        if min(outcome.device_bytes, self.given.device_bytes) > elsewhere.exploration.usable_bytes:
            return None
        candidate = candidate_of(elsewhere.exploration, replace(outcome, fits=True))
        return Remedy("larger GPU", (), candidate, outcome.device_bytes - self.given.device_bytes, None)

    def _helpful_axes(self) -> Iterator[Axis]:
        """Yield the axes that may suffice alone: by what is held without the parts that they can make smaller."""
        for axis in self.space.axes:
            relieved = _RELIEVED.get(axis.name)
            may_suffice = relieved is None or self._held_without(relieved) <= self.exploration.usable_bytes
            if may_suffice and axis.name not in self.space.kept:
                yield axis

    def _held_without(self, relieved: frozenset[str]) -> float:
        return max(
            sum(size for part, size in moment.parts.items() if part not in relieved)
            for moment in self.given.footprint.moments
        )

    def _leanest(self, axis: Axis) -> Point:
        return self.space.changed(self.given.point, axis.name, axis.leanest)

    def _possible(self, points: Iterable[Point]) -> Iterator[Point]:
        """Yield the points without contradictions whose batch is not larger."""
        size = self.space.batch(self.given.point)
        return (point for point in points if self.space.is_valid(point) and self.space.batch(point) <= size)

    def _further_singles(self) -> Iterator[Point]:
        """Yield the other options of the axes whose leanest one suffices, or is not sure to be the leanest."""
        singles = list(alternatives(self.space, self.given.point))
        for axis in self._helpful_axes():
            place = self.space.axes.index(axis)
            is_leanest = self.given.point[place] == axis.leanest
            is_sure = axis.leanest and axis.name not in _UNSURE
            if is_leanest or (is_sure and not self._fits(self._leanest(axis))):
                continue
            if axis.name == "batch":
                yield from self._smaller_batches()
            else:
                yield from (point for point in singles if point[place] != self.given.point[place])

    def _smaller_batches(self) -> Iterator[Point]:
        """Yield smaller batches from the largest one on that may fit, until one fits."""
        for batch in reversed(self.space.batches):
            point = self.space.replaced(self.given.point, "batch", str(batch))
            if batch < self.space.batch(self.given.point) and self._may_fit(point):
                yield point
                if self._fits(point):
                    return

    def _fits(self, point: Point) -> bool:
        return point in self.exploration.outcomes and self.exploration.outcomes[point].fits

    def _may_fit(self, point: Point) -> bool:
        estimate = self.exploration.estimator.estimate(point)
        return estimate is None or estimate.least_bytes <= self.exploration.usable_bytes

    def _kept_fit(self) -> bool:
        return any(
            outcome.fits and not self._is_changing(point) for point, outcome in self.exploration.outcomes.items()
        )

    def _is_changing(self, point: Point) -> bool:
        return any(change.changes_training for change in self.space.changes(point, self.given.point))

    def _freed(self, permissions: tuple[Permission, ...]) -> Space:
        """Return the space in which these may be changed, too."""
        return replace(self.space, allowed=tuple({*self.space.allowed, *permissions, "evaluation"}))

    def _smallest(self, permissions: tuple[Permission, ...], meanwhile: Sequence[Point]) -> Point | None:
        """Execute the training with all that saves memory and may be changed, and return it if it can be predicted.

        Expandable segments come last, where its tensors alone fit.
        """
        free = self._freed(permissions)
        point = free.leanest(self.given.point)
        self.exploration.execute([point], meanwhile=meanwhile)
        outcome = self.exploration.outcomes.get(point)
        if outcome is None or outcome.fits or outcome.floor_bytes > self.exploration.usable_bytes:
            return point if outcome else None
        for axis in filter(free.is_free, self.space.axes):
            for option in axis.options if axis.name in RESCUES else ():
                rescued = self.space.replaced(point, axis.name, option.name)
                if self.space.is_valid(rescued):
                    self.exploration.execute([rescued])
                    if self._fits(rescued):
                        return rescued
        return point

    def _without_needless(self, point: Point) -> Point:
        """Return a set of changes that suffices without those that are not needed for it."""
        order = {name: place for place, name in enumerate(_LAST_RESORT)}
        changes = self.space.changes(point, self.given.point)
        axes = sorted((change.axis for change in changes), key=lambda axis: order.get(axis, len(order)))
        for place, axis in enumerate(axes):
            without = self._without(point, axis)
            if self.space.is_valid(without) and self._may_fit(without):
                following = [self._without(each, axes[place + 1]) for each in (without, point) if axis != axes[-1]]
                self.exploration.execute([without], meanwhile=filter(self.space.is_valid, following))
                point = without if self._fits(without) else point
        return point

    def _without(self, point: Point, axis: str) -> Point:
        """Return a point with the given option of one axis."""
        place = [each.name for each in self.space.axes].index(axis)
        return self.space.replaced(point, axis, self.given.point[place])

    def _remedy(self, outcome: Outcome) -> Remedy:
        changes = self.space.changes(outcome.point, self.given.point)
        return Remedy(
            kind="changes training" if self._is_changing(outcome.point) else "same training",
            changes=changes,
            candidate=candidate_of(self.exploration, outcome),
            device_bytes=outcome.device_bytes - self.given.device_bytes,
            step_seconds=outcome.seconds / self.given.seconds - 1,
        )


def _size(gpu: GPU) -> tuple[int, float]:
    """Return a key that sorts GPUs by memory, and about equal ones by bandwidth."""
    return round(gpu.memory_bytes / _SAME_MEMORY), gpu.bandwidth_bytes_per_second


def _order(remedy: Remedy) -> tuple[bool, bool, int, float]:
    """Return a key: what suffices, without changing what is trained, with few changes, in the least time."""
    changes: tuple[Change, ...] = remedy.changes
    minor = sum(change.axis in RESCUES for change in changes)
    cost = remedy.step_seconds if remedy.candidate.fits else float(remedy.device_bytes)
    return (not remedy.candidate.fits, remedy.kind != "same training", len(changes) + minor, cost or 0.0)
