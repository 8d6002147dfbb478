"""Memory that is free at once, or when the CPU has waited for other streams, or when NCCL lets go of it."""

from __future__ import annotations

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.analysis.memory import analyze_memory, verdict
from trainatomy.analysis.variants import StepClock, let_go_late, released_by_clock, released_late
from trainatomy.results.trace import (
    AllocationTrace,
    CollectiveUse,
    CPUWait,
    Event,
    Mark,
    Origin,
    StreamUse,
    TimedOperation,
)
from trainatomy.simulator.streams import CPUWaits

MIB = 2**20
SIZE = 64 * MIB


def trace(*waits: CPUWait, uses: int = 1) -> AllocationTrace:
    """Allocate, free, and allocate again; another stream uses the first tensor."""
    events = [Event("alloc", 0, SIZE), Event("free", 0, 0), Event("alloc", 1, SIZE), Event("free", 1, 0)]
    origins = [Origin("aten::empty", "", "forward", 0)] * 2
    return AllocationTrace(events, origins, stream_uses=[StreamUse(1, 0, 3)] * uses, cpu_waits=list(waits))


def actions(found: AllocationTrace) -> list[tuple[str, int]]:
    return [(event.action, event.allocation) for event in found.events]


AT_ONCE = [("alloc", 0), ("free", 0), ("alloc", 1), ("free", 1)]
NEVER = [("alloc", 0), ("alloc", 1), ("free", 1)]


def test_a_release_waits_for_the_cpu() -> None:
    assert actions(released_late(trace())) == NEVER
    assert actions(released_late(trace(CPUWait(2, {3: 2})))) == AT_ONCE
    assert actions(released_late(trace(CPUWait(2, None)))) == AT_ONCE
    assert actions(released_late(trace(CPUWait(3, {3: 3})))) == [("alloc", 0), ("alloc", 1), ("free", 0), ("free", 1)]


def test_waiting_for_earlier_work_or_another_stream_is_not_enough() -> None:
    assert actions(released_late(trace(CPUWait(2, {3: 1})))) == NEVER
    assert actions(released_late(trace(CPUWait(2, {0: 2})))) == NEVER


def test_the_range_reaches_from_one_to_the_other() -> None:
    settings = AllocatorSettings()
    memory = analyze_memory(trace(), settings, 10 * SIZE, 0).memory
    assert memory.range is not None
    assert memory.range.allocated_bytes == (SIZE, SIZE)  # the allocator counts the block as free at once
    assert memory.range.reserved_bytes == (SIZE, 2 * SIZE)
    assert memory.peak_allocated_bytes == SIZE
    assert analyze_memory(trace(uses=0), settings, 10 * SIZE, 0).memory.range is None
    assert verdict(memory, 10 * SIZE, None) == "fits" and verdict(memory, 2 * SIZE, None) == "tight"


def timed(stream: int, event: int, launched: float, end: float) -> TimedOperation:
    return TimedOperation("aten::mul", "", "forward", stream, launched, 0.0, end - 1.0, 1.0, event)


def clocked(second_launch: float, *waits: CPUWait) -> tuple[AllocationTrace, StepClock]:
    """Return the trace in which the stream is done at 5 s, and the second allocation is made at another time."""
    found = trace(*waits)
    found.marks.append(Mark(0, "step", 0))
    operations = [timed(0, 0, 0.0, 1.0), timed(3, 1, 0.5, 5.0), timed(0, 2, second_launch, second_launch + 1.0)]
    return found, StepClock(found, operations, 0, 10.0)


def by_clock(second_launch: float, *waits: CPUWait) -> AllocationTrace:
    return released_by_clock(*clocked(second_launch, *waits))


def test_a_release_waits_until_the_stream_is_done_by_predicted_times() -> None:
    assert actions(by_clock(6.0)) == AT_ONCE
    assert actions(by_clock(2.0)) == NEVER
    assert actions(by_clock(2.0, CPUWait(2, None))) == AT_ONCE  # the CPU has waited for it


def test_reserved_memory_is_by_the_clock() -> None:
    settings = AllocatorSettings()
    late, early = (
        analyze_memory(found, settings, 10 * SIZE, 0, clock=clock).memory for found, clock in map(clocked, (2.0, 6.0))
    )
    assert (early.peak_reserved_bytes, late.peak_reserved_bytes) == (SIZE, 2 * SIZE)
    assert early.peak_allocated_bytes == late.peak_allocated_bytes == SIZE
    assert late.device_bytes - early.device_bytes == late.components.cache - early.components.cache == SIZE
    assert late.range == early.range is not None


def test_a_stream_is_done_with_what_it_has_waited_for() -> None:
    waits = CPUWaits()
    waits.synchronize("record", 3, 0, 5)
    waits.synchronize("wait", 0, 0, 6)
    waits.synchronize("record", 0, 1, 7)
    waits.synchronize("cpu_wait", 0, 1, 9)
    waits.read(3, 10)
    waits.synchronize("cpu_wait", -1, -1, 11)
    assert waits.noted == [CPUWait(9, {3: 5, 0: 7}), CPUWait(10, {3: 10}), CPUWait(11, None)]


def collectives(*calls: CollectiveUse) -> AllocationTrace:
    plain = trace(uses=0)
    return AllocationTrace(plain.events, plain.origins, marks=[Mark(0, "step", 0)], collectives=list(calls))


REDUCED = CollectiveUse(1, (0,), in_backward=True)


def test_tensors_of_a_collective_are_held_until_the_next_one() -> None:
    def held(*later: CollectiveUse) -> list[tuple[str, int]]:
        return actions(let_go_late(collectives(REDUCED, *later), at_next=True))

    assert held() == NEVER
    assert held(CollectiveUse(2, (), in_backward=False)) == AT_ONCE
    assert held(CollectiveUse(3, (), in_backward=True)) == [("alloc", 0), ("alloc", 1), ("free", 0), ("free", 1)]
    waited_for = collectives(CollectiveUse(1, (0,), in_backward=False))
    assert actions(let_go_late(waited_for)) == AT_ONCE


def test_nothing_is_let_go_before_the_watchdog_must_have_looked() -> None:
    """It looks every 100 ms, and steps may be twice as fast as predicted."""

    def held(second_launch: float) -> list[tuple[str, int]]:
        found = collectives(REDUCED, CollectiveUse(2, (), in_backward=True))
        operations = [timed(0, 0, 0.0, 1.0), timed(-1, 1, 0.5, 1.5), timed(0, 2, second_launch, second_launch + 1.0)]
        return actions(let_go_late(found, StepClock(found, operations, 0, 10.0)))

    assert held(1.69) == NEVER
    assert held(1.71) == AT_ONCE
    assert actions(let_go_late(collectives(REDUCED, CollectiveUse(2, (), in_backward=True)))) == NEVER
