"""Releases that depend on timing: the range of peaks, and reserved memory by the predicted clock.

Two things hold memory longer than its tensor lives:

- Other streams that use it (``Tensor.record_stream``).  The allocator counts such a block as free at once, and gives
  its memory to others when those streams are done; it asks them whenever it is asked for memory
  (c10/cuda/CUDACachingAllocator.cpp, ``process_events``): at the earliest when the tensor dies, at the latest when the
  CPU has waited for those streams.  So reserved memory depends on it, allocated memory does not.
- NCCL's process group, which refers to the tensors of an asynchronous collective until it has seen that it is over
  (see ``CollectiveUse``): at the latest until a backward pass calls the next collective.  DDP replaces its buckets
  between the first and the second step, so that both may exist in the second.

The truth lies between the two ends.  Where the times of operations are known, so is when the streams are done.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trainatomy.allocator.replay import replay
from trainatomy.results.memory import PeakRange

if TYPE_CHECKING:
    from trainatomy.allocator.settings import AllocatorSettings
    from trainatomy.results.detail import TimedOperation
    from trainatomy.results.memory import Memory
    from trainatomy.results.trace import AllocationTrace, Event


def peak_range(trace: AllocationTrace, settings: AllocatorSettings, gpu_bytes: int, memory: Memory) -> PeakRange | None:
    """Return the range of the peaks; None if no release depends on timing.

    Args:
        trace: Allocations of a run, in which memory is free as soon as its tensor dies.
        settings: Settings of the allocator.
        gpu_bytes: Memory of the GPU.
        memory: Peaks of the trace itself.
    """
    late = let_go_late(released_late(trace))
    if late.events == trace.events:
        return None
    held = trace if trace.stream_uses else late
    allocated = replay(held, settings, device_bytes=gpu_bytes).peak_allocated_bytes
    reserved = [replay(one, settings, device_bytes=gpu_bytes).peak_reserved_bytes for one in (trace, late)]
    return PeakRange(
        allocated_bytes=_ordered(memory.peak_allocated_bytes, allocated),
        reserved_bytes=_ordered(memory.peak_reserved_bytes, *reserved),
    )


def released_late(trace: AllocationTrace) -> AllocationTrace:
    """Return the trace with each release that waits for other streams at the CPU's next wait for them."""
    if not trace.stream_uses:
        return trace
    used: dict[int, set[int]] = defaultdict(set)
    uses = iter(sorted(trace.stream_uses, key=lambda use: use.event))
    waits = iter(sorted(trace.cpu_waits, key=lambda wait: wait.event))
    use, wait = next(uses, None), next(waits, None)
    events: list[Event] = []
    pending: list[tuple[int, Event, set[int]]] = []
    for index, event in enumerate(trace.events):
        while use is not None and use.event <= index:
            used[use.allocation].add(use.stream)
            use = next(uses, None)
        while wait is not None and wait.event <= index:
            still = []
            for freed, release, streams in pending:
                done = wait.done
                streams = set() if done is None else {one for one in streams if done.get(one, 0) <= freed}
                if streams:
                    still.append((freed, release, streams))
                else:
                    events.append(release)
            pending, wait = still, next(waits, None)
        if event.action == "free" and used.get(event.allocation):
            pending.append((index, event, set(used[event.allocation])))
        else:
            events.append(event)
    return replace(trace, events=events, stream_uses=[], cpu_waits=[], collectives=[])


def let_go_late(trace: AllocationTrace) -> AllocationTrace:
    """Return the trace with tensors of asynchronous collectives held until a backward pass calls the next one."""
    held = {number for one in trace.collectives for number in one.allocations}
    backward = iter(sorted(one.event for one in trace.collectives if one.in_backward))
    following = next(backward, None)
    events: list[Event] = []
    pending: list[Event] = []
    for index, event in enumerate(trace.events):
        while following is not None and following <= index:
            events += pending
            pending, following = [], next(backward, None)
        if event.action == "free" and event.allocation in held:
            pending.append(event)
        else:
            events.append(event)
    return replace(trace, events=events, collectives=[])


def released_by_clock(
    trace: AllocationTrace, operations: Sequence[TimedOperation], step: int, step_seconds: float
) -> AllocationTrace:
    """Return the trace with each release that waits for other streams when these are done, by predicted times.

    A block is free again at the first allocation after that which the CPU makes, and at the latest when the CPU has
    waited for the streams.  All steps are taken to last as long as the one whose times are known.

    Args:
        trace: Allocations of a run, in which memory is free as soon as its tensor dies.
        operations: The operations of one of its steps, in launch order.
        step: That step.
        step_seconds: How long it takes.
    """
    begins = {mark.step: mark.event for mark in trace.marks if mark.name == "step"}
    if not trace.stream_uses or step not in begins:
        return trace
    clock = _Clock(operations, begins[step], step_seconds)
    latest = _allocations_before_release(released_late(trace))
    uses = iter(sorted(trace.stream_uses, key=lambda use: use.event))
    use = next(uses, None)
    used: dict[int, set[int]] = defaultdict(set)
    starts = {event: number for number, event in begins.items()}
    events: list[Event] = []
    pending: list[tuple[float, int, Event]] = []
    running, begin, allocations = -1, 0, 0
    for index, event in enumerate(trace.events):
        running, begin = (starts[index], index) if index in starts else (running, begin)
        while use is not None and use.event <= index:
            used[use.allocation].add(use.stream)
            use = next(uses, None)
        if event.action == "alloc" and pending:
            now = clock.launched(running, index - begin)
            due = [one for one in pending if one[0] <= now or one[1] <= allocations]
            pending = [one for one in pending if one not in due]
            events += [release for _, _, release in sorted(due, key=lambda one: one[0])]
        allocations += event.action == "alloc"
        if event.action == "free" and running >= 0 and used.get(event.allocation):
            done = max(clock.done(stream, running, index - begin) for stream in used[event.allocation])
            pending.append((done, latest.get(event.allocation, len(trace.events)), event))
        else:
            events.append(event)
    return replace(trace, events=events, stream_uses=[], cpu_waits=[])


class _Clock:
    """When the CPU launches an operation of any step, and when a stream has done what was launched before.

    ``begin``: number of events before the step whose operations are known.
    """

    def __init__(self, operations: Sequence[TimedOperation], begin: int, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self._events = [one.event - begin for one in operations]
        self._launched = [one.launched for one in operations]
        self._streams: dict[int, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
        for one in operations:
            events, ends = self._streams[one.stream]
            events.append(one.event - begin)
            ends.append(one.begin + one.seconds)

    def launched(self, step: int, event: int) -> float:
        """Return when the CPU is at this event of a step, both counted from the step's first."""
        if step < 0 or not self._events:
            return 0.0
        place = min(bisect_left(self._events, event), len(self._events) - 1)
        return step * self._step_seconds + self._launched[place]

    def done(self, stream: int, step: int, event: int) -> float:
        """Return when the stream has done what was launched before this event of a step."""
        events, ends = self._streams[stream]
        place = bisect_right(events, event)
        if place:
            return step * self._step_seconds + ends[place - 1]
        return (step - 1) * self._step_seconds + ends[-1] if ends else 0.0


def _allocations_before_release(trace: AllocationTrace) -> dict[int, int]:
    """Return for each allocation that is released how many allocations come before its release."""
    count, found = 0, dict[int, int]()
    for event in trace.events:
        if event.action == "alloc":
            count += 1
        elif event.action == "free":
            found[event.allocation] = count
    return found


def _ordered(*sizes: int) -> tuple[int, int]:
    return min(sizes), max(sizes)
