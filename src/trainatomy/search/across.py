"""One training on many GPUs: where it fits, how fast it is with the best settings there, and what that costs.

The search on the GPU with the most memory is the first and a full one.  What it shows of the options' effects is the
starting point on the others, where only the candidates that may be the best ones are executed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from trainatomy.catalog.gpus import GPU
from trainatomy.errors import TrainatomyError, WorkloadError
from trainatomy.results.fit import FitAcross, GPUOption
from trainatomy.results.prediction import GPUSummary
from trainatomy.search.estimates import Estimator
from trainatomy.search.execution import Executor, Observer
from trainatomy.search.fitting import search
from trainatomy.search.options import SearchOptions, effective_batch_size
from trainatomy.workload.schema import Workload


def search_across(
    workload: Workload,
    gpus: Sequence[GPU],
    options: SearchOptions,
    executor: Executor,
    observer: Observer,
    costs_per_hour: Mapping[str, float] | None = None,
) -> FitAcross:
    """Search on several GPUs.

    After Ctrl-C the outcome holds the GPUs that were done.

    Args:
        workload: The training; its own GPU does not matter.
        gpus: The GPUs.
        options: How to search.
        executor: Executes candidates.
        observer: Receives the progress.
        costs_per_hour: Prices per hour by the GPU's id, in any currency.

    Raises:
        TrainatomyError: The workload cannot be predicted on any of the GPUs.
    """
    began = time.perf_counter()
    options = replace(options, prices=False)
    found: list[GPUOption] = []
    refused: list[TrainatomyError] = []
    prior: Estimator | None = None
    interrupted = False
    for gpu in sorted(gpus, key=lambda each: -each.memory_bytes):
        try:
            fit, exploration = search(workload.replace("gpu", gpu.id), options, executor, observer, prior)
        except WorkloadError as error:  # a GPU without bf16, for example
            refused.append(error)
            continue
        prior = prior or exploration.estimator
        summary = GPUSummary(gpu.id, gpu.name, gpu.memory_bytes, gpu.capability)
        found.append(GPUOption(summary, fit, (costs_per_hour or {}).get(gpu.id)))
        if interrupted := fit.interrupted:
            break
    if not found and refused:
        raise refused[0]
    return FitAcross(
        name=workload.display_name,
        workload=workload.to_mapping(),
        effective_batch_size=effective_batch_size(workload, options),
        headroom=options.headroom,
        allowed=options.allow,
        options=tuple(sorted(found, key=_order)),
        refused=tuple(str(error) for error in refused),
        seconds=time.perf_counter() - began,
        interrupted=interrupted,
    )


def _order(option: GPUOption) -> tuple[bool, float, int]:
    best = option.fit.best
    return best is None, best.step_seconds if best else 0.0, -option.gpu.memory_bytes
