"""Memory by component over the steps, thinned to what an eye can see."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from trainatomy.analysis.balance import over_time
from trainatomy.analysis.purposes import Purpose
from trainatomy.results.memory import TimelinePoint
from trainatomy.results.trace import AllocationTrace


def timeline(
    trace: AllocationTrace, purposes: Sequence[Purpose], sizes: Sequence[int], points: int = 500
) -> tuple[TimelinePoint, ...]:
    """At most about ``points`` instants of a whole run; in each stretch of events the highest one is kept, so that no
    peak is lost."""
    stretch = max(1, len(trace.events) // points)
    where = _Where(trace)
    kept: list[TimelinePoint] = []
    best: TimelinePoint | None = None
    highest = -1
    for index, totals in over_time(trace, purposes, sizes):
        total = sum(totals.values())
        if total > highest:
            step, phase = where.at(index)
            best, highest = TimelinePoint(index, step, phase, dict(totals)), total
        if (index + 1) % stretch == 0 and best is not None:
            kept.append(best)
            best, highest = None, -1
    if best is not None:
        kept.append(best)
    return tuple(kept)


class _Where:
    """Step and phase of an event: those of the newest allocation before it."""

    def __init__(self, trace: AllocationTrace) -> None:
        self._tape = trace
        self._born = [(i, e.allocation) for i, e in enumerate(trace.events) if e.action == "alloc"]
        self._indices = [i for i, _ in self._born]

    def at(self, index: int) -> tuple[int, str]:
        position = bisect_right(self._indices, index) - 1
        if position < 0:
            return -1, "load"
        origin = self._tape.origins[self._born[position][1]]
        return origin.step, origin.phase
