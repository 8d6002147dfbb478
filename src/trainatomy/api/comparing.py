"""Compare several workloads, predicted or measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from trainatomy.api.elsewhere import predict_row, with_settings
from trainatomy.api.verb import verb
from trainatomy.catalog.gpus import find_gpu
from trainatomy.catalog.gpus import gpus as all_gpus
from trainatomy.errors import TrainatomyError, WorkloadError
from trainatomy.measurement.process.job import Task
from trainatomy.measurement.process.pool import Processes
from trainatomy.requests.comparing import CompareRequest
from trainatomy.requests.predicting import COMPARED_PACES, PredictRequest
from trainatomy.results.comparison import Comparison
from trainatomy.results.prediction import Prediction
from trainatomy.runs.comparison import gather, prepare, published
from trainatomy.runs.plan import Finished, RunObserver, observer_of
from trainatomy.runs.predicting import Kept, execution_key, jobs_for, predict_rows
from trainatomy.workload.schema import Workload
from trainatomy.workload.sweep import with_effective_batch_size


@verb(CompareRequest, without=("layouts", "keep_gpus", "title", "samples", "command"))
def compare(
    workloads: Sequence[Workload],
    *,
    request: CompareRequest,
    gpu: str | None = None,
    progress: Callable[[Finished], None] | RunObserver | None = None,
    **settings: Any,
) -> Comparison:
    """Compare several workloads: predict them and, with ``measure``, run them on this machine's GPU one by one.

    A run that fails or runs out of memory is a row that says so; a record that cannot be written is a warning.

    Args:
        workloads: The training runs, in the order of the rows.
        request: How to predict and to run them.
        gpu: The GPU to predict for. By default the workloads' own or, with ``measure``, this machine's if it is known.
        progress: With ``measure``: called with each run that ended, or an observer.
        **settings: Settings for all workloads, as in ``predict``.

    Raises:
        TrainatomyError: The errors of ``predict``; with ``measure`` only ``WorkloadError`` among them, because what
            cannot be predicted can still be measured, ``DeviceError`` if there is no GPU, and ``TrainatomyError`` if
            records cannot be written.
        ComparisonInterrupted: A ``KeyboardInterrupt`` that carries the comparison so far.
    """
    changed: Sequence[Workload] = [with_settings(workload, settings, gpu) for workload in workloads]
    if request.effective_batch_size is not None:
        changed = with_effective_batch_size(changed, request.effective_batch_size)
    if request.measure:
        return measure_comparison(changed, replace(request, keep_gpus=gpu is not None), progress)
    if names := request.changed():
        raise WorkloadError(f"{', '.join(names)}: needs measure=True; a prediction is the same every time")
    return predict_comparison(changed, request)


@verb(CompareRequest, only=("calibration", "trust_remote_code", "jobs", "executor", "keep"))
def compare_gpus(
    workload: Workload,
    gpus: Sequence[str] | None = None,
    *,
    costs_per_hour: Mapping[str, float] | None = None,
    request: CompareRequest,
    **settings: Any,
) -> Comparison:
    """Compare one training, as it is, on GPUs of several kinds: memory, time of a step and, with prices, cost.

    A GPU for which it cannot be predicted (one without bf16, for example) is a row that says so.  ``fit_gpus`` finds
    the best settings for each GPU.  GPUs that a calibration does not apply to are not predicted.

    Args:
        workload: The training; its own GPU does not matter.
        gpus: Names of GPUs; all known ones by default.
        costs_per_hour: Prices per hour by the GPU's name, in any currency.
        request: How to predict it.
        **settings: Settings of the workload, as in ``predict``.

    Raises:
        TrainatomyError: The errors of ``predict``, if it cannot be predicted for any of the GPUs.
    """
    workload = with_settings(workload, settings)
    chosen = all_gpus() if gpus is None else tuple(dict.fromkeys(map(find_gpu, gpus)))
    costs = {find_gpu(name).id: cost for name, cost in (costs_per_hour or {}).items()}
    workloads = [workload.replace({"gpu": each.id, "name": each.name}) for each in chosen]
    predictions = _predict_rows(workloads, request.predicting, request)
    if all(isinstance(each, TrainatomyError) for each in predictions):
        raise next(each for each in predictions if isinstance(each, TrainatomyError))
    return replace(gather(workloads, predictions), is_across_gpus=True, costs_per_hour=costs)


def predict_comparison(workloads: Sequence[Workload], request: CompareRequest) -> Comparison:
    """Predict several workloads and return them side by side (see ``compare``)."""
    request.predicting.check_calibration(workloads)
    predictions = _predict_rows(workloads, request.predicting, request)
    for each in predictions:
        if isinstance(each, TrainatomyError):
            raise each
    return gather(workloads, predictions, (), published(workloads))


def measure_comparison(
    workloads: Sequence[Workload],
    request: CompareRequest,
    progress: Callable[[Finished], None] | RunObserver | None = None,
    processes: Processes | None = None,
) -> Comparison:
    """Predict several workloads, run them on this machine's GPU, and return both side by side (see ``compare``).

    ``processes`` are where to run; by default they are started and ended here.
    """
    predicting = replace(request.predicting, host_paces=COMPARED_PACES)

    def predict(planned: Sequence[Workload], beside: Task | None) -> Sequence[Prediction | TrainatomyError]:
        if beside is None or request.executor is not None or (request.jobs or 1) > 1:
            return _predict_rows(planned, predicting, request)
        shares, here = _shares(planned), replace(request, jobs=1)
        waiting = [
            measuring.call(beside, _predict_rows, [planned[place] for place in share], predicting, here)
            for share in shares
        ]
        found: dict[int, Prediction | TrainatomyError] = {}
        for share, predicted in zip(shares, waiting, strict=True):
            found.update(zip(share, predicted(), strict=True))
        return [found[place] for place in range(len(planned))]

    with Processes() if processes is None else nullcontext(processes) as measuring:
        return prepare(workloads, predict, request, measuring).run(observer_of(progress), measuring)


def _shares(workloads: Sequence[Workload]) -> list[list[int]]:
    """Divide workloads, by their places, among as many processes as there are cores; equal simulations share one."""
    groups: dict[str, list[int]] = {}
    for place, workload in enumerate(workloads):
        groups.setdefault(execution_key(workload), []).append(place)
    together = list(groups.values())
    count = min(len(together), os.cpu_count() or 1)
    return [[place for group in together[first::count] for place in group] for first in range(count)]


def _predict_rows(
    workloads: Sequence[Workload], predicting: PredictRequest, request: CompareRequest
) -> Sequence[Prediction | TrainatomyError]:
    jobs = request.jobs
    if request.executor is None:
        jobs = jobs_for(len(workloads), 1 if jobs is None else jobs)
    predict: Callable[[Workload], Prediction] = partial(predict_row, predicting)
    if request.keep is not None:
        predict = Kept(predict, predicting, str(request.keep))
    return predict_rows(predict, workloads, jobs, request.executor)
