"""Predict a training together with every allocation and operation, for reports, snapshots and traces.

Break one training step down into its operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainatomy.api.elsewhere import with_settings
from trainatomy.api.predicting import predict_training
from trainatomy.api.verb import verb
from trainatomy.errors import WorkloadError
from trainatomy.measurement.device.nvml import refuse_several_gpus, require_gpu
from trainatomy.measurement.profile import join, profile
from trainatomy.prediction.assemble import keep_executed
from trainatomy.prediction.detail import breakdown_of, detail_of_executed
from trainatomy.requests.predicting import Batch, OpsRequest, PredictRequest, Training, load_calibration
from trainatomy.results.operations import OperationBreakdown
from trainatomy.results.prediction import Prediction
from trainatomy.results.trace import Detail
from trainatomy.simulator.simulate import simulate
from trainatomy.workload.schema import Workload


@verb(PredictRequest)
def predict_in_detail(
    what: Workload | nn.Module,
    *,
    batch: Batch | None = None,
    optimizer: str | type[torch.optim.Optimizer] | Callable[[Any], Any] | None = None,
    gpu: str | None = None,
    request: PredictRequest,
    on_progress: Callable[[str], None] | None = None,
    **settings: Any,
) -> tuple[Prediction, Detail]:
    """Return the prediction of a training, and every allocation and operation of the rank that it bills.

    Args:
        what: See ``predict``.
        batch: See ``predict``.
        optimizer: See ``predict``.
        gpu: See ``predict``.
        request: How to predict it.
        on_progress: See ``predict``.
        **settings: See ``predict``.
    """
    with keep_executed() as executed:
        prediction = predict_training(Training(what, batch, optimizer, gpu, settings), request, on_progress)
    return prediction, detail_of_executed(executed[-1], request.calibration, timed=request.timed)


@verb(OpsRequest)
def ops(workload: Workload, *, request: OpsRequest, **settings: Any) -> OperationBreakdown:
    """Break one step down into its operations: FLOP, bytes, time and memory by group and phase.

    Args:
        workload: The training.
        request: How to break it down.
        **settings: Settings that override those of the workload, as in ``predict``.

    Raises:
        TrainatomyError: The errors of ``predict``, and ``DeviceError`` if there is no GPU to profile on.
    """
    workload = with_settings(workload, settings)
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
