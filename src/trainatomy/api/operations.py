"""Break one training step down into its operations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.analysis.memory import analyze_memory
from trainatomy.api.keywords import with_settings
from trainatomy.errors import WorkloadError
from trainatomy.runs.options import load_calibration
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from trainatomy.analysis.operations import PredictedTimes
    from trainatomy.catalog.calibrations import Calibration
    from trainatomy.results.operation_breakdown import OperationBreakdown
    from trainatomy.results.operations import Operations
    from trainatomy.simulator.simulate import Simulation
    from trainatomy.timing.cost_model import CostModel


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
    from trainatomy.simulator.simulate import simulate

    workload = with_settings(workload, settings)
    if workload.data.varies:
        raise WorkloadError(
            "data.lengths: ops lists one step: give data.sequence_length, the length of its batch", key="data.lengths"
        )
    loaded = load_calibration(calibration, [workload])
    if measured:
        from trainatomy.measurement.device.visible import refuse_several_gpus, require_gpu

        refuse_several_gpus(workload.parallel, "a profile is of")
        require_gpu()
    simulation = simulate(workload, workload.resolve_gpu(), trust_remote_code=trust_remote_code)
    profile = _profile(workload, simulation.operations) if measured else None
    return breakdown_of(workload, simulation, loaded, profile, top)


def breakdown_of(
    workload: Workload, simulation: Simulation, calibration: Calibration | None, profile: Any = None, top: int = 15
) -> OperationBreakdown:
    """Return the breakdown of a simulated step, beside a profile of it if there is one."""
    from trainatomy.analysis.operations import analyze_operations, bytes_by_group
    from trainatomy.analysis.published_layer import SCOPE, published_notes, published_shares
    from trainatomy.prediction import context_bytes, nccl_bytes_of
    from trainatomy.timing.cost_model import cost_model_of, tensor_cores_for_fp32
    from trainatomy.workload.encoder_layer import is_encoder_layer

    gpu, trace, operations = workload.resolve_gpu(), simulation.trace, simulation.operations
    allocator = AllocatorSettings.parse(workload.allocator, simulation.torch_version)
    outside = context_bytes(workload, simulation), nccl_bytes_of(workload, simulation)
    memory = analyze_memory(trace, allocator, gpu.memory_bytes, *outside)
    tf32 = tensor_cores_for_fp32(workload.train.tf32, simulation.torch_version)
    cost_model = cost_model_of(gpu, calibration, tf32=tf32, links=workload.parallel.links(gpu))
    predicted = _predict_times(operations, cost_model)
    notes = [f"predicted times are based on: {cost_model.source}"]
    if (world := workload.parallel.world_size) > 1:
        one = "the first" if workload.parallel.devices > 1 else "rank 0"
        notes.append(f"these are the operations of {one} of {world} GPUs")
    published = is_encoder_layer(workload)
    return analyze_operations(
        workload.display_name,
        workload.to_mapping(),
        gpu,
        operations,
        peak=bytes_by_group(trace, memory.held_at_peak, memory.sizes),
        predicted=predicted,
        profile=profile,
        scope=SCOPE if published else None,
        tf32=bool(workload.train.tf32),
        top=top,
        published=published_shares() if published else None,
        notes=(*(published_notes(operations, predicted.times) if published else ()), *notes),
    )


def _profile(workload: Workload, operations: Operations) -> Any:
    """Profile a step on this machine's GPU, and join it with the predicted operations."""
    from trainatomy.measurement.profiler.join import join
    from trainatomy.measurement.profiler.profile import profile

    return join(operations, profile(workload))


def _predict_times(operations: Operations, cost_model: CostModel) -> PredictedTimes:
    """Return the GPU seconds of each operation."""
    from trainatomy.analysis.operation_table import PredictedTime
    from trainatomy.analysis.operations import PredictedTimes
    from trainatomy.timing.cost_model import kernel_cost
    from trainatomy.timing.replay import COLLECTIVES

    costs = [kernel_cost(call, cost_model) for call in operations.calls]
    bounds = [
        "communication"
        if call.name.startswith(COLLECTIVES)
        else "arithmetic"
        if cost.flop_seconds > cost.bytes_seconds
        else "memory bandwidth"
        for call, cost in zip(operations.calls, costs, strict=True)
    ]
    by_call = [PredictedTime(cost.seconds, bound) for cost, bound in zip(costs, bounds, strict=True)]
    return PredictedTimes(
        [by_call[one.call] for one in operations.operations], lambda call: kernel_cost(call, cost_model).seconds
    )
