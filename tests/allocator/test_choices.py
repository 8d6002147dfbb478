"""Optional workspaces when memory is short: cuDNN's convolutions fall back to another plan."""

from __future__ import annotations

from trainatomy.allocator import AllocatorSettings, replay
from trainatomy.allocator.blocks import MIB
from trainatomy.results.trace import AllocationTrace, DriverCall, Event, PlansTried

DEFAULT = AllocatorSettings()
KEPT, FIRST, SECOND = 0, 1, 2


def calls_of_one_convolution(grows_between: int = 0) -> AllocationTrace:
    """Return a trace of 30 MiB, then two workspaces of 40 MiB with ``grows_between`` MiB allocated in between."""
    events = [Event("alloc", KEPT, 30 * MIB), Event("alloc", FIRST, 40 * MIB), Event("free", FIRST, 0)]
    events += [Event("alloc", 3, grows_between * MIB), Event("alloc", SECOND, 40 * MIB), Event("free", SECOND, 0)]
    return AllocationTrace(events, choices={FIRST: 0, SECOND: 0})


def test_with_enough_memory_every_workspace_is_allocated() -> None:
    result = replay(calls_of_one_convolution(), DEFAULT, 70 * MIB)
    assert (result.skipped_workspaces, result.num_alloc_retries, result.peak_reserved_bytes) == ((), 0, 70 * MIB)


def test_a_plan_without_memory_is_tried_once_and_its_fallback_is_kept() -> None:
    result = replay(calls_of_one_convolution(), DEFAULT, 69 * MIB)
    assert result.out_of_memory is None
    assert result.skipped_workspaces == (FIRST, SECOND)
    assert result.num_alloc_retries == 1
    assert list(result.block_bytes)[: SECOND + 1] == [30 * MIB, 0, 0]
    assert result.peak_reserved_bytes == 30 * MIB


def test_a_plan_that_ran_before_is_tried_twice() -> None:
    result = replay(calls_of_one_convolution(grows_between=10), DEFAULT, 75 * MIB)
    assert result.out_of_memory is None
    assert result.skipped_workspaces == (SECOND,)
    # 10 MiB lie in the first workspace's segment, which the allocator does not split for less than 1 MiB
    # and cannot give back, so that neither attempt finds 40 MiB.
    assert result.num_alloc_retries == 2


def test_another_convolution_decides_for_itself() -> None:
    trace = calls_of_one_convolution()
    trace.choices[SECOND] = 1
    assert replay(trace, DEFAULT, 69 * MIB).num_alloc_retries == 2


def test_other_allocations_still_fail() -> None:
    trace = calls_of_one_convolution()
    trace.choices.clear()
    assert replay(trace, DEFAULT, 69 * MIB).out_of_memory_at == 1


def test_driver_calls_are_known_by_event() -> None:
    result = replay(calls_of_one_convolution(grows_between=10), DEFAULT, 75 * MIB)
    assert result.driver_calls == (
        DriverCall(0, "malloc", 30 * MIB),
        DriverCall(1, "malloc", 40 * MIB),
        DriverCall(4, "refused", 40 * MIB),
        DriverCall(4, "refused", 40 * MIB),
        DriverCall(4, "refused", 40 * MIB),
        DriverCall(4, "refused", 40 * MIB),
    )


def test_released_cache_and_unmapped_pages_are_distinguished() -> None:
    events = [Event("alloc", 0, 30 * MIB), Event("free", 0, 0), Event("alloc", 1, 40 * MIB)]
    segments = replay(AllocationTrace(events), DEFAULT, 60 * MIB).driver_calls
    assert segments == (
        DriverCall(0, "malloc", 30 * MIB),
        DriverCall(2, "refused", 40 * MIB),
        DriverCall(2, "free", 30 * MIB),
        DriverCall(2, "malloc", 40 * MIB),
    )
    expandable = AllocatorSettings.parse("expandable_segments:True", (2, 11))
    trace = AllocationTrace([Event("alloc", 0, 30 * MIB), Event("free", 0, 0), Event("empty_cache", -1, 0)])
    assert replay(trace, expandable).driver_calls == (DriverCall(0, "map", 40 * MIB), DriverCall(2, "unmap", 40 * MIB))


def trial(*workspaces: int) -> AllocationTrace:
    """Return a trace of 30 MiB, a trial of plans, and a workspace of the first one."""
    sizes = tuple(size * MIB for size in workspaces)
    events = [Event("alloc", KEPT, 30 * MIB), Event("alloc", FIRST, max(sizes)), Event("free", FIRST, 0)]
    events += [Event("empty_cache", -1, 0), Event("alloc", SECOND, sizes[0]), Event("free", SECOND, 0)]
    return AllocationTrace(events, choices={FIRST: 0, SECOND: 0}, trials={FIRST: PlansTried(sizes, 10)})


def test_a_trial_takes_the_largest_workspace_that_the_memory_allows() -> None:
    assert list(replay(trial(20, 400, 50), DEFAULT).block_bytes) == [30 * MIB, 400 * MIB, 20 * MIB]
    result = replay(trial(20, 400, 50), DEFAULT, 100 * MIB)
    assert list(result.block_bytes) == [30 * MIB, 50 * MIB, 20 * MIB]
    assert (result.num_alloc_retries, result.peak_reserved_bytes) == (0, 80 * MIB)


def test_a_trial_halves_its_buffer_where_the_driver_refuses_it() -> None:
    limited = AllocatorSettings(per_process_memory_fraction=0.5)
    result = replay(trial(4, 60), limited, 100 * MIB)
    assert list(result.block_bytes) == [30 * MIB, 16 * MIB, 4 * MIB]  # 15 MiB, of a segment that is not split
    assert result.out_of_memory is None
    assert result.num_alloc_retries == 2


def test_a_plan_that_did_not_fit_into_the_trial_is_not_kept() -> None:
    result = replay(trial(400, 10, 50), DEFAULT, 100 * MIB)
    assert list(result.block_bytes) == [30 * MIB, 50 * MIB, 10 * MIB]
    assert result.skipped_workspaces == ()
