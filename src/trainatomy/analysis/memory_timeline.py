"""Memory by component over the steps, thinned out for drawing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainatomy.analysis.memory import COMPONENTS
from trainatomy.analysis.purposes import Purpose
from trainatomy.results.memory import TimelinePoint
from trainatomy.results.trace import AllocationTrace


def memory_timeline(
    trace: AllocationTrace, purposes: Sequence[Purpose], sizes: Sequence[int], points: int = 500
) -> tuple[TimelinePoint, ...]:
    """Return about ``points`` instants of a whole run, at most.

    The events are divided into stretches and the highest instant of each is kept, so that no peak is lost, and that at
    which each component takes most, temporary buffers in each phase.
    """
    stretch = max(1, len(trace.events) // points)
    step, phase = -1, "load"
    kept: dict[int, TimelinePoint] = {}
    largest: dict[tuple[str, str], TimelinePoint] = {}
    best: TimelinePoint | None = None
    highest = -1
    for index, totals in component_bytes_over_time(trace, purposes, sizes):
        event = trace.events[index]
        if event.action == "alloc":
            origin, name = trace.origins[event.allocation], purposes[event.allocation].component
            step, phase = origin.step, origin.phase
            key = name, phase if name == "temporary" else ""
            if totals[name] > (largest[key].components[name] if key in largest else 0):
                largest[key] = TimelinePoint(index, step, phase, dict(totals))
        total = sum(totals.values())
        if total > highest:
            best, highest = TimelinePoint(index, step, phase, dict(totals)), total
        if (index + 1) % stretch == 0 and best is not None:
            kept[best.event] = best
            best, highest = None, -1
    if best is not None:
        kept[best.event] = best
    kept |= {point.event: point for point in largest.values()}
    return tuple(kept[event] for event in sorted(kept))


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
