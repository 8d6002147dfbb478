"""What memory from the driver costs a step: segments that the caching allocator takes and gives back.

In a steady step of most trainings there is none: the cache serves every request.  Near the end of a card the allocator
gives its cache back and takes segments anew in every step, and ``cudaFree`` waits until the GPU has done what it was
given.  The costs of ``cudaMalloc`` and ``cudaFree`` by size are measured by ``trainatomy calibrate``
(``sections.device.memory``); most of it is the driver's work on the host, so a card without a calibration takes what
another card's has, unscaled.  Assumed: pages of expandable segments cost what a segment of their size does; a request
that is refused, what the smallest segment does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from trainatomy.catalog.calibrations import shipped
from trainatomy.results.operations import Operations
from trainatomy.results.trace import DriverAction, DriverCall
from trainatomy.timing.cost_model import nearest

if TYPE_CHECKING:
    from trainatomy.catalog.calibrations import Calibration
    from trainatomy.catalog.gpus import GPU

Curve = tuple[tuple[int, float], ...]
"""Seconds by bytes, in the order of bytes."""
_GIVES_BACK: frozenset[DriverAction] = frozenset({"free", "unmap"})


class MemoryWork(NamedTuple):
    """What an operation costs the host before its kernels are issued. ``waits``: until the GPU is done, first."""

    seconds: float
    waits: bool


@dataclass(frozen=True, slots=True)
class MemoryCosts:
    """Seconds that the driver needs to give memory (``taken``) and to take it back (``freed``), by bytes."""

    taken: Curve
    freed: Curve

    def seconds(self, action: DriverAction, size: int) -> float:
        """What one request costs the host."""
        if action == "refused":
            return self.taken[0][1]
        return _at(self.freed if action in _GIVES_BACK else self.taken, size)


def memory_costs(gpu: GPU, calibration: Calibration | None = None) -> MemoryCosts:
    """By ``calibration``, else by the one that ships for the card, else by that of the card nearest to it."""
    for one in (calibration, shipped().get(gpu.id), nearest(gpu)):
        rows = one.sections.get("device", {}).get("memory", ()) if one else ()
        if rows:
            return MemoryCosts(_curve(rows, "malloc_us"), _curve(rows, "free_us"))
    return MemoryCosts(((0, 0.0),), ((0, 0.0),))


def _curve(rows: Sequence[Mapping[str, float]], name: str) -> Curve:
    return tuple(sorted((int(row["bytes"]), row[name] * 1e-6) for row in rows))


def memory_work(operations: Operations, calls: Iterable[DriverCall], costs: MemoryCosts) -> dict[int, MemoryWork]:
    """The work that each operation of the step makes for the driver, by its index in ``operations.operations``.

    ``calls``: of the whole tape, whose events ``Operation.event`` counts; those before the step are left out.  A step
    that gives nothing back keeps what it takes, and the next one finds it in the cache: its work is no part of a steady
    step.
    """
    begins = [operation.event for operation in operations.operations]
    found: dict[int, MemoryWork] = {}
    for event, action, size in calls:
        index = bisect_right(begins, event) - 1
        if index >= 0:
            seconds, waits = found.get(index, MemoryWork(0.0, False))
            found[index] = MemoryWork(seconds + costs.seconds(action, size), waits or action in _GIVES_BACK)
    return found if any(work.waits for work in found.values()) else {}


def _at(curve: Curve, size: int) -> float:
    """On the line between the two nearest points; beyond the last as the last two go on, below the first as there."""
    if size <= curve[0][0] or len(curve) == 1:
        return curve[0][1]
    upper = min(bisect_right([point for point, _ in curve], size), len(curve) - 1)
    (low, cheap), (high, dear) = curve[upper - 1], curve[upper]
    return cheap + (dear - cheap) * (size - low) / (high - low)
