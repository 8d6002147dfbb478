"""CPU time of the memory that the caching allocator takes from the driver and gives back during a step.

Most steady steps need none: the cache serves every request.  Close to the memory limit the allocator frees its cache
and takes new segments in every step, and ``cudaFree`` waits until the GPU has finished all work launched before.

The costs of ``cudaMalloc`` and ``cudaFree`` by size are measured by ``trainatomy calibrate``
(``sections.device.memory``).  Most of that is the driver's work on the CPU, so a GPU without a calibration uses the
nearest GPU's figures unscaled.  Assumed: pages of expandable segments cost as much as a segment of the same size, and
a refused request as much as the smallest segment.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from trainatomy.catalog.calibrations import shipped
from trainatomy.lookup import on_line
from trainatomy.results.operations import Operations
from trainatomy.results.trace import DriverAction, DriverCall
from trainatomy.timing.cost_model import nearest_calibration

if TYPE_CHECKING:
    from trainatomy.catalog.calibrations import Calibration
    from trainatomy.catalog.gpus import GPU

Curve = tuple[tuple[int, float], ...]
"""(bytes, seconds) points, sorted by bytes."""
_RELEASES: frozenset[DriverAction] = frozenset({"free", "unmap"})


class DriverWork(NamedTuple):
    """CPU time that the driver takes before an operation is launched, and whether it waits for the GPU first."""

    seconds: float
    waits: bool


@dataclass(frozen=True, slots=True)
class DriverCosts:
    """Seconds that the driver needs to allocate and to free memory, by size."""

    allocate: Curve
    free: Curve

    def seconds(self, action: DriverAction, size: int) -> float:
        """Return the CPU time of one request of ``size`` bytes."""
        if action == "refused":
            return self.allocate[0][1]
        return on_line(self.free if action in _RELEASES else self.allocate, size, after=True)


def driver_costs(gpu: GPU, calibration: Calibration | None = None) -> DriverCosts:
    """Return the costs by ``calibration``, else by the GPU's shipped calibration, else by the nearest GPU's."""
    for one in (calibration, shipped().get(gpu.id), nearest_calibration(gpu)):
        rows = one.sections.get("device", {}).get("memory", ()) if one else ()
        if rows:
            return DriverCosts(_curve(rows, "malloc_us"), _curve(rows, "free_us"))
    return DriverCosts(((0, 0.0),), ((0, 0.0),))


def _curve(rows: Sequence[Mapping[str, float]], name: str) -> Curve:
    return tuple(sorted((int(row["bytes"]), row[name] * 1e-6) for row in rows))


def driver_work(operations: Operations, calls: Iterable[DriverCall], costs: DriverCosts) -> dict[int, DriverWork]:
    """Return the driver's work caused by each operation of the step, by index in ``operations.operations``.

    A step that frees nothing keeps the memory it takes, so the next step finds it in the cache: its driver calls are
    not part of a steady step, and the result is empty.

    Args:
        operations: The operations of one step.
        calls: The driver calls of the whole allocation trace, whose events ``Operation.event`` counts; those before
            the step are ignored.
        costs: Cost of each driver call.
    """
    begins = [operation.event for operation in operations.operations]
    found: dict[int, DriverWork] = {}
    for event, action, size in calls:
        index = bisect_right(begins, event) - 1
        if index >= 0:
            seconds, waits = found.get(index, DriverWork(0.0, False))
            found[index] = DriverWork(seconds + costs.seconds(action, size), waits or action in _RELEASES)
    return found if any(work.waits for work in found.values()) else {}
