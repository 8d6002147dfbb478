"""Traces of trainings in float16 whose first optimizer steps are skipped, because scaled gradients overflow.

The optimizer makes its states in the first step that is not skipped, when the allocator's cache holds the blocks of the
steps before.  Whether gradients overflow depends on values, so that a run is executed without skipped steps; its trace
is rewritten here: what the optimizer does is left out of the steps that are skipped, and what it did in the first step
is done in the first one that is not.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trainatomy.allocator.replay import replay
from trainatomy.errors import SimulationError
from trainatomy.results.memory import MOST_SKIPPED_STEPS, SkippedSteps
from trainatomy.results.trace import AllocationTrace, Event, Mark
from trainatomy.simulator.further_steps import with_copies, with_further_steps

if TYPE_CHECKING:
    from trainatomy.allocator.settings import AllocatorSettings
    from trainatomy.results.memory import Memory

BEGIN, END = "scaled step", "scaled step end"
"""Marks around the step of an optimizer that gradient scaling may skip."""


def optimizer_steps(trace: AllocationTrace) -> Mapping[int, Sequence[range]]:
    """Return the events of what gradient scaling may skip, by the step of the training."""
    found: defaultdict[int, list[range]] = defaultdict(list)
    begins: dict[int, int] = {}
    for mark in trace.marks:
        if mark.name == BEGIN:
            begins[mark.step] = mark.event
        elif mark.name == END:
            found[mark.step].append(range(begins[mark.step], mark.event))
    return found


def makes_states(trace: AllocationTrace) -> bool:
    """Return whether an optimizer whose step may be skipped keeps something that it makes in its first step."""
    kept: set[int] = set()
    for events in optimizer_steps(trace).get(0, ()):
        for event in trace.events[events.start : events.stop]:
            (kept.add if event.action == "alloc" else kept.discard)(event.allocation)
    return bool(kept)


def peaks_with_skipped_steps(
    trace: AllocationTrace, settings: AllocatorSettings, gpu_bytes: int, memory: Memory
) -> tuple[SkippedSteps, ...]:
    """Return the peaks with one skipped step, with two, and so on; none where they do not move.

    Args:
        trace: Allocations of a run without skipped steps.
        settings: Settings of the allocator.
        gpu_bytes: Memory of the GPU.
        memory: Peaks of the trace itself.
    """
    if not makes_states(trace):
        return ()
    found = [SkippedSteps(0, memory.peak_allocated_bytes, memory.peak_reserved_bytes)]
    with contextlib.suppress(SimulationError):
        while len(found) <= MOST_SKIPPED_STEPS and (len(found) < 3 or not _same_peaks(found)):
            skipped = with_further_steps(with_skipped_steps(trace, len(found)), settings)
            peaks = replay(skipped, settings, device_bytes=gpu_bytes)
            found.append(SkippedSteps(len(found), peaks.peak_allocated_bytes, peaks.peak_reserved_bytes))
    while len(found) > 1 and _same_peaks(found):
        found.pop()
    return tuple(found[1:])


def _same_peaks(found: Sequence[SkippedSteps]) -> bool:
    """Return whether the last skipped step moved no peak."""
    last, before = found[-1], found[-2]
    return (last.allocated_bytes, last.reserved_bytes) == (before.allocated_bytes, before.reserved_bytes)


def with_skipped_steps(trace: AllocationTrace, count: int, after: int = 1) -> AllocationTrace:
    """Return the trace of the same training with its first ``count`` optimizer steps skipped.

    The trace itself is returned where gradient scaling can skip nothing.

    Args:
        trace: Allocations of a run without skipped steps.
        count: Steps that are skipped.
        after: Steps that follow the first one that is not.

    Raises:
        SimulationError: The optimizer's steps cannot be told apart from the rest of the training.
    """
    if not optimizer_steps(trace) or count == 0:
        return trace
    if trace.stream_uses or trace.collectives or trace.pinned:
        raise _unlike("memory waits for other streams, or lies in pinned host memory")
    missing = count + 1 + after - (1 + max(mark.step for mark in trace.marks))
    longer = with_copies(trace, missing) if missing > 0 else trace
    steps = optimizer_steps(longer)
    ranges = [steps.get(step, ()) for step in range(count + 1)]
    if len({len(each) for each in ranges}) != 1:
        raise _unlike("its steps differ")
    for step, each in enumerate(ranges):
        _check(longer, each, is_first=step == 0)
    return _rewritten(longer, ranges)


def _check(trace: AllocationTrace, steps: Sequence[range], *, is_first: bool) -> None:
    """Refuse a step that releases what the rest of the training made, or keeps what another step does not make."""
    for events in steps:
        own: set[int] = set()
        for event in trace.events[events.start : events.stop]:
            if event.action == "alloc":
                own.add(event.allocation)
            elif event.action == "free" and event.allocation not in own:
                raise _unlike("the optimizer releases memory that it did not allocate in the same step")
            else:
                own.discard(event.allocation)
        if own and not is_first:
            raise _unlike("the optimizer keeps more memory in later steps")


def _rewritten(trace: AllocationTrace, ranges: Sequence[Sequence[range]]) -> AllocationTrace:
    """Return the trace without the events in ``ranges``; those of the first step move to the last of them."""
    count = len(ranges) - 1
    left_out = {index for each in ranges for events in each for index in events}
    moved = defaultdict[int, list[range]](list)
    for first, target in zip(ranges[0], ranges[count], strict=True):
        moved[target.start].append(first)
    late = {trace.events[index].allocation for events in ranges[0] for index in events}
    released = (
        event.allocation
        for index, event in enumerate(trace.events[: ranges[count][-1].stop])
        if event.action == "free" and index not in left_out
    )
    if not late.isdisjoint(released):
        raise _unlike("what the optimizer makes is released before the next step")
    found, numbers, places = AllocationTrace(rank=trace.rank), dict[int, int](), list[int]()

    def write(event: Event) -> None:
        number = event.allocation
        if event.action == "alloc":
            numbers[number] = len(found.origins)
            origin = trace.origins[number]
            found.origins.append(origin._replace(step=count) if number in late else origin)
        found.events.append(event if number < 0 else event._replace(allocation=numbers[number]))

    for index in range(len(trace.events) + 1):
        places.append(len(found.events))
        for events in moved.get(index, ()):
            for event in trace.events[events.start : events.stop]:
                write(event)
        if index not in left_out and index < len(trace.events):
            write(trace.events[index])
    found.marks = [Mark(places[mark.event], mark.name, mark.step) for mark in trace.marks]
    found.labels = {numbers[number]: label for number, label in trace.labels.items() if number in numbers}
    found.choices = {numbers[number]: choice for number, choice in trace.choices.items() if number in numbers}
    found.trials = {numbers[number]: tried for number, tried in trace.trials.items() if number in numbers}
    return found


def _unlike(reason: str) -> SimulationError:
    return SimulationError(
        f"skipped_steps: this training cannot be predicted with optimizer steps that are skipped: {reason}.\n"
        "Leave skipped_steps out: the prediction then assumes that no float16 gradient overflows"
    )
