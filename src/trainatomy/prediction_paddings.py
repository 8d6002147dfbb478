"""Sizes of a predicted training that tensor cores take badly, and what padding them saves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainatomy.analysis.matmul_shapes import wasteful_shapes
from trainatomy.analysis.operation_table import OperationTable
from trainatomy.analysis.padding import paddings

if TYPE_CHECKING:
    from trainatomy.catalog.calibrations import Calibration
    from trainatomy.results.operation_breakdown import Padding
    from trainatomy.results.time import Time
    from trainatomy.simulator.simulation import Simulation
    from trainatomy.workload.schema import Workload

LEAST_SHARE = 0.01
"""Share of a step that a padding has to save to be mentioned."""


def paddings_of(
    workload: Workload, simulation: Simulation, calibration: Calibration | None, time: Time
) -> tuple[Padding, ...]:
    """Return the sizes whose padding saves a noticeable part of the step, the largest gain first."""
    from trainatomy.timing.cost_model import cost_model_of, kernel_cost, tensor_cores_for_fp32

    gpu, operations = workload.resolve_gpu(), simulation.operations
    table = OperationTable(operations, None, None, [True] * len(operations.operations))
    shapes = wasteful_shapes(table, gpu.capability, gpu.multiprocessors, bool(workload.train.tf32))
    if not shapes:
        return ()
    tf32 = tensor_cores_for_fp32(workload.train.tf32, simulation.torch_version)
    model = cost_model_of(gpu, calibration, tf32=tf32, links=workload.parallel.links(gpu))
    found = paddings(shapes, table, workload.to_mapping(), lambda call: kernel_cost(call, model).seconds)
    return tuple(each for each in found if each.setting and (each.gain_seconds or 0) >= LEAST_SHARE * time.step_seconds)
