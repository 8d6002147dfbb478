"""One training on many GPUs: where it fits, how fast it is with the best settings there, and what that costs.

The search on the GPU with the most memory is the first and a full one.  What it shows of the options' effects is the
starting point on the others, where only the candidates that may be the best ones are executed.

The best settings on the GPUs of a training and on fewer of them, at the same effective batch size.

The search on all GPUs is a full one; what it shows of the options' effects is the starting point on fewer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from trainatomy.catalog.gpus import GPU
from trainatomy.errors import TrainatomyError, WorkloadError
from trainatomy.requests.fitting import FitRequest, effective_batch_size
from trainatomy.results.fit import Candidate, Change, Fit, FitAcross, GPUOption, SearchCounts
from trainatomy.results.prediction import GPUSummary
from trainatomy.search.estimates import Estimator
from trainatomy.search.explore import Executor, Exploration, Observer
from trainatomy.search.fitting import SAME_SPEED, candidate_of, conclude, explore, outcome_of_search, search
from trainatomy.search.plans import on_one_gpu, without_groups
from trainatomy.search.space import given_point
from trainatomy.workload.schema import Workload
from trainatomy.workload.sentence_transformers import compares_in_batch

AXIS = "gpus"


@dataclass(slots=True)
class _Count:
    """The search on one number of GPUs: the change to it, if it is not that of the workload."""

    change: Change | None
    exploration: Exploration
    fit: Fit

    @property
    def best(self) -> Candidate | None:
        """The best candidate, or else the smallest one."""
        found = self.fit.best or next(iter(self.fit.too_large), None)
        return found and self.changed(found)

    def changed(self, candidate: Candidate) -> Candidate:
        """Return a candidate with the change of the number of GPUs among its changes."""
        return replace(candidate, changes=(self.change, *candidate.changes)) if self.change else candidate


def search_counts_of_gpus(
    workload: Workload, request: FitRequest, executor: Executor, observer: Observer
) -> tuple[Fit, Exploration]:
    """Search on the GPUs of a workload, on a half of them, a quarter, down to one.

    After Ctrl-C the outcome is the best so far.

    Returns:
        The outcome with the best candidate of each number of GPUs, and the exploration on all GPUs.

    Raises:
        WorkloadError: The workload, the GPU and the request contradict each other.
        TrainatomyError: The workload cannot be predicted.
    """
    began = time.perf_counter()
    plain = replace(request, prices=False)
    full = explore(workload, plain, executor, observer)
    counts = [_Count(None, full, outcome_of_search(full, plain))]
    for change in fewer_gpus(workload):
        if full.interrupted or counts[-1].exploration.interrupted:
            break
        found = _on_fewer(workload, change, counts[0], plain, executor, observer)
        counts += [found] if found else []
    chosen = _chosen(counts)
    fit = chosen.fit = conclude(chosen.exploration, request)
    given = _given(full)
    fit = replace(
        fit,
        workload=workload.to_mapping(),
        given=given,
        best=fit.best and chosen.changed(fit.best),
        candidates=tuple(map(chosen.changed, fit.candidates)),
        too_large=tuple(map(chosen.changed, fit.too_large)),
        ties=tuple(map(chosen.changed, fit.ties)),
        by_gpus=tuple(best for each in reversed(counts) if (best := each.best) is not None),
        counts=_total([each.exploration for each in counts], time.perf_counter() - began),
        notes=(*fit.notes, *_notes(chosen)),
        interrupted=any(each.exploration.interrupted for each in counts),
    )
    return fit, full


def fewer_gpus(workload: Workload) -> Iterator[Change]:
    """Yield the changes to fewer GPUs: machines are halved first, then the GPUs of one."""
    parallel = workload.parallel
    if compares_in_batch(workload) and not workload.sentence_transformers.gather_across_devices:
        return  # a larger batch on each GPU has more samples to compare with
    groups = without_groups(workload)
    nodes, gpus = parallel.nodes, parallel.gpus
    while nodes > 1:
        nodes = nodes // 2 if nodes % 2 == 0 else 1
        yield Change(AXIS, str(nodes * gpus), {"parallel.nodes": nodes, **groups})
    while gpus > 1:
        gpus = gpus // 2 if gpus % 2 == 0 else 1
        one = {"parallel.gpus": gpus, "parallel.nodes": 1, **groups}
        yield Change(AXIS, str(gpus), on_one_gpu(workload) if gpus == 1 else one)


def _on_fewer(
    workload: Workload, change: Change, full: _Count, request: FitRequest, executor: Executor, observer: Observer
) -> _Count | None:
    """Return the search on fewer GPUs; ``None`` if the training cannot be spread over this many."""
    if change.option == "1" and workload.parallel.mp_policy is not None:
        return None  # without FSDP there is no reduction in another dtype
    try:
        fewer = workload.replace(change.settings)
        samples = replace(request, effective_batch_size=full.fit.effective_batch_size)
        exploration = explore(fewer, samples, executor, observer, full.exploration.estimator)
    except WorkloadError:
        return None
    return _Count(change, exploration, outcome_of_search(exploration, samples))


def _chosen(counts: Sequence[_Count]) -> _Count:
    """Return the count with the highest throughput; of several that are about as fast, the one with the fewest GPUs."""
    fitting = [(each, each.fit.best) for each in counts if each.fit.best is not None]
    if not fitting:
        return counts[0]
    limit = max(best.samples_per_second for _, best in fitting) / (1 + SAME_SPEED)
    return next(each for each, best in reversed(fitting) if best.samples_per_second >= limit)


def _given(full: Exploration) -> Candidate | None:
    """Return the workload as it was given."""
    point = given_point(full.space)
    if point is None:
        return None
    if not full.interrupted:
        full.execute([point])
    outcome = full.outcomes.get(point)
    return candidate_of(full, outcome) if outcome else None


def _total(explorations: Sequence[Exploration], seconds: float) -> SearchCounts:
    """Return the counts of several searches together."""
    counts = [each.counts() for each in explorations]
    names = [each.name for each in fields(SearchCounts) if each.name != "seconds"]
    return SearchCounts(**{name: sum(getattr(each, name) for each in counts) for name in names}, seconds=seconds)


def _notes(chosen: _Count) -> Iterator[str]:
    """Yield codes of what the reader should know."""
    best = chosen.best
    if best is not None and any(note.startswith("BatchNorm") for note in best.prediction.notes):
        yield "batch_norm"
    if chosen.change is not None:
        yield f"fewer_gpus: {chosen.change.option}"


def search_across(
    workload: Workload,
    gpus: Sequence[GPU],
    request: FitRequest,
    executor: Executor,
    observer: Observer,
    costs_per_hour: Mapping[str, float] | None = None,
) -> FitAcross:
    """Search on several GPUs.

    After Ctrl-C the outcome holds the GPUs that were done.

    Args:
        workload: The training; its own GPU does not matter.
        gpus: The GPUs.
        request: How to search.
        executor: Executes candidates.
        observer: Receives the progress.
        costs_per_hour: Prices per hour by the GPU's id, in any currency.

    Raises:
        TrainatomyError: The workload cannot be predicted on any of the GPUs.
    """
    began = time.perf_counter()
    request = replace(request, prices=False)
    place = {gpu.id: place for place, gpu in enumerate(sorted(gpus, key=lambda each: -each.memory_bytes))}
    found: list[GPUOption] = []
    refused: dict[int, TrainatomyError] = {}
    prior: Estimator | None = None
    interrupted = False
    for gpu in _in_order(gpus):
        try:
            fit, exploration = search(workload.replace("gpu", gpu.id), request, executor, observer, prior)
        except WorkloadError as error:  # a GPU without bf16, for example
            refused[place[gpu.id]] = error
            continue
        prior = prior or exploration.estimator
        summary = GPUSummary(gpu.id, gpu.name, gpu.memory_bytes, gpu.capability)
        found.append(GPUOption(summary, fit, (costs_per_hour or {}).get(gpu.id)))
        if interrupted := fit.interrupted:
            break
    if not found and refused:
        raise refused[min(refused)]
    return FitAcross(
        name=workload.display_name,
        workload=workload.to_mapping(),
        effective_batch_size=effective_batch_size(workload, request),
        headroom=request.headroom,
        allowed=request.allow,
        options=tuple(sorted(sorted(found, key=lambda option: place[option.gpu.id]), key=_order)),
        refused=tuple(str(refused[each]) for each in sorted(refused)),
        seconds=time.perf_counter() - began,
        interrupted=interrupted,
    )


def _in_order(gpus: Sequence[GPU]) -> list[GPU]:
    """Return the GPU with the most memory, then those that share executions one after the other; AMD's are last."""
    first, *others = sorted(gpus, key=lambda each: (each.is_amd, -each.memory_bytes))
    same = (first.capability, first.multiprocessors)

    def far(gpu: GPU) -> tuple[object, ...]:
        own = (gpu.capability, gpu.multiprocessors)
        return gpu.is_amd, own[0] != same[0], own[0], own != same, own[1]

    return [first, *sorted(others, key=far)]


def _order(option: GPUOption) -> tuple[bool, float, int]:
    best = option.fit.best
    return best is None, best.step_seconds if best else 0.0, -option.gpu.memory_bytes
