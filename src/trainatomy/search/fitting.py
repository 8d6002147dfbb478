"""Search a space and return the outcome: the best candidate, its ties, and the price of every single change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from trainatomy.catalog.files import read_yaml
from trainatomy.errors import WorkloadError
from trainatomy.results.fit import Candidate, Fit, Permission, Price
from trainatomy.results.prediction import GPUSummary
from trainatomy.results.time import Time
from trainatomy.search.axes import AXES, PERMISSIONS, CanApply, applicable, axes_of
from trainatomy.search.axis import Axis, Option
from trainatomy.search.estimates import Estimator, Outcome
from trainatomy.search.explore import DERIVED, Executor, Exploration, Observer
from trainatomy.search.space import Point, Space
from trainatomy.workload.global_batch import effective_batch_size_of
from trainatomy.workload.nearest import suggestion
from trainatomy.workload.schema import Workload

DEFAULT_HEADROOM = 0.05
SAME_SPEED = 0.01
"""Of candidates whose steps differ by less than this share, the one with the fewest changes is the best."""
HOST_BOUND_SHARE = 0.85
"""A step counts as bound by the host if the CPU is busy for this share of the GPU's time: then either may bound it."""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How to search.

    Attributes:
        effective_batch_size: Samples per optimizer step; ``None`` for that of the workload.
        headroom: Share of the GPU's memory that must stay free.
        allow: Changes of what is trained that the search may make.
        keep: Axes that it may not vary.
        exhaustive: Execute every candidate instead of leaving out those that cannot win.
        prices: Execute the workload as it was given too, and the single changes of the best candidate.
        can_apply: Says which settings can be applied to what is trained; the others are neither tried nor priced.
            All can by default.
    """

    effective_batch_size: int | None = None
    headroom: float = DEFAULT_HEADROOM
    allow: tuple[Permission, ...] = ()
    keep: tuple[str, ...] = ()
    exhaustive: bool = False
    prices: bool = True
    can_apply: CanApply | None = None


def search(
    workload: Workload,
    options: SearchOptions,
    executor: Executor,
    observer: Observer,
    prior: Estimator | None = None,
) -> tuple[Fit, Exploration]:
    """Search for the settings that fit the workload's GPU and train fastest.

    After Ctrl-C the outcome is the best so far.

    Args:
        workload: The training.
        options: How to search.
        executor: Executes candidates.
        observer: Receives the progress.
        prior: Outcomes of the same search on another GPU, which save executions.

    Returns:
        The outcome, without remedies, and the exploration.

    Raises:
        WorkloadError: The workload, the GPU and the options contradict each other.
        TrainatomyError: The workload cannot be predicted.
    """
    exploration = explore(workload, options, executor, observer, prior)
    return conclude(exploration, options), exploration


def explore(
    workload: Workload,
    options: SearchOptions,
    executor: Executor,
    observer: Observer,
    prior: Estimator | None = None,
) -> Exploration:
    """Execute candidates until no other one can win (see ``search``)."""
    space = space_of(workload, options, prior)
    exploration = Exploration(space, usable_bytes(workload, options.headroom), executor, observer, prior)
    try:
        if options.exhaustive:
            exploration.exhaust()
        else:
            exploration.explore()
    except KeyboardInterrupt:
        exploration.interrupted = True
    return exploration


def conclude(exploration: Exploration, options: SearchOptions) -> Fit:
    """Execute what the prices need, if they are wanted, and return the outcome of an exploration."""
    try:
        if options.prices and not exploration.interrupted:
            _execute_alternatives(exploration)
    except KeyboardInterrupt:
        exploration.interrupted = True
    return outcome_of_search(exploration, options)


def _execute_alternatives(exploration: Exploration) -> None:
    """Execute the single changes of the best candidate; if one of them turns out to be better, then those of that.

    Neighbouring batch sizes come first, because they are the most likely to be better; with them the workload as given.
    """
    given = given_point(exploration.space)
    waiting = [given] if given is not None else []
    priced: Outcome | None = None
    while (best := best_of(exploration)) is not None and best is not priced:
        exploration.execute([*waiting, *neighbours(exploration.space, best.point)])
        waiting = []
        if best_of(exploration) is best:
            exploration.execute(alternatives(exploration.space, best.point))
            priced = best
    exploration.execute(waiting)


def space_of(workload: Workload, options: SearchOptions, prior: Estimator | None = None) -> Space:
    """Return the space of a search.

    Args:
        workload: The training.
        options: How to search.
        prior: Outcomes whose axes the space is to have, in the same order.

    Raises:
        WorkloadError: The workload, the GPU and the options contradict each other.
    """
    check(workload, options)
    effective = effective_batch_size(workload, options)
    axes = axes_of(workload, samples_per_rank(workload, options))
    if options.can_apply is not None:
        axes = applicable(axes, options.can_apply)
    if prior is not None and [axis.name for axis in prior.space.axes] == [*(axis.name for axis in axes), "plan"]:
        axes = (*axes, Axis("plan", (Option("none"),), "none"))
    for name in options.keep:
        if name not in AXES:
            raise WorkloadError(f"keep: unknown setting {name!r}{suggestion(name, AXES)}")
    if "batch" in options.keep and axes[0].given not in {option.name for option in axes[0].options}:
        raise WorkloadError(
            f"an effective batch size of {effective} is no multiple of the batch size {axes[0].given}, which was to be "
            "kept; give a multiple, or let the batch size vary",
            key="train.per_device_train_batch_size",
        )
    return _without_impossible_batches(Space(workload, axes, options.allow, frozenset(options.keep)))


def _without_impossible_batches(space: Space) -> Space:
    """Leave out batch sizes that the schema refuses because they fit on no GPU."""

    def is_possible(name: str) -> bool:
        try:
            space.workload_at((name, *space.point()[1:]))
        except WorkloadError:
            return False
        return True

    batch = space.axes[0]
    possible = tuple(option for option in batch.options if is_possible(option.name))
    if not possible:  # then something else is wrong, and its message says what
        space.workload_at((batch.options[0].name, *space.point()[1:]))
    return replace(space, axes=(replace(batch, options=possible), *space.axes[1:]))


def check(workload: Workload, options: SearchOptions) -> None:
    """Raise ``WorkloadError`` for requests that contradict each other or the GPU."""
    if workload.mode != "training":
        raise WorkloadError(f"mode: {workload.mode}: fit searches the settings of a training", key="mode")
    if workload.parallel.pp_size > 1:
        message = "parallel.pp_size: fit does not search pipelines; predict them, or use trainatomy compare --sweep"
        raise WorkloadError(message, key="parallel.pp_size")
    if workload.train.deepspeed is not None:
        raise WorkloadError(
            "train.deepspeed: a search does not vary trainings with DeepSpeed; compare several with "
            "`trainatomy compare --sweep`",
            key="train.deepspeed",
        )
    if not 0 <= options.headroom < 1:
        raise WorkloadError(f"headroom: {options.headroom:g} is not a share of the GPU's memory; give 0 to 0.99")
    for name in options.allow:
        if name not in PERMISSIONS:
            raise WorkloadError(f"allow: unknown change {name!r}{suggestion(name, PERMISSIONS)}")
    size = options.effective_batch_size
    if size is not None and size < 1:
        raise WorkloadError(f"effective_batch_size: {size} is not a number of samples; give 1 or more")
    gpu = workload.resolve_gpu()
    for kind in ("bf16", "fp16", "tf32"):
        if getattr(workload.train, kind) and kind not in gpu.rates and "precision" not in options.allow:
            raise WorkloadError(
                f"{workload.where('train', kind)}: the {gpu.name} (compute capability "
                f"{'.'.join(map(str, gpu.capability))}) has no arithmetic units for {kind}; choose another precision, "
                "or let the search choose: --allow precision",
                key=f"train.{kind}",
            )


def effective_batch_size(workload: Workload, options: SearchOptions) -> int:
    """Return the samples per optimizer step on all GPUs: as asked for, or those of the workload."""
    return options.effective_batch_size or effective_batch_size_of(workload)


def samples_per_rank(workload: Workload, options: SearchOptions) -> int:
    """Return the samples per optimizer step on each data-parallel rank.

    Raises:
        WorkloadError: The ranks do not divide the effective batch size.
    """
    samples, ranks = effective_batch_size(workload, options), workload.parallel.data_parallel_size
    if samples % ranks:
        raise WorkloadError(
            f"an effective batch size of {samples} cannot be divided among {ranks} data-parallel ranks; "
            f"give a multiple of {ranks}, or other GPUs",
            key="parallel.gpus",
        )
    return samples // ranks


def usable_bytes(workload: Workload, headroom: float) -> int:
    """Return the device memory that a candidate may take."""
    return int(workload.resolve_gpu().memory_bytes * (1 - headroom))


def given_point(space: Space) -> Point | None:
    """Return the workload as it was given, if its batch size divides the effective batch size."""
    point = space.point()
    return point if point[0] in {option.name for option in space.axes[0].options} else None


def best_of(exploration: Exploration) -> Outcome | None:
    """Return the fastest outcome; of several that are about as fast, the one that changes the fewest settings."""
    fastest = exploration.best
    if fastest is None:
        return None
    limit = fastest.seconds * (1 + SAME_SPEED)
    eligible = [outcome for outcome in exploration.fitting if outcome.seconds <= limit]
    return min(eligible, key=partial(_preference, exploration.space))


def _preference(space: Space, outcome: Outcome) -> tuple[int, int, float, int]:
    """Return a key that prefers fewer changes of what is trained, then fewer of other settings, then the faster step.

    The batch size has to be chosen in any case; of equal times the one with less memory is preferred.
    """
    changes = [change for change in space.changes(outcome.point) if change.axis != "batch"]
    return sum(bool(change.permission) for change in changes), len(changes), outcome.seconds, outcome.device_bytes


def neighbours(space: Space, point: Point) -> Iterator[Point]:
    """Yield a point with the next smaller and the next larger batch size."""
    batches = [option.name for option in space.axes[0].options]
    place = batches.index(point[0])
    for batch in (*batches[max(place - 1, 0) : place], *batches[place + 1 : place + 2]):
        yield (batch, *point[1:])


def alternatives(space: Space, point: Point) -> Iterator[Point]:
    """Yield the single changes of a point that are worth a price: neighbouring batch sizes, and the other options.

    Options between two others are left out: every third layer, a quarter of the sequence.
    """
    yield from neighbours(space, point)
    for axis in space.axes[1:]:
        options = [option.name for option in axis.options if option.name not in DERIVED]
        if axis.name == "sequence_length":
            options = [name for name in options if name != axis.given][:1]
        for name in options:
            changed = space.replaced(point, axis.name, name)
            if changed != point and space.is_valid(changed):
                yield changed


def _prices(exploration: Exploration, best: Outcome) -> Iterator[Price]:
    """Yield the price of each single change, those with an effect only."""
    space = exploration.space
    for point in alternatives(space, best.point):
        (change,) = space.changes(point, best.point)
        axis = space.axis(change.axis)
        assert axis is not None
        allowed = space.is_free(axis)
        if point in exploration.errors:
            yield Price(change, allowed, error=str(exploration.errors[point]))
        outcome = exploration.outcomes.get(point)
        if outcome is None:
            continue
        slower = _seconds(outcome) / _seconds(best) - 1
        if outcome.device_bytes != best.device_bytes or slower:
            candidate = candidate_of(exploration, outcome)
            yield Price(change, allowed, candidate, outcome.device_bytes - best.device_bytes, slower)


def _seconds(outcome: Outcome) -> float:
    """Return the seconds for a token, or for a sample if samples are not text."""
    time = _time(outcome)
    return 1 / (time.tokens_per_second or time.samples_per_second)


def _time(outcome: Outcome | Candidate) -> Time:
    time = outcome.prediction.time
    assert time is not None
    return time


def candidate_of(exploration: Exploration, outcome: Outcome) -> Candidate:
    """Return the candidate of an executed point."""
    space = exploration.space
    return Candidate(space.changes(outcome.point), outcome.prediction.workload, outcome.prediction, outcome.fits)


def with_ties(fit: Fit) -> Fit:
    """Return the outcome with the runner-ups that may be faster than the best candidate."""
    best = fit.best
    if best is None:
        return fit
    ties = tuple(each for each in fit.runner_ups if _may_be_faster(each, best))
    return replace(fit, ties=ties)


def _may_be_faster(candidate: Candidate, best: Candidate) -> bool:
    """Return whether a slower candidate is within the error, unless all it does is to recompute more activations."""
    own, others = (_without_checkpointing(each.workload) for each in (candidate, best))
    if own == others and _checkpointed_layers(candidate.workload) > _checkpointed_layers(best.workload):
        return False
    return candidate.step_seconds / best.step_seconds <= tie_factor(candidate, best)


def _without_checkpointing(workload: Mapping[str, Any]) -> dict[str, Any]:
    train = dict(workload.get("train", {}))
    for name in ("gradient_checkpointing", "gradient_checkpointing_every"):
        train.pop(name, None)
    return {**workload, "train": train}


def _checkpointed_layers(workload: Mapping[str, Any]) -> float:
    """Return the share of layers that recompute their activations."""
    train = workload.get("train", {})
    return 1 / int(train.get("gradient_checkpointing_every", 1)) if train.get("gradient_checkpointing") else 0.0


def tie_factor(first: Candidate, second: Candidate) -> float:
    """Return the factor by which two predicted times differ at most while either may be the shorter one.

    The intervals are of ratios of measured to predicted step times on one machine (``catalog/ratio_intervals.yaml``).
    """
    calibrated = "calibrated" if all(_is_calibrated(each) for each in (first, second)) else "uncalibrated"
    hosts = [_is_host_bound(_time(first)), _is_host_bound(_time(second))]
    kind = "host" if all(hosts) else "mixed" if any(hosts) else "gpu"
    low, high = read_yaml("ratio_intervals.yaml")[calibrated][kind]
    return math.sqrt(high / low)


def _is_host_bound(time: Time) -> bool:
    return time.host_seconds > HOST_BOUND_SHARE * time.gpu_seconds


def _is_calibrated(outcome: Candidate) -> bool:
    time = _time(outcome)
    low, high = time.interval_seconds
    widest = read_yaml("intervals.yaml")["uncalibrated"]["host" if time.bound_by == "host" else "gpu"]
    return bool(high / low < 0.999 * widest[1] / widest[0])


def outcome_of_search(exploration: Exploration, options: SearchOptions) -> Fit:
    """Return the outcome of an exploration, the permitted candidates only."""
    space, workload = exploration.space, exploration.space.workload
    gpu = workload.resolve_gpu()
    permitted = [outcome for point, outcome in exploration.outcomes.items() if exploration.is_in_space(point)]
    best = best_of(exploration)
    ranked = sorted((each for each in permitted if each.fits), key=lambda each: (each is not best, each.seconds))
    large = sorted((each for each in permitted if not each.fits), key=lambda each: each.device_bytes)
    given = exploration.outcomes.get(given_point(space) or ())
    found = Fit(
        name=workload.display_name,
        workload=workload.to_mapping(),
        gpu=GPUSummary(gpu.id, gpu.name, gpu.memory_bytes, gpu.capability),
        goal="throughput",
        effective_batch_size=effective_batch_size(workload, options),
        headroom=options.headroom,
        usable_bytes=exploration.usable_bytes,
        allowed=options.allow,
        given=candidate_of(exploration, given) if given else None,
        best=candidate_of(exploration, best) if best else None,
        candidates=tuple(candidate_of(exploration, each) for each in ranked),
        too_large=tuple(candidate_of(exploration, each) for each in large),
        ties=(),
        prices=tuple(_prices(exploration, best)) if best and options.prices else (),
        shortage=None,
        maximum=None,
        counts=exploration.counts(),
        notes=tuple(_notes(space, options)),
        interrupted=exploration.interrupted,
    )
    return with_ties(found)


def _notes(space: Space, options: SearchOptions) -> Iterator[str]:
    """Yield codes of what the reader should know."""
    samples = samples_per_rank(space.workload, options)
    if len(space.batches) <= 2 and samples > 3:
        yield "few_batch_sizes"
