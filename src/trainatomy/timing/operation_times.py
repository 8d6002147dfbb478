"""Times at which each operation of a step is launched and executed, as the timing model follows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainatomy.results.detail import TimedOperation
from trainatomy.results.operations import Operations
from trainatomy.timing.cost_model import cost_model_of
from trainatomy.timing.step import replayed

if TYPE_CHECKING:
    from trainatomy.catalog.calibrations import Calibration
    from trainatomy.catalog.gpus import GPU
    from trainatomy.catalog.links import Links
    from trainatomy.results.trace import DriverCall


def timed_operations(
    operations: Operations,
    gpu: GPU,
    *,
    loop: str,
    tf32: bool | None,
    calibration: Calibration | None,
    driver_calls: Sequence[DriverCall],
    links: Links | None,
    samples: int,
    collated: bool,
    one_thread: bool,
) -> tuple[tuple[TimedOperation, ...], float]:
    """Return the operations of a rank's step with their times, in launch order, and the step's duration.

    The arguments are those of ``predict_step_time``.  Views are left out.  In a pipeline the rank works without pauses,
    as if it never waited for another.
    """
    cost_model = cost_model_of(gpu, calibration, tf32=tf32, links=links)
    found: list[TimedOperation] = []

    def note(index: int, launched: float, launch_end: float, begin: float, seconds: float) -> None:
        operation = operations.operations[index]
        call = operations.calls[operation.call]
        if call.is_view:
            return
        found.append(
            TimedOperation(
                name=call.name,
                module=operation.module,
                phase=operation.phase,
                stream=operation.stream,
                launched=launched,
                launch_seconds=launch_end - launched,
                begin=begin,
                seconds=seconds,
                event=operation.event,
            )
        )

    timeline = replayed(
        operations,
        cost_model,
        gpu,
        loop,
        calibration,
        driver_calls,
        on_launch=note,
        samples=samples,
        collated=collated,
        one_thread=one_thread,
    )
    return tuple(found), timeline.seconds
