"""The range of peaks over the plans that may be the fastest."""

from __future__ import annotations

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.analysis.memory import analyze_memory, verdict
from trainatomy.analysis.variants import with_plans
from trainatomy.results.memory import PeakRange
from trainatomy.results.trace import AllocationTrace, Event, Origin, PlansTried

MIB = 2**20
TRIAL, KEPT = 0, 1


def tried(timed: int) -> AllocationTrace:
    """Return the trace of a convolution of which the first plan needs 40 MiB, another 4 MiB, another 100 MiB."""
    events = [Event("alloc", TRIAL, 100 * MIB), Event("free", TRIAL, 0), Event("empty_cache", -1, 0)]
    events += [Event("alloc", KEPT, 40 * MIB), Event("alloc", 2, 30 * MIB), Event("free", KEPT, 0), Event("free", 2, 0)]
    origins = [Origin("aten::convolution", "", "forward", 0)] * 3
    plans = PlansTried((40 * MIB, 4 * MIB, 100 * MIB), timed)
    return AllocationTrace(events, origins, choices={TRIAL: 0, KEPT: 0}, trials={TRIAL: plans})


def test_the_plan_of_most_workspace_among_those_timed_is_the_high_end() -> None:
    memory = analyze_memory(tried(10), AllocatorSettings(), 2**30, 0).memory
    assert memory.peak_allocated_bytes == 100 * MIB
    assert memory.plans == PeakRange((100 * MIB, 130 * MIB), (100 * MIB, 130 * MIB))
    assert verdict(memory, 134 * MIB, None) == "tight"


def test_plans_beyond_the_limit_are_not_kept() -> None:
    memory = analyze_memory(tried(2), AllocatorSettings(), 2**30, 0).memory
    assert memory.plans is None
    assert [event.bytes for event in with_plans(tried(2), min).events if event.allocation == KEPT] == [4 * MIB, 0]


def test_without_trials_there_is_no_range() -> None:
    plain = tried(10)
    plain.trials.clear()
    assert analyze_memory(plain, AllocatorSettings(), 2**30, 0).memory.plans is None
