"""Parts of a training whose samples differ in length that are measured, or predicted by a search."""

from __future__ import annotations

from collections.abc import Sequence

from trainatomy.errors import WorkloadError
from trainatomy.workload.schema import Workload
from trainatomy.workload.trl import packing_strategy

MOST_MEASURED_STEPS = 300
"""Steps of an epoch of different lengths that are measured unless the workload sets their number."""

SEARCHED_ORDERS, SEARCHED_SHAPES = 3, 16
"""Orders and lengths at most that a search executes of each candidate."""


def measurable(workload: Workload) -> Workload:
    """Return a training whose samples differ in length with the one order, and the steps of it, that are measured.

    Prediction and measurement then have the same batches.  Other training runs are returned as they are.

    Raises:
        WorkloadError: TRL packs the samples, so that the number of steps in an epoch is not known.
    """
    lengths = workload.data.lengths
    if lengths is None or not workload.data.varies:
        return workload
    if workload.steps is None and packing_strategy(workload) is not None:
        raise WorkloadError("steps: say how many steps to measure of an epoch of packs", key="steps")
    accumulated = workload.train.gradient_accumulation_steps * workload.parallel.data_parallel_size
    in_epoch = lengths.count // (workload.batch_size * accumulated)
    steps = workload.steps or min(max(in_epoch, 1), MOST_MEASURED_STEPS)
    return workload.replace({"data.lengths.orders": 1, "steps": steps})


def fewer_lengths(workload: Workload) -> Workload:
    """Return a candidate of a search with fewer orders and lengths to execute, where its samples differ in length."""
    lengths = workload.data.lengths
    if lengths is None or not workload.data.varies:
        return workload
    return workload.replace(
        {
            "data.lengths.orders": min(lengths.orders, SEARCHED_ORDERS),
            "data.lengths.shapes": min(lengths.shapes or SEARCHED_SHAPES, SEARCHED_SHAPES),
        }
    )


def refuse_era(workloads: Sequence[Workload]) -> None:
    """Raise ``WorkloadError`` for workloads that emulate old libraries: only the installed ones can be measured."""
    for workload in workloads:
        if workload.era is not None:
            raise WorkloadError(
                f"{workload.where('era')}: a measurement runs the installed libraries; era {workload.era} can be "
                "predicted, but not measured",
                key="era",
            )
