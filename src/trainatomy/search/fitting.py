"""Search a space and return the outcome: the best candidate, its ties, and the price of every single change.

Ties: candidates that may be faster than the best one, by the error of a ratio of two predicted step times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from trainatomy.catalog.files import read_yaml
from trainatomy.errors import TrainatomyError, WorkloadError
from trainatomy.requests.fitting import FitRequest, effective_batch_size, samples_per_rank, usable_bytes
from trainatomy.results.fit import Candidate, Fit, Price
from trainatomy.results.prediction import GPUSummary, Prediction
from trainatomy.results.time import Time
from trainatomy.search.estimates import Estimator
from trainatomy.search.explore import DERIVED, Executor, Exploration, Observer
from trainatomy.search.outcomes import Outcome
from trainatomy.search.space import Point, Space, given_point, space_of
from trainatomy.workload.schema import Workload
from trainatomy.workload.sentence_transformers import compares_in_batch

HOST_BOUND_SHARE = 0.85
"""A step counts as bound by the host if the CPU is busy for this share of the GPU's time: then either may bound it."""


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
    return candidate.step_seconds / best.step_seconds <= tie_factor(candidate.prediction, best.prediction)


def _without_checkpointing(workload: Mapping[str, Any]) -> dict[str, Any]:
    train = dict(workload.get("train", {}))
    for name in ("gradient_checkpointing", "gradient_checkpointing_every"):
        train.pop(name, None)
    return {**workload, "train": train}


def _checkpointed_layers(workload: Mapping[str, Any]) -> float:
    """Return the share of layers that recompute their activations."""
    train = workload.get("train", {})
    return 1 / int(train.get("gradient_checkpointing_every", 1)) if train.get("gradient_checkpointing") else 0.0


def tie_factor(first: Prediction, second: Prediction) -> float:
    """Return the factor by which two predicted times differ at most while either may be the shorter one.

    The intervals are of ratios of measured to predicted step times on one machine (``catalog/ratio_intervals.yaml``).
    """
    calibrated = "calibrated" if all(_is_calibrated(each) for each in (first, second)) else "uncalibrated"
    hosts = [_is_host_bound(first), _is_host_bound(second)]
    kind = "host" if all(hosts) else "mixed" if any(hosts) else "gpu"
    low, high = read_yaml("ratio_intervals.yaml")[calibrated][kind]
    return math.sqrt(high / low)


def _is_host_bound(prediction: Prediction) -> bool:
    time = prediction.time
    assert time is not None
    return time.host_seconds > HOST_BOUND_SHARE * time.gpu_seconds


def _is_calibrated(prediction: Prediction) -> bool:
    time = prediction.time
    assert time is not None
    return time.calibrated


_ATTENTION = "attention"
_SLOW = frozenset({"lora", "quantization"})
SAME_SPEED = 0.01
"""Share below which steps count as equally long: the candidate with the fewest changes is then the best."""


def search(
    workload: Workload,
    request: FitRequest,
    executor: Executor,
    observer: Observer,
    prior: Estimator | None = None,
) -> tuple[Fit, Exploration]:
    """Search for the settings that fit the workload's GPU and train fastest.

    After Ctrl-C the outcome is the best so far.

    Args:
        workload: The training.
        request: How to search.
        executor: Executes candidates.
        observer: Receives the progress.
        prior: Outcomes of the same search on another GPU, which save executions.

    Returns:
        The outcome, without remedies, and the exploration.

    Raises:
        WorkloadError: The workload, the GPU and the request contradict each other.
        TrainatomyError: The workload cannot be predicted.
    """
    exploration = explore(workload, request, executor, observer, prior)
    return conclude(exploration, request), exploration


def explore(
    workload: Workload,
    request: FitRequest,
    executor: Executor,
    observer: Observer,
    prior: Estimator | None = None,
) -> Exploration:
    """Execute candidates until no other one can win (see ``search``)."""
    space = space_of(workload, request, prior)
    exploration = Exploration(space, usable_bytes(workload, request.headroom), executor, observer, prior)
    if request.prices:
        exploration.wanted_later = partial(_priced, space)
    try:
        if request.exhaustive:
            exploration.exhaust()
        else:
            exploration.explore()
    except KeyboardInterrupt:
        exploration.interrupted = True
    return exploration


def conclude(exploration: Exploration, request: FitRequest) -> Fit:
    """Execute what the prices need, if they are wanted, and return the outcome of an exploration."""
    try:
        if request.prices and not exploration.interrupted:
            _execute_alternatives(exploration)
    except KeyboardInterrupt:
        exploration.interrupted = True
    return outcome_of_search(exploration, request)


