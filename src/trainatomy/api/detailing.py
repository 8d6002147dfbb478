"""Predict a training together with every allocation and operation, for reports, snapshots and traces.

Break one training step down into its operations.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainatomy.api.predicting import predict, with_settings
from trainatomy.errors import WorkloadError
from trainatomy.results.prediction import Prediction
from trainatomy.results.trace import Detail
from trainatomy.runs.options import load_calibration
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from trainatomy.catalog.calibrations import Calibration
    from trainatomy.results.operations import OperationBreakdown, Operations


def predict_in_detail(workload: Workload, **keywords: Any) -> tuple[Prediction, Detail]:
    """Return the prediction of a training, and every allocation and operation of the rank that it bills.

    Args:
        workload: The training.
        **keywords: Those of ``predict``.
    """
    from trainatomy.prediction.assemble import keep_executed
    from trainatomy.prediction.detail import detail_of_executed

    calibration = load_calibration(keywords.pop("calibration", None), [workload])
    with keep_executed() as executed:
        prediction = predict(workload, calibration=calibration, **keywords)
    return prediction, detail_of_executed(executed[-1], calibration, timed=keywords.get("timed", True))


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
    from trainatomy.prediction.detail import breakdown_of
    from trainatomy.simulator.simulate import simulate

    workload = with_settings(workload, settings)
    if workload.data.varies:
        raise WorkloadError(
            "data.lengths: ops lists one step: give data.sequence_length, the length of its batch", key="data.lengths"
        )
    loaded = load_calibration(calibration, [workload])
    if measured:
        from trainatomy.measurement.device.nvml import refuse_several_gpus, require_gpu

        refuse_several_gpus(workload.parallel, "a profile is of")
        require_gpu()
    simulation = simulate(workload, workload.resolve_gpu(), trust_remote_code=trust_remote_code)
    profile = _profile(workload, simulation.operations) if measured else None
    return breakdown_of(workload, simulation, loaded, profile, top)


def _profile(workload: Workload, operations: Operations) -> Any:
    """Profile a step on this machine's GPU, and join it with the predicted operations."""
    from trainatomy.measurement.profile import join, profile

    return join(operations, profile(workload))
