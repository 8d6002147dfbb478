"""Run a search to its end: the best settings or the largest size, with ways out where nothing fits."""

from __future__ import annotations

import time
from dataclasses import replace

from trainatomy.errors import WorkloadError
from trainatomy.results.fit import Fit, Goal
from trainatomy.search.execution import Executor, Observer
from trainatomy.search.fewer_gpus import search_counts_of_gpus
from trainatomy.search.fitting import search
from trainatomy.search.maximize import GOALS, maximize
from trainatomy.search.options import SearchOptions
from trainatomy.search.remedies import remedied
from trainatomy.workload.nearest import suggestion
from trainatomy.workload.schema import Workload


def run(
    workload: Workload, goal: Goal, options: SearchOptions, executor: Executor, observer: Observer | None = None
) -> Fit:
    """Search for the best settings, or for the largest size, of a workload.

    Args:
        workload: The training.
        goal: ``throughput``, or what to maximise.
        options: How to search.
        executor: Executes candidates.
        observer: Receives the progress.

    Raises:
        WorkloadError: The workload, the GPU and the options contradict each other.
        TrainatomyError: The workload cannot be predicted.
    """
    began, observer = time.perf_counter(), observer or Observer()
    if goal != "throughput":
        if goal not in GOALS:
            raise WorkloadError(f"maximize: unknown value {goal!r}{suggestion(goal, GOALS)}")
        return maximize(workload, goal, options, executor, observer)
    if workload.parallel.world_size > 1 and "gpus" not in options.keep and workload.train.deepspeed is None:
        found, exploration = search_counts_of_gpus(workload, options, executor, observer)
    else:
        found, exploration = search(workload, options, executor, observer)
    if found.best is not None or found.interrupted:
        return found
    smallest = min(exploration.outcomes.values(), key=lambda outcome: outcome.device_bytes)
    shortage = remedied(exploration, options, smallest.point)
    counts = replace(found.counts, seconds=time.perf_counter() - began)
    return replace(found, shortage=shortage, counts=counts, interrupted=shortage.interrupted)
