"""Assemble the detail of a simulated training: every allocation, every operation, and the operations by group."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.analysis.detail import detail_of
from trainatomy.analysis.memory import MemoryAnalysis
from trainatomy.analysis.operation_table import PredictedTime
from trainatomy.analysis.operations import Analyzed, PredictedTimes, Scope, analyze_operations, bytes_by_group
from trainatomy.analysis.published import SCOPE, published_notes, published_shares
from trainatomy.catalog.calibrations import Calibration
from trainatomy.operators.traffic import crosses
from trainatomy.prediction.assemble import Executed, analysis_of, timed_step
from trainatomy.prediction.inputs import context_bytes, nccl_bytes_of
from trainatomy.results.operations import OperationBreakdown, Operations
from trainatomy.results.trace import Detail
from trainatomy.timing.cost_model import CostModel, cost_model_of, kernel_cost, tensor_cores_for_fp32
from trainatomy.timing.one_stream import COLLECTIVES
from trainatomy.workload.builtin import is_encoder_layer
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from trainatomy.simulator.simulation import Simulation


HEAVIEST = 60
"""Operations that a detail lists at most."""


def detail_of_executed(executed: Executed, calibration: Calibration | None, *, timed: bool = True) -> Detail:
    """Return every allocation and operation of a simulation that a prediction was made from.

    Args:
        executed: The simulation (see ``prediction.keep_executed``).
        calibration: The calibration that times were predicted with.
        timed: Whether to include the operations with their times.
    """
    workload, simulation, analysis = executed
    gpu = workload.resolve_gpu()
    capacity = gpu.memory_bytes - context_bytes(workload, simulation) - nccl_bytes_of(workload, simulation)
    settings = AllocatorSettings.parse(workload.allocator, simulation.torch_version)
    found = detail_of(simulation.trace, analysis, settings, capacity, gpu.memory_bytes, workload.allocator or "")
    return _with_operations(found, executed, calibration) if timed else found


def _with_operations(detail: Detail, executed: Executed, calibration: Calibration | None) -> Detail:
    """Return the detail with the operations of a step, one by one and by group."""
    workload, simulation, analysis = executed
    timed, step_seconds = timed_step(workload, simulation, calibration, analysis.driver_calls)
    operations = breakdown_of(workload, simulation, calibration, top=HEAVIEST, analysis=analysis)
    return replace(detail, timed=timed, step_seconds=step_seconds, operations=operations)


def breakdown_of(
    workload: Workload,
    simulation: Simulation,
    calibration: Calibration | None,
    profile: Any = None,
    top: int = 15,
    analysis: MemoryAnalysis | None = None,
) -> OperationBreakdown:
    """Return the breakdown of a simulated step by its operations.

    Args:
        workload: The training.
        simulation: Its simulation.
        calibration: The calibration to predict times with; ``None`` for the one that ships.
        profile: A profile of the same step on a GPU, joined with its operations.
        top: How many of the heaviest operations and modules to list.
        analysis: The analysis of its memory, if there is one already.
    """
    gpu, trace, operations = workload.resolve_gpu(), simulation.trace, simulation.operations
    memory = analysis or analysis_of(workload, simulation, calibration)
    tf32 = tensor_cores_for_fp32(workload.tf32, simulation.torch_version)
    cost_model = cost_model_of(gpu, calibration, tf32=tf32, links=workload.parallel.links(gpu))
    predicted = _predict_times(operations, cost_model)
    notes = [f"predicted times are based on: {cost_model.source}"]
    if (world := workload.parallel.world_size) > 1:
        one = "the first" if workload.parallel.devices > 1 else "rank 0"
        notes.append(f"these are the operations of {one} of {world} GPUs")
    published = is_encoder_layer(workload)
    training = Analyzed(
        workload.display_name,
        workload.to_mapping(),
        gpu,
        tf32=bool(workload.tf32),
        scope=SCOPE if published else Scope(),
        published=published_shares() if published else None,
        notes=(*(published_notes(operations, predicted.times) if published else ()), *notes),
        experts=simulation.experts,
    )
    return analyze_operations(
        training,
        operations,
        peak=bytes_by_group(trace, memory.held_at_peak, memory.sizes),
        predicted=predicted,
        profile=profile,
        top=top,
    )


def _predict_times(operations: Operations, cost_model: CostModel) -> PredictedTimes:
    """Return the GPU seconds of each operation."""
    costs = [kernel_cost(call, cost_model) for call in operations.calls]
    bounds = [
        "communication"
        if call.name.startswith(COLLECTIVES)
        else "transfers"
        if crosses(call)
        else "arithmetic"
        if cost.flop_seconds > cost.bytes_seconds
        else "memory bandwidth"
        for call, cost in zip(operations.calls, costs, strict=True)
    ]
    by_call = [PredictedTime(cost.seconds, bound) for cost, bound in zip(costs, bounds, strict=True)]
    return PredictedTimes(
        [by_call[one.call] for one in operations.operations], lambda call: kernel_cost(call, cost_model).seconds
    )
