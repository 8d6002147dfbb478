"""Break one training step down into its operations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainatomy.api.keywords import with_settings
from trainatomy.errors import WorkloadError
from trainatomy.runs.options import load_calibration
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from trainatomy.catalog.calibrations import Calibration
    from trainatomy.results.operation_breakdown import OperationBreakdown
    from trainatomy.results.operations import Operations


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
    from trainatomy.step_detail import breakdown_of

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


def _profile(workload: Workload, operations: Operations) -> Any:
    """Profile a step on this machine's GPU, and join it with the predicted operations."""
    from trainatomy.measurement.profiler.join import join
    from trainatomy.measurement.profiler.profile import profile

    return join(operations, profile(workload))