def _execute_alternatives(exploration: Exploration) -> None:
    """Execute the single changes of the best candidate; if one of them turns out to be better, then those of that.

    Neighbouring batch sizes come first, because they are the most likely to be better; with them the workload as given.
    """
    given = given_point(exploration.space)
    waiting = [given] if given is not None else []
    while (best := best_of(exploration)) is not None:
        others = _priced(exploration.space, best.point)
        changed = partial(_has_another_best, exploration, best)
        exploration.execute([*waiting, *neighbours(exploration.space, best.point)], related=others, until=changed)
        waiting = []
        if not changed():
            break
    exploration.execute(waiting)


def _has_another_best(exploration: Exploration, best: Outcome) -> bool:
    return best_of(exploration) is not best


def _priced(space: Space, point: Point) -> list[Point]:
    """Return the single changes of a point, those first that take the longest: adapters add modules to the model."""
    found = filter(partial(_has_price, space, point), alternatives(space, point))
    return sorted(found, key=lambda point: not _SLOW & {change.axis for change in space.changes(point)})


def _has_price(space: Space, best: Point, point: Point) -> bool:
    """Return whether a single change is priced: those of evaluations, which take no time of a step, only if allowed."""
    permissions = {change.permission for change in space.changes(point, best)}
    return "evaluation" not in permissions or "evaluation" in space.allowed


def best_of(exploration: Exploration) -> Outcome | None:
    """Return the fastest outcome; of several that are about as fast, the one that changes the fewest settings.

    Another implementation of attention is chosen only if it is faster by more than the error of the prediction.
    """
    fastest = _preferred(exploration, exploration.fitting)
    if fastest is None:
        return None
    axis = exploration.space.axis(_ATTENTION)
    if axis is None:
        return fastest
    place = exploration.space.axes.index(axis)
    as_given = _preferred(exploration, [each for each in exploration.fitting if each.point[place] == axis.given])
    if as_given is None or as_given.seconds > fastest.seconds * tie_factor(as_given.prediction, fastest.prediction):
        return fastest
    return as_given


def _preferred(exploration: Exploration, outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return the fastest outcome; of several that are about as fast, the one that changes the fewest settings."""
    if not outcomes:
        return None
    limit = min(outcome.seconds for outcome in outcomes) * (1 + SAME_SPEED)
    return min((each for each in outcomes if each.seconds <= limit), key=partial(_preference, exploration.space))


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
    for point in filter(partial(_has_price, space, best.point), alternatives(space, best.point)):
        (change,) = space.changes(point, best.point)
        axis = space.axis(change.axis)
        assert axis is not None
        allowed = space.is_free(axis)
        error = exploration.errors.get(point)
        if error is not None and (allowed or not _does_not_apply(error, change.settings)):
            yield Price(change, allowed, error=str(error))
        outcome = exploration.outcomes.get(point)
        if outcome is None:
            continue
        slower = _seconds(outcome) / _seconds(best) - 1
        if outcome.device_bytes != best.device_bytes or slower:
            candidate = candidate_of(exploration, outcome)
            yield Price(change, allowed, candidate, outcome.device_bytes - best.device_bytes, slower)


def _does_not_apply(error: TrainatomyError, settings: Mapping[str, object]) -> bool:
    """Return whether a model has nothing that a change sets, such as a length of sequences."""
    return isinstance(error, WorkloadError) and error.key in settings


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


def outcome_of_search(exploration: Exploration, request: FitRequest) -> Fit:
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
        effective_batch_size=effective_batch_size(workload, request),
        headroom=request.headroom,
        usable_bytes=exploration.usable_bytes,
        allowed=request.allow,
        given=candidate_of(exploration, given) if given else None,
        best=candidate_of(exploration, best) if best else None,
        candidates=tuple(candidate_of(exploration, each) for each in ranked),
        too_large=tuple(candidate_of(exploration, each) for each in large),
        ties=(),
        prices=tuple(_prices(exploration, best)) if best and request.prices else (),
        shortage=None,
        maximum=None,
        counts=exploration.counts(),
        notes=tuple(_notes(space, request)),
        interrupted=exploration.interrupted,
    )
    return with_ties(found)


def _notes(space: Space, request: FitRequest) -> Iterator[str]:
    """Yield codes of what the reader should know."""
    if compares_in_batch(space.workload):
        yield "compared_in_batch"
        return
    samples = samples_per_rank(space.workload, request)
    if len(space.batches) <= 2 and samples > 3:
        yield "few_batch_sizes"
