"""Predict a training together with every allocation and operation, for reports, snapshots and traces."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.api.operations import breakdown_of
from trainatomy.api.predicting import predict
from trainatomy.results.detail import Detail
from trainatomy.results.prediction import Prediction
from trainatomy.runs.options import load_calibration
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from trainatomy.catalog.calibrations import Calibration
    from trainatomy.prediction import Executed

HEAVIEST = 60
"""Operations that a report lists at most."""


def predict_in_detail(workload: Workload, **keywords: Any) -> tuple[Prediction, Detail]:
    """Return the prediction of a training, and every allocation and operation of the rank that it bills.

    Args:
        workload: The training.
        **keywords: Those of ``predict``.
    """
    from trainatomy.prediction import keep_executed

    calibration = load_calibration(keywords.pop("calibration", None), [workload])
    with keep_executed() as executed:
        prediction = predict(workload, calibration=calibration, **keywords)
    return prediction, detail_of_executed(executed[-1], calibration, timed=keywords.get("timed", True))


def detail_of_executed(executed: Executed, calibration: Calibration | None, *, timed: bool = True) -> Detail:
    """Return every allocation and operation of a simulation that a prediction was made from.

    Args:
        executed: The simulation (see ``prediction.keep_executed``).
        calibration: The calibration that times were predicted with.
        timed: Whether to include the operations with their times.
    """
    from trainatomy.analysis.detail import detail_of
    from trainatomy.prediction import context_bytes, nccl_bytes_of

    workload, simulation, analysis = executed
    gpu = workload.resolve_gpu()
    capacity = gpu.memory_bytes - context_bytes(workload, simulation) - nccl_bytes_of(workload, simulation)
    settings = AllocatorSettings.parse(workload.allocator, simulation.torch_version)
    found = detail_of(simulation.trace, analysis, settings, capacity, gpu.memory_bytes, workload.allocator or "")
    return _with_operations(found, executed, calibration) if timed else found


def _with_operations(detail: Detail, executed: Executed, calibration: Calibration | None) -> Detail:
    """Return the detail with the operations of a step, one by one and by group."""
    from trainatomy.timing.cost_model import tensor_cores_for_fp32
    from trainatomy.timing.operation_times import timed_operations
    from trainatomy.workload.loops import loop_of

    workload, simulation, analysis = executed
    gpu = workload.resolve_gpu()
    timed, step_seconds = timed_operations(
        simulation.operations,
        gpu,
        loop=loop_of(workload).cpu_costs,
        tf32=tensor_cores_for_fp32(workload.train.tf32, simulation.torch_version),
        calibration=calibration,
        driver_calls=analysis.driver_calls,
        links=workload.parallel.links(gpu),
    )
    operations = breakdown_of(workload, simulation, calibration, top=HEAVIEST)
    return replace(detail, timed=timed, step_seconds=step_seconds, operations=operations)
