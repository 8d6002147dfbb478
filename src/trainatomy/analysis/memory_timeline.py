"""Memory by component over the steps, thinned out for drawing."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from trainatomy.analysis.memory import COMPONENTS
from trainatomy.analysis.purposes import Purpose
from trainatomy.results.memory import TimelinePoint
from trainatomy.results.trace import AllocationTrace


def memory_timeline(
    trace: AllocationTrace, purposes: Sequence[Purpose], sizes: Sequence[int], points: int = 500
) -> tuple[TimelinePoint, ...]:
    """Return about ``points`` instants of a whole run, at most.

    The events are divided into stretches and the highest instant of each is kept, so that no peak is lost.
    """
    stretch = max(1, len(trace.events) // points)
    locate = _Locator(trace)
    kept: list[TimelinePoint] = []
    best: TimelinePoint | None = None
    highest = -1
    for index, totals in component_bytes_over_time(trace, purposes, sizes):
        total = sum(totals.values())
        if total > highest:
            step, phase = locate.at(index)
            best, highest = TimelinePoint(index, step, phase, dict(totals)), total
        if (index + 1) % stretch == 0 and best is not None:
            kept.append(best)
            best, highest = None, -1
    if best is not None:
        kept.append(best)
    return tuple(kept)


def component_bytes_over_time(
    trace: AllocationTrace, purposes: Sequence[Purpose], sizes: Sequence[int], start: int = 0
) -> Iterator[tuple[int, dict[str, int]]]:
    """Yield the index of each event from ``start`` on and the bytes by component after it.

    The dictionary is the same object each time.
    """
    totals = dict.fromkeys((*COMPONENTS, *sorted({each.component for each in purposes} - set(COMPONENTS))), 0)
    for index, (action, allocation, _, _) in enumerate(trace.events):
        if action == "alloc":
            totals[purposes[allocation].component] += sizes[allocation]
        elif action == "free":
            totals[purposes[allocation].component] -= sizes[allocation]
        if index >= start:
            yield index, totals


class _Locator:
    """Lookup of the step and phase of an event: those of the latest allocation up to it."""

    def __init__(self, trace: AllocationTrace) -> None:
        self._trace = trace
        allocations = [(i, e.allocation) for i, e in enumerate(trace.events) if e.action == "alloc"]
        self._indices = [index for index, _ in allocations]
        self._allocations = [allocation for _, allocation in allocations]

    def at(self, index: int) -> tuple[int, str]:
        """Return step and phase of the event of that index."""
        position = bisect_right(self._indices, index) - 1
        if position < 0:
            return -1, "load"
        origin = self._trace.origins[self._allocations[position]]
        return origin.step, origin.phase
