"""Follow an allocation trace event by event: lifetimes, addresses, segments.

Memory by component over the steps, thinned out for drawing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainatomy.allocator.blocks import SegmentView
from trainatomy.allocator.replay import replay
from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.allocator.simulated import CachingAllocator
from trainatomy.analysis.memory import COMPONENTS, MemoryAnalysis, Purpose
from trainatomy.results.memory import TimelinePoint
from trainatomy.results.trace import (
    Allocation,
    AllocationTrace,
    Block,
    Detail,
    Segment,
    SegmentAction,
    SegmentEvent,
    Source,
)

Range = tuple[int, int, int, bool]
"""Address, size and stream of reserved memory, and whether it belongs to an expandable segment."""


def detail_of(
    trace: AllocationTrace,
    analysis: MemoryAnalysis,
    settings: AllocatorSettings,
    capacity_bytes: int,
    gpu_bytes: int,
    allocator: str = "",
) -> Detail:
    """Return every allocation of a trace with its address, and the segments that held them, up to the last step's end.

    Args:
        trace: The allocations and frees of a run.
        analysis: Its analysis, whose replay is repeated here.
        settings: The allocator's settings.
        capacity_bytes: Memory that the allocator may reserve; ignored where the training does not fit, which is shown
            as on a GPU that is large enough.
        gpu_bytes: The GPU's memory.
        allocator: The settings as text.
    """
    end = _end_of_training(trace)
    follower = _Follower(trace, end, {call.event for call in analysis.driver_calls})
    capacity = max(capacity_bytes, 0) if analysis.out_of_memory is None else None
    replay(trace, settings, capacity, device_bytes=gpu_bytes, on_event=follower.follow)
    sources, source_of = _sources(trace, analysis)
    allocations = tuple(
        Allocation(
            follower.born[number],
            follower.died.get(number, -1),
            analysis.sizes[number],
            follower.requested[number],
            address,
            follower.stream[number],
            source_of[number],
        )
        for number, address in follower.addresses.items()
        if analysis.sizes[number]
    )
    allocated = analysis.allocated_bytes
    return Detail(
        events=end,
        allocations=allocations,
        sources=sources,
        peak_event=_first_maximum(allocated),
        segment_events=tuple(follower.segment_events),
        segments=_segments(follower.last, allocations),
        allocator=allocator,
    )


class _Follower:
    """Log of the address of each allocation, and of what is reserved after each event that called the driver."""

    def __init__(self, trace: AllocationTrace, end: int, driver_events: set[int]) -> None:
        self.addresses: dict[int, int] = {}
        self.born: dict[int, int] = {}
        self.died: dict[int, int] = {}
        self.requested: dict[int, int] = {}
        self.stream: dict[int, int] = {}
        self.segment_events: list[SegmentEvent] = []
        self.last: Sequence[SegmentView] = ()
        self._events = trace.events
        self._end = end
        self._driver_events = driver_events
        self._index = 0

    def follow(self, allocator: CachingAllocator, handle: int) -> None:
        """Note an event that the allocator has served; ``handle`` is that of an allocation."""
        index, self._index = self._index, self._index + 1
        if index >= self._end:
            return
        event = self._events[index]
        if event.action == "alloc":
            number = event.allocation
            self.addresses[number], self.born[number] = handle, index
            self.requested[number], self.stream[number] = event.bytes, event.stream
        elif event.action == "free":
            self.died[event.allocation] = index
        if index in self._driver_events or self._index == self._end:
            now = allocator.snapshot()
            self.segment_events += _changes(index, _ranges(self.last), _ranges(now))
            self.last = now


def _end_of_training(trace: AllocationTrace) -> int:
    """Return the number of events before the process only releases what it has left."""
    last = max((index for index, event in enumerate(trace.events) if event.action != "free"), default=-1) + 1
    return max(last, max((mark.event for mark in trace.marks), default=0))


def _ranges(segments: Sequence[SegmentView]) -> list[Range]:
    return [(each.address, each.size, each.stream, each.is_expandable) for each in segments]


def _changes(event: int, before: Sequence[Range], now: Sequence[Range]) -> list[SegmentEvent]:
    """Return what the driver was asked for between two moments: first what was returned, then what was taken."""
    returned = [each for each in before if each not in now]
    taken = [each for each in now if each not in before]
    gone = _difference(returned, taken, event, ("segment_free", "segment_unmap"))
    return [*gone, *_difference(taken, returned, event, ("segment_alloc", "segment_map"))]


def _difference(
    ranges: Sequence[Range], others: Sequence[Range], event: int, actions: tuple[SegmentAction, SegmentAction]
) -> list[SegmentEvent]:
    """Return the parts of ``ranges`` that no range of ``others`` covers; an expandable segment changes in parts."""
    found = []
    for address, size, stream, is_expandable in ranges:
        end = address + size
        for other, length, *_ in sorted(others):
            if other + length <= address or other >= end:
                continue
            if other > address:
                found.append(SegmentEvent(event, actions[is_expandable], address, other - address, stream))
            address = other + length
        if address < end:
            found.append(SegmentEvent(event, actions[is_expandable], address, end - address, stream))
    return found


def _sources(trace: AllocationTrace, analysis: MemoryAnalysis) -> tuple[tuple[Source, ...], list[int]]:
    """Return the distinct sources, and the index of that of each allocation."""
    known: dict[Source, int] = {}
    found = []
    for origin, purpose in zip(trace.origins, analysis.purposes, strict=True):
        source = Source(purpose.component, purpose.line, *origin)
        found.append(known.setdefault(source, len(known)))
    return tuple(known), found


def _segments(segments: Sequence[SegmentView], allocations: Sequence[Allocation]) -> tuple[Segment, ...]:
    held = {each.address: index for index, each in enumerate(allocations) if each.died < 0}
    return tuple(
        Segment(
            each.address,
            each.size,
            each.stream,
            each.is_small,
            each.is_expandable,
            tuple(
                Block(block.address, block.size, held[block.address] if block.is_allocated else -1)
                for block in each.blocks
            ),
        )
        for each in segments
    )


def _first_maximum(series: Sequence[int]) -> int:
    return series.index(max(series)) if series else 0


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
