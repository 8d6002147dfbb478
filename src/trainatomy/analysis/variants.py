"""Ranges of peaks over what no rule decides: addresses, plans that are timed, and late releases.

The range of peaks over places in the address space where the driver may put segments.

Addresses decide between free blocks of equal size, and with them what the next allocation finds.  Where the driver puts
a segment follows rules (``allocator/segments.py``), but for the gaps that mappings of host memory leave, which differ
between processes.  Replays with other gaps show whether that matters for a training.

The range of peaks over the plans that ``cudnn.benchmark`` may find the fastest.

Of the plans that it times, which one is the fastest is known on the GPU only. The plan decides which workspace the
calls after the trial need.

Releases that depend on timing: the range of peaks, and reserved memory by the predicted clock.

Two things hold memory longer than its tensor lives:

- Other streams that use it (``Tensor.record_stream``).  The allocator counts such a block as free at once, and gives
  its memory to others when those streams are done; it asks them whenever it is asked for memory
  (c10/cuda/CUDACachingAllocator.cpp, ``process_events``): at the earliest when the tensor dies, at the latest when the
  CPU has waited for those streams.  So reserved memory depends on it, allocated memory does not.
- NCCL's process group, which refers to the tensors of an asynchronous collective until its watchdog has seen that it
  is over and the next collective is called (see ``CollectiveUse``).  DDP replaces its first buckets before the second
  step, with ``static_graph`` before the third, so that both sets may exist in that step, its optimizer's part
  included.  Which it is differs between the ranks of one run.

The truth lies between the two ends.  Where the times of operations are known, so is when the streams are done, and
when the watchdog has looked at the latest.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Final

from trainatomy.allocator.replay import Peaks, kept, peaks_of
from trainatomy.allocator.segments import Scattered
from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.results.memory import Memory, PeakRange
from trainatomy.results.trace import AllocationTrace, Event, TimedOperation

LAYOUTS: Final = 16
"""Replays with other gaps."""
MOST_EVENTS: Final = 120_000
"""Events that are replayed for it, about a second; a longer trace gets fewer replays, or none."""
LEAST_BYTES: Final = 1 << 30
"""Reserved memory below which no GPU is at stake."""
LEAST_SHARE: Final = 0.005
"""Share of reserved memory that a range must span to be worth a line."""


def layout_range(
    trace: AllocationTrace, settings: AllocatorSettings, gpu_bytes: int, memory: Memory
) -> PeakRange | None:
    """Return the peaks with other gaps between segments; None where they differ by less than 0.5 %.

    An expandable segment is one range of addresses, so that gaps do not matter.

    Args:
        trace: Allocations of a run that fits.
        settings: Settings of the allocator.
        gpu_bytes: Memory of the GPU.
        memory: Peaks of the trace itself.
    """
    if settings.expandable_segments or memory.peak_reserved_bytes < LEAST_BYTES:
        return None
    count = min(LAYOUTS, MOST_EVENTS // max(len(trace.events), 1))
    scattered = partial(peaks_of, trace, settings, gpu_bytes, map(Scattered, range(count)))
    found = _range(memory, kept(trace, "layouts", settings, gpu_bytes, scattered))
    low, high = found.reserved_bytes
    return None if high - low < LEAST_SHARE * memory.peak_reserved_bytes else found


def plan_range(trace: AllocationTrace, settings: AllocatorSettings, gpu_bytes: int, memory: Memory) -> PeakRange | None:
    """Return the peaks with the plans of least and of most workspace; None where the plans do not matter.

    Args:
        trace: Allocations of a run, with the plans that are expected.
        settings: Settings of the allocator.
        gpu_bytes: Memory of the GPU.
        memory: Peaks of the trace itself.
    """
    if not trace.trials:
        return None
    ends = [peaks for pick in (min, max) for peaks in peaks_of(with_plans(trace, pick), settings, gpu_bytes)]
    found = _range(memory, ends)
    return None if all(low == high for low, high in (found.allocated_bytes, found.reserved_bytes)) else found


def with_plans(trace: AllocationTrace, pick: Callable[[Iterable[int]], int]) -> AllocationTrace:
    """Return the trace with another of the timed plans for each convolution, picked by their workspaces."""
    kept = {trace.choices[number]: pick(tried.workspaces[: tried.timed]) for number, tried in trace.trials.items()}
    chosen = {number: kept[choice] for number, choice in trace.choices.items() if choice in kept}
    sizes = {number: size for number, size in chosen.items() if number not in trace.trials}
    events = [
        event._replace(bytes=sizes[event.allocation])
        if event.action == "alloc" and event.allocation in sizes
        else event
        for event in trace.events
    ]
    return replace(trace, events=events)


WATCHDOG_SECONDS = 0.1
"""How often the watchdog of NCCL's process group looks which collectives are over (``kWatchdogThreadSleepMillis``)."""
FASTER = 2.0
"""Steps may be this much faster than predicted: a high end must not rest on a time that is predicted too long."""


