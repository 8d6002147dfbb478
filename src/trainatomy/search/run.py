"""Run a search to its end: the best settings or the largest size, with ways out where nothing fits.

Recommends the settings of a training whose samples differ in length: with all lengths, in all orders.

A search executes fewer of them of each candidate (``workload.measurable.fewer_lengths``), which is enough to rank, but
may miss the worst epoch.

Compiles the best candidate alone: to compile takes many times as long as to execute, and what it brings depends little
on the other settings.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from trainatomy.errors import TrainatomyError, WorkloadError
from trainatomy.requests.fitting import GOALS, FitRequest
from trainatomy.results.fit import Candidate, Change, Fit, Goal, Price
from trainatomy.results.prediction import Prediction
from trainatomy.search.across import search_counts_of_gpus
from trainatomy.search.explore import Executor, Observer
from trainatomy.search.fitting import search, tie_factor, with_ties
from trainatomy.search.maximize import maximize
from trainatomy.search.remedies import remedied
from trainatomy.workload.document import suggestion
from trainatomy.workload.schema import Workload


def run(
    workload: Workload, goal: Goal, request: FitRequest, executor: Executor, observer: Observer | None = None
) -> Fit:
    """Search for the best settings, or for the largest size, of a workload.

    Args:
        workload: The training.
        goal: ``throughput``, or what to maximise.
        request: How to search.
        executor: Executes candidates.
        observer: Receives the progress.

    Raises:
        WorkloadError: The workload, the GPU and the request contradict each other.
        TrainatomyError: The workload cannot be predicted.
    """
    began, observer = time.perf_counter(), observer or Observer()
    if goal != "throughput":
        if goal not in GOALS and "." not in goal:
            raise WorkloadError(f"maximize: unknown value {goal!r}{suggestion(goal, GOALS)}")
        return maximize(workload, goal, request, executor, observer)
    if workload.parallel.world_size > 1 and "gpus" not in request.keep and workload.train.deepspeed is None:
        found, exploration = search_counts_of_gpus(workload, request, executor, observer)
    else:
        found, exploration = search(workload, request, executor, observer)
    if found.best is not None or found.interrupted:
        return found
    smallest = min(exploration.outcomes.values(), key=lambda outcome: outcome.device_bytes)
    shortage = remedied(exploration, request, smallest.point)
    counts = replace(found.counts, seconds=time.perf_counter() - began)
    return replace(found, shortage=shortage, counts=counts, interrupted=shortage.interrupted)


MOST_CHECKED = 5
"""Candidates that are predicted in full until one of them fits."""


def with_all_lengths(found: Fit, predict: Callable[[Workload], Prediction]) -> Fit:
    """Return a search whose best candidate, predicted in full, fits: the first of the best ones that does.

    Candidates that do not are moved to those that are too large.

    Args:
        found: The outcome of the search.
        predict: Predicts a workload with all lengths and orders.
    """
    if found.goal != "throughput" or found.best is None:
        return replace(found, notes=(*found.notes, "fewer_lengths"))
    left, too_large = list(found.candidates), list(found.too_large)
    best: Candidate | None = None
    for candidate in found.candidates[:MOST_CHECKED]:
        prediction = predict(Workload.from_mapping(candidate.workload))
        fits = prediction.fits and prediction.memory.device_bytes <= found.usable_bytes
        checked = replace(candidate, prediction=prediction, fits=fits)
        left.remove(candidate)
        if fits:
            best = checked
            left.insert(0, checked)
            break
        too_large.append(checked)
    if best is None:
        left = []
    known = {each.name for each in left}
    return replace(
        found,
        best=best,
        candidates=tuple(left),
        too_large=tuple(sorted(too_large, key=lambda each: each.device_bytes)),
        ties=tuple(each for each in found.ties if each.name in known and (best is None or each.name != best.name)),
        by_gpus=tuple(each for each in found.by_gpus if each.name in known),
        notes=(*found.notes, "best_with_all_lengths" if best is not None else f"none_with_all_lengths: {MOST_CHECKED}"),
    )


_COMPILED = (
    Change("torch_compile", "whole", {"train.torch_compile": True}),
    Change("torch_compile", "by_layer", {"train.torch_compile": True, "train.dynamo_use_regional_compilation": True}),
)


def could_compile(found: Fit, request: FitRequest) -> bool:
    """Return whether the best candidate of a search could be compiled, which nobody asked to try."""
    best = found.best
    if best is None or found.goal != "throughput" or Workload.from_mapping(best.workload).train.compiles:
        return False
    return any(
        request.applies(change.settings) and not isinstance(_compiled(best, change), WorkloadError)
        for change in _COMPILED
    )


def with_compiled(found: Fit, request: FitRequest, executor: Executor, observer: Observer | None = None) -> Fit:
    """Return a search with prices of compiling its best candidate, which becomes the best if that surely pays.

    It does where the step is shorter by more than the error of a ratio of two predictions.  The other prices stay those
    of the candidate that is not compiled.  After Ctrl-C the outcome is that of the search.

    Args:
        found: The outcome of the search.
        request: How it was searched for.
        executor: Executes candidates.
        observer: Receives the progress.
    """
    best = found.best
    if best is None:
        return found
    (observer or Observer()).compiling()
    begun = [
        (change, _begin_compiled(best, change, executor)) for change in _COMPILED if request.applies(change.settings)
    ]
    try:
        prices = tuple(_compiled_price(best, change, started, found.usable_bytes) for change, started in begun)
    except KeyboardInterrupt:
        return replace(found, interrupted=True)
    fitting = [price.candidate for price in prices if price.candidate is not None and price.candidate.fits]
    fastest = min(fitting, key=lambda each: each.step_seconds, default=best)
    pays = best.step_seconds > fastest.step_seconds * tie_factor(fastest.prediction, best.prediction)
    chosen = fastest if pays else best
    others = [each for each in (*found.candidates, *fitting) if each.workload != chosen.workload]
    compiled = replace(
        found,
        best=chosen,
        candidates=(chosen, *sorted(others, key=lambda each: each.step_seconds)),
        prices=(*found.prices, *prices),
        notes=(*found.notes, *(["compiled_is_best"] if pays else [])),
    )
    return with_ties(compiled)


def _compiled(best: Candidate, change: Change) -> Workload | WorkloadError:
    try:
        return Workload.from_mapping(best.workload).replace(change.settings)
    except WorkloadError as refused:
        return refused


def _begin_compiled(
    best: Candidate, change: Change, executor: Executor
) -> Future[Prediction | TrainatomyError] | TrainatomyError:
    workload = _compiled(best, change)
    return workload if isinstance(workload, WorkloadError) else executor.submit(workload)


def _compiled_price(
    best: Candidate, change: Change, started: Future[Prediction | TrainatomyError] | TrainatomyError, usable_bytes: int
) -> Price:
    prediction = started if isinstance(started, TrainatomyError) else started.result()
    if isinstance(prediction, TrainatomyError):
        return Price(change, allowed=True, error=str(prediction))
    fits = prediction.fits and prediction.memory.device_bytes <= usable_bytes
    candidate = Candidate((*best.changes, change), prediction.workload, prediction, fits)
    slower = candidate.step_seconds / best.step_seconds - 1
    return Price(change, True, candidate, candidate.device_bytes - best.device_bytes, slower)
