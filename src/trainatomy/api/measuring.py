"""Measure a training on this machine's GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from trainatomy.api.elsewhere import predict_row, with_settings
from trainatomy.api.verb import verb
from trainatomy.errors import WorkloadError
from trainatomy.measurement.measure import Runs
from trainatomy.measurement.measure import measure as measure_run
from trainatomy.measurement.process.job import Progress
from trainatomy.measurement.process.pool import Processes
from trainatomy.requests.measuring import MeasureRequest
from trainatomy.requests.predicting import COMPARED_PACES, PredictRequest
from trainatomy.results.measurement import Measurement
from trainatomy.runs.single import MeasuredRun, this_machine
from trainatomy.runs.single import measure_and_record as record_run
from trainatomy.workload.measurable import measurable
from trainatomy.workload.schema import Workload


@verb(MeasureRequest, only=("components", "trace", "time_limit"))
def measure(
    workload: Workload,
    *,
    request: MeasureRequest,
    steps: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    **settings: Any,
) -> Measurement:
    """Measure a training step on this machine's GPU, in fresh processes: one run is timed, one is recorded.

    Running out of memory is a result, not an error.

    Args:
        workload: The training.
        request: How to measure it.
        steps: Optimizer steps, if the workload does not name a number.
        progress: Called while the runs go on.
        **settings: Settings that override those of the workload, as in ``predict``.

    Raises:
        DeviceError: There is no GPU, or the process that used it failed.
        TrainatomyError: Errors that the workload itself causes.
    """
    runs = Runs(request.components, request.trace, request.time_limit, steps)
    return measure_run(measurable(with_settings(workload, settings)), runs, progress)


def measure_and_record(
    workload: Workload, request: MeasureRequest, progress: Callable[[Progress], None] | None = None
) -> MeasuredRun:
    """Predict a training, measure it on this machine's GPU, and record both.

    Args:
        workload: The training; predicted for this machine's GPU unless ``request.keep_gpus``.
        request: How to measure and to predict it, and where to keep the record.
        progress: See ``measure``.

    Raises:
        TrainatomyError: The errors of ``measure``, or the record's folder cannot be written.
    """
    predicting = PredictRequest(
        calibration=request.calibration,
        trust_remote_code=request.trust_remote_code,
        ranks=tuple(range(1, workload.parallel.world_size)),
        host_paces=COMPARED_PACES,
    )
    runs = Runs(request.components, request.trace, request.time_limit)
    with Processes() as processes:
        return record_run(
            workload,
            partial(predict_row, predicting),
            lambda described, meanwhile: measure_run(described, runs, progress, meanwhile, processes),
            request,
            processes,
        )


def this_gpu() -> str:
    """Return the id of this machine's GPU."""
    found = this_machine().resolve_gpu()
    if found is None:
        raise WorkloadError("gpu: this machine's GPU is not a known one; name the one to search for", key="gpu")
    return found.id