def peak_range(
    trace: AllocationTrace,
    settings: AllocatorSettings,
    gpu_bytes: int,
    memory: Memory,
    at_once: Peaks,
    clock: StepClock | None = None,
) -> PeakRange | None:
    """Return the range of the peaks; None if no release depends on timing.

    Args:
        trace: Allocations of a run, in which memory is free as soon as its tensor dies.
        settings: Settings of the allocator.
        gpu_bytes: Memory of the GPU.
        memory: Peaks that are predicted.
        at_once: Peaks of the trace itself.
        clock: When its operations are launched and done, where that is predicted.
    """
    if not (trace.stream_uses or trace.collectives):
        return None
    late = released_late(trace)
    others = [late] if trace.stream_uses else [let_go_late(trace, clock, at_next=one) for one in (True, False)]
    others = [one for one in others if one.events != trace.events]
    if not others:
        return None
    found = [at_once, *(peaks for one in others for peaks in peaks_of(one, settings, gpu_bytes))]
    if trace.stream_uses:  # what waits for streams does not count as allocated
        found = [one._replace(allocated_bytes=at_once.allocated_bytes) for one in found]
    return _range(memory, found)


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


def let_go_late(trace: AllocationTrace, clock: StepClock | None = None, *, at_next: bool = False) -> AllocationTrace:
    """Return the trace with tensors of collectives held as long as NCCL's process group may hold them.

    Only collectives of a backward pass hold theirs: DDP waits for their futures, which lets go of nothing.  Whoever
    calls others waits for their work.

    Args:
        trace: Allocations of a run, in which memory is free as soon as its tensor dies.
        clock: When operations are launched and done; without it the watchdog may look after the end of the run.
        at_next: True if the watchdog looks soon after their death, so that the next collective lets go of them.
    """
    calls = sorted(one.event for one in trace.collectives)
    reduced = [one for one in trace.collectives if one.in_backward]
    latest = {number: _latest_release(calls, one.event, clock) for one in reduced for number in one.allocations}
    events: list[Event] = []
    pending: list[tuple[float, Event]] = []
    for index, event in enumerate(trace.events):
        if pending:
            events += [release for end, release in pending if end <= index]
            pending = [one for one in pending if one[0] > index]
        end = latest.get(event.allocation, 0) if event.action == "free" else 0
        if end <= index:
            events.append(event)
        else:
            following = bisect_right(calls, index)
            pending.append((calls[following] if at_next and following < len(calls) else end, event))
    return replace(trace, events=events, collectives=[])


def _latest_release(calls: Sequence[int], called: int, clock: StepClock | None) -> float:
    """Return the event before which NCCL has let go of a collective's tensors; infinite if none is.

    Args:
        calls: Events of all collectives.
        called: Event of this one.
        clock: When operations are launched and done.
    """
    if clock is None:
        return inf
    looked = clock.communicated(called) + FASTER * WATCHDOG_SECONDS
    return next((call for call in calls[bisect_right(calls, called) :] if clock.launched(call) >= looked), inf)


