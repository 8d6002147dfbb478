"""The best settings on the GPUs of a training and on fewer of them, at the same effective batch size.

The search on all GPUs is a full one; what it shows of the options' effects is the starting point on fewer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from trainatomy.errors import WorkloadError
from trainatomy.results.fit import Candidate, Change, Fit, SearchCounts
from trainatomy.search.execution import Executor, Observer
from trainatomy.search.explore import Exploration
from trainatomy.search.fitting import SAME_SPEED, candidate_of, conclude, explore, outcome_of_search
from trainatomy.search.options import SearchOptions, given_point
from trainatomy.search.plans import on_one_gpu, without_groups
from trainatomy.workload.schema import Workload

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
    workload: Workload, options: SearchOptions, executor: Executor, observer: Observer
) -> tuple[Fit, Exploration]:
    """Search on the GPUs of a workload, on a half of them, a quarter, down to one.

    After Ctrl-C the outcome is the best so far.

    Returns:
        The outcome with the best candidate of each number of GPUs, and the exploration on all GPUs.

    Raises:
        WorkloadError: The workload, the GPU and the options contradict each other.
        TrainatomyError: The workload cannot be predicted.
    """
    began = time.perf_counter()
    plain = replace(options, prices=False)
    full = explore(workload, plain, executor, observer)
    counts = [_Count(None, full, outcome_of_search(full, plain))]
    for change in fewer_gpus(workload):
        if full.interrupted or counts[-1].exploration.interrupted:
            break
        found = _on_fewer(workload, change, counts[0], plain, executor, observer)
        counts += [found] if found else []
    chosen = _chosen(counts)
    fit = chosen.fit = conclude(chosen.exploration, options)
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
    workload: Workload, change: Change, full: _Count, options: SearchOptions, executor: Executor, observer: Observer
) -> _Count | None:
    """Return the search on fewer GPUs; ``None`` if the training cannot be spread over this many."""
    if change.option == "1" and workload.parallel.mp_policy is not None:
        return None  # without FSDP there is no reduction in another dtype
    try:
        fewer = workload.replace(change.settings)
        samples = replace(options, effective_batch_size=full.fit.effective_batch_size)
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
