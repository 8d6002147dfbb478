"""Compare several workloads, predicted or measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainatomy.api.elsewhere import predict_row, with_settings
from trainatomy.catalog.calibrations import resolve_calibration
from trainatomy.catalog.gpus import find_gpu
from trainatomy.catalog.gpus import gpus as all_gpus
from trainatomy.errors import TrainatomyError, WorkloadError
from trainatomy.measurement.process.pool import Processes
from trainatomy.requests.comparing import CompareRequest
from trainatomy.requests.predicting import COMPARED_PACES, PredictRequest
from trainatomy.runs.comparison import gather, prepare, published
from trainatomy.runs.plan import observer_of
from trainatomy.runs.predicting import Kept, execution_key, jobs_for, predict_rows
from trainatomy.workload.schema import Workload
from trainatomy.workload.sweep import with_effective_batch_size

if TYPE_CHECKING:
    from trainatomy.catalog.calibrations import Calibration
    from trainatomy.measurement.process.job import Task
    from trainatomy.records.store import Store
    from trainatomy.results.comparison import Comparison
    from trainatomy.results.prediction import Prediction
    from trainatomy.runs.plan import Finished, RunObserver


def compare(
    workloads: Sequence[Workload],
    *,
    effective_batch_size: int | None = None,
    measure: bool = False,
    repeat: int = 1,
    store: Store | Path | str | None = None,
    group: str | None = None,
    fresh: bool = False,
    time_limit: float | None = None,
    gpu: str | None = None,
    calibration: Calibration | Path | str | None = None,
    timeline: bool = False,
    trust_remote_code: bool = False,
    jobs: int | None = None,
    executor: object = None,
    keep: Path | str | None = None,
    progress: Callable[[Finished], None] | RunObserver | None = None,
    **settings: Any,
) -> Comparison:
    """Compare several workloads: predict them and, with ``measure``, run them on this machine's GPU one by one.

    A run that fails or runs out of memory is a row that says so; a record that cannot be written is a warning.

    Args:
        workloads: The training runs, in the order of the rows.
        effective_batch_size: Samples of an optimizer step on all GPUs, the same for all of them: accumulation steps are
            set to this number over batch size × data-parallel ranks.
        measure: Run each of them in fresh processes; ``repeat``, ``store``, ``group``, ``fresh``, ``time_limit`` and
            ``progress`` need it.
        repeat: Runs per training.
        store: Where records are kept: a store, a folder or its URL (default: TRAINATOMY_RECORDS, or
            ./trainatomy-records). Runs that are on record are not repeated, so an interrupted comparison continues
            where it stopped.
        group: Name that the records share; derived from the workloads by default.
        fresh: Run everything again, whatever is on record.
        time_limit: Seconds for each run.
        gpu: The GPU to predict for. By default the workloads' own or, with ``measure``, this machine's if it is known.
        calibration: See ``predict``.
        timeline: See ``predict``.
        trust_remote_code: See ``predict``.
        jobs: Processes that predict in parallel: by default this one or, with ``executor``, all that it has. A script
            that asks for several must start its own work behind ``if __name__ == "__main__"``.
        executor: Where to predict in place of local processes: ``"dask"`` or ``"ray"`` (started on this machine), the
            address of a cluster (``dask://HOST:PORT``, ``tcp://…``, ``ray://…``), a ``distributed.Client``, or an
            executor of ``concurrent.futures``. Predictions whose worker dies are repeated.
        keep: Folder (or its URL, for any filesystem that fsspec knows) in which each prediction is kept as soon as it
            is made, and from which an interrupted comparison continues. Workers of ``executor`` must reach it too.
        progress: Called with each run that ended, or an observer.
        **settings: Settings for all workloads, as in ``predict``.

    Raises:
        TrainatomyError: The errors of ``predict``; with ``measure`` only ``WorkloadError`` among them, because what
            cannot be predicted can still be measured, ``DeviceError`` if there is no GPU, and ``TrainatomyError`` if
            records cannot be written.
        ComparisonInterrupted: A ``KeyboardInterrupt`` that carries the comparison so far.
    """
    request = CompareRequest(
        measure=measure,
        repeat=repeat,
        effective_batch_size=effective_batch_size,
        store=store,
        group=group,
        fresh=fresh,
        time_limit=time_limit,
        timeline=timeline,
        calibration=resolve_calibration(calibration),
        trust_remote_code=trust_remote_code,
        jobs=jobs,
        executor=executor,
        keep=keep,
        keep_gpus=gpu is not None,
    )
    changed: Sequence[Workload] = [with_settings(workload, settings, gpu) for workload in workloads]
    if effective_batch_size is not None:
        changed = with_effective_batch_size(changed, effective_batch_size)
    if measure:
        return measure_comparison(changed, request, progress)
    if names := request.changed():
        raise WorkloadError(f"{', '.join(names)}: needs measure=True; a prediction is the same every time")
    return predict_comparison(changed, request)


def compare_gpus(
    workload: Workload,
    gpus: Sequence[str] | None = None,
    *,
    costs_per_hour: Mapping[str, float] | None = None,
    calibration: Calibration | Path | str | None = None,
    trust_remote_code: bool = False,
    jobs: int | None = None,
    executor: object = None,
    keep: Path | str | None = None,
    **settings: Any,
) -> Comparison:
    """Compare one training, as it is, on GPUs of several kinds: memory, time of a step and, with prices, cost.

    A GPU for which it cannot be predicted (one without bf16, for example) is a row that says so.  ``fit_gpus`` finds
    the best settings for each GPU.

    Args:
        workload: The training; its own GPU does not matter.
        gpus: Names of GPUs; all known ones by default.
        costs_per_hour: Prices per hour by the GPU's name, in any currency.
        calibration: See ``predict``.  GPUs that it does not apply to are not predicted.
        trust_remote_code: See ``predict``.
        jobs: See ``compare``.
        executor: See ``compare``.
        keep: See ``compare``.
        **settings: Settings of the workload, as in ``predict``.

    Raises:
        TrainatomyError: The errors of ``predict``, if it cannot be predicted for any of the GPUs.
    """
    request = CompareRequest(
        calibration=resolve_calibration(calibration),
        trust_remote_code=trust_remote_code,
        jobs=jobs,
        executor=executor,
        keep=keep,
    )
    return predict_gpus(with_settings(workload, settings), gpus, request, costs_per_hour)


def predict_gpus(
    workload: Workload,
    gpus: Sequence[str] | None,
    request: CompareRequest,
    costs_per_hour: Mapping[str, float] | None = None,
) -> Comparison:
    """Predict a training on several GPUs (see ``compare_gpus``)."""
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