def released_by_clock(trace: AllocationTrace, clock: StepClock) -> AllocationTrace:
    """Return the trace with each release that waits for other streams when these are done, by predicted times.

    A block is free again at the first allocation after that which the CPU makes, and at the latest when the CPU has
    waited for the streams.

    Args:
        trace: Allocations of a run, in which memory is free as soon as its tensor dies.
        clock: When its operations are launched and done.
    """
    latest = _allocations_before_release(released_late(trace))
    uses = iter(sorted(trace.stream_uses, key=lambda use: use.event))
    use = next(uses, None)
    used: dict[int, set[int]] = defaultdict(set)
    events: list[Event] = []
    pending: list[tuple[float, int, Event]] = []
    allocations = 0
    for index, event in enumerate(trace.events):
        while use is not None and use.event <= index:
            used[use.allocation].add(use.stream)
            use = next(uses, None)
        if event.action == "alloc" and pending:
            now = clock.launched(index)
            due = [one for one in pending if one[0] <= now or one[1] <= allocations]
            pending = [one for one in pending if one not in due]
            events += [release for _, _, release in sorted(due, key=lambda one: one[0])]
        allocations += event.action == "alloc"
        if event.action == "free" and clock.runs(index) and used.get(event.allocation):
            done = max(clock.done(stream, index) for stream in used[event.allocation])
            pending.append((done, latest.get(event.allocation, len(trace.events)), event))
        else:
            events.append(event)
    return replace(trace, events=events, stream_uses=[], cpu_waits=[])


class StepClock:
    """When the CPU launches an operation of any step, and when a stream has done what was launched before.

    All steps are taken to last as long as the one whose times are known.  Moments are numbers of events of the trace;
    before the first step none has passed.
    """

    def __init__(
        self, trace: AllocationTrace, operations: Sequence[TimedOperation], step: int, step_seconds: float
    ) -> None:
        """Make the clock of a trace.

        Args:
            trace: Allocations of a run.
            operations: The operations of one of its steps, in launch order.
            step: That step.
            step_seconds: How long it takes.
        """
        marks = {mark.step: mark.event for mark in trace.marks if mark.name == "step"}
        self._begins = sorted((event, number) for number, event in marks.items())
        self._step_seconds = step_seconds
        self._events = [one.event - marks[step] for one in operations]
        self._launched = [one.launched for one in operations]
        self._streams: dict[int, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
        for one in operations:
            events, ends = self._streams[one.stream]
            events.append(one.event - marks[step])
            ends.append(one.begin + one.seconds)

    def runs(self, index: int) -> bool:
        """Return whether a step has begun."""
        return bool(self._begins) and self._begins[0][0] <= index

    def launched(self, index: int) -> float:
        """Return when the CPU is at this event."""
        if not self.runs(index) or not self._events:
            return 0.0
        step, event = self._place(index)
        place = min(bisect_left(self._events, event), len(self._events) - 1)
        return step * self._step_seconds + self._launched[place]

    def done(self, stream: int, index: int) -> float:
        """Return when the stream has done what was launched before this event."""
        step, event = self._place(index)
        events, ends = self._streams[stream]
        place = bisect_right(events, event)
        if place:
            return step * self._step_seconds + ends[place - 1]
        return (step - 1) * self._step_seconds + ends[-1] if ends else 0.0

    def communicated(self, index: int) -> float:
        """Return when all collectives that were called until this event are over."""
        if not self.runs(index):
            return 0.0
        ends = [self.done(stream, index) for stream in tuple(self._streams) if stream < 0]
        return max([self.launched(index), *ends])

    def _place(self, index: int) -> tuple[int, int]:
        """Return the step that an event is in, and how many events it is after the step's first."""
        begin, step = self._begins[bisect_right(self._begins, (index, inf)) - 1]
        return step, index - begin


def _allocations_before_release(trace: AllocationTrace) -> dict[int, int]:
    """Return for each allocation that is released how many allocations come before its release."""
    count, found = 0, dict[int, int]()
    for event in trace.events:
        if event.action == "alloc":
            count += 1
        elif event.action == "free":
            found[event.allocation] = count
    return found


def _range(memory: Memory, others: Sequence[Peaks]) -> PeakRange:
    """Return the least and the most that is allocated and reserved at the peak, in a prediction and in others."""
    allocated = memory.peak_allocated_bytes, *(one.allocated_bytes for one in others)
    reserved = memory.peak_reserved_bytes, *(one.reserved_bytes for one in others)
    return PeakRange((min(allocated), max(allocated)), (min(reserved), max(reserved)))
