"""Predict a training together with every allocation and operation, for reports, snapshots and traces.

Break one training step down into its operations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainatomy.api.elsewhere import with_settings
from trainatomy.api.predicting import predict, predict_training
from trainatomy.catalog.calibrations import resolve_calibration
from trainatomy.errors import WorkloadError
from trainatomy.measurement.device.nvml import refuse_several_gpus, require_gpu
from trainatomy.measurement.profile import join, profile
from trainatomy.prediction.assemble import keep_executed
from trainatomy.prediction.detail import breakdown_of, detail_of_executed
from trainatomy.requests.predicting import OpsRequest, PredictRequest, Training, load_calibration
from trainatomy.results.prediction import Prediction
from trainatomy.results.trace import Detail
from trainatomy.simulator.simulate import simulate
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from trainatomy.catalog.calibrations import Calibration
    from trainatomy.results.operations import OperationBreakdown


def predict_in_detail(workload: Workload, **keywords: Any) -> tuple[Prediction, Detail]:
    """Return the prediction of a training, and every allocation and operation of the rank that it bills.

    Args:
        workload: The training.
        **keywords: Those of ``predict``.
    """
    calibration = load_calibration(keywords.pop("calibration", None), [workload])
    return _in_detail(
        partial(predict, workload, calibration=calibration, **keywords), calibration, timed=keywords.get("timed", True)
    )


def predict_training_in_detail(
    training: Training, request: PredictRequest, on_progress: Callable[[str], None] | None = None
) -> tuple[Prediction, Detail]:
    """Predict a training as it is asked for, in detail (see ``predict_in_detail``)."""
    predicted = partial(predict_training, training, request, on_progress)
    return _in_detail(predicted, request.calibration, timed=request.timed)


def _in_detail(
    predict: Callable[[], Prediction], calibration: Calibration | None, *, timed: bool
) -> tuple[Prediction, Detail]:
    with keep_executed() as executed:
        prediction = predict()
    return prediction, detail_of_executed(executed[-1], calibration, timed=timed)


def ops(
    workload: Workload,
    *,
    top: int = 15,
    measured: bool = False,
    calibration: Calibration | Path | str | None = None,
    trust_remote_code: bool = False,
    **settings: Any,
) -> OperationBreakdown:
    """Break one step down into its operations: FLOP, bytes, time and memory by group and phase.

    Args:
        workload: The training.
        top: How many of the heaviest operations and modules to list.
        measured: Add a profile of this machine's GPU.
        calibration: See ``predict``.
        trust_remote_code: See ``predict``.
        **settings: Settings that override those of the workload, as in ``predict``.

    Raises:
        TrainatomyError: The errors of ``predict``, and ``DeviceError`` if there is no GPU to profile on.
    """
    request = OpsRequest(top, measured, resolve_calibration(calibration), trust_remote_code)
    return break_down(with_settings(workload, settings), request)


def break_down(workload: Workload, request: OpsRequest) -> OperationBreakdown:
    """Break one step down as it is asked for (see ``ops``)."""
    if workload.data.varies:
        raise WorkloadError(
            "data.lengths: ops lists one step: give data.sequence_length, the length of its batch", key="data.lengths"
        )
    calibration = load_calibration(request.calibration, [workload])
    if request.measured:
        refuse_several_gpus(workload.parallel, "a profile is of")
        require_gpu()
    simulation = simulate(workload, workload.resolve_gpu(), trust_remote_code=request.trust_remote_code)
    measured = join(simulation.operations, profile(workload)) if request.measured else None
    return breakdown_of(workload, simulation, calibration, measured, request.top)
