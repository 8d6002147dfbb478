"""Invariants after any sequence of requests with any settings."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from trainatomy.allocator import AllocatorSettings, CachingAllocator, OutOfMemory, replay
from trainatomy.allocator.blocks import MIB
from trainatomy.results.trace import AllocationTrace, Event

CONFIGURATIONS = st.sampled_from([
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "roundup_power2_divisions:4",
    "expandable_segments:True,max_split_size_mb:32",
    "garbage_collection_threshold:0.5,per_process_memory_fraction:0.9",
])  # fmt: skip
SIZES = st.one_of(
    st.integers(0, 4096),
    st.integers(1, 2 * MIB),
    st.integers(MIB, 12 * MIB),
    st.integers(1, 100).map(lambda n: n * MIB),
)
STEPS = st.lists(st.tuples(st.sampled_from("aaaffe"), SIZES, st.integers(0, 1), st.integers(0, 1 << 16)), max_size=60)
CAPACITIES = st.one_of(st.none(), st.integers(50 * MIB, 400 * MIB))


def drive(simulated: CachingAllocator, steps: list[tuple[str, int, int, int]]) -> dict[int, tuple[int, int]]:
    """Run the steps until memory runs out and return (block, requested) bytes of the live blocks."""
    live: dict[int, tuple[int, int]] = {}
    for action, size, stream, choice in steps:
        if action == "a":
            try:
                handle = simulated.malloc(size, stream)
            except OutOfMemory:
                continue
            assert handle not in live
            if handle:
                live[handle] = (simulated.block_bytes(handle), size)
        elif action == "f" and live:
            handle = sorted(live)[choice % len(live)]
            simulated.free(handle)
            del live[handle]
        elif action == "e":
            simulated.empty_cache()
    return live


def check(simulated: CachingAllocator, live: dict[int, tuple[int, int]]) -> None:
    segments = simulated.snapshot()
    assert simulated.allocated_bytes == sum(block for block, _ in live.values())
    assert simulated.requested_bytes == sum(requested for _, requested in live.values())
    assert simulated.reserved_bytes == sum(segment.size for segment in segments)
    assert (
        simulated.requested_bytes
        <= simulated.allocated_bytes
        <= simulated.reserved_bytes
        <= simulated.peak_reserved_bytes
    )
    assert all(segment.size % (2 * MIB) == 0 for segment in segments)
    assert all(before.address + before.size <= after.address for before, after in pairwise(segments))
    shown: dict[int, tuple[int, int]] = {}
    for segment in segments:
        blocks = segment.blocks
        assert blocks[0].address == segment.address
        assert all(before.address + before.size == after.address for before, after in pairwise(blocks))
        assert all(before.is_allocated or after.is_allocated for before, after in pairwise(blocks)), "free neighbours"
        shown |= {block.address: (block.size, block.requested) for block in blocks if block.is_allocated}
    assert shown == live


@settings(max_examples=150, deadline=None)
@given(CONFIGURATIONS, CAPACITIES, STEPS)
def test_invariants(text: str, capacity: int | None, steps: list[tuple[str, int, int, int]]) -> None:
    simulated = CachingAllocator(AllocatorSettings.parse(text, (2, 13)), capacity)
    for count in range(1, len(steps) + 1, 7):
        fresh = CachingAllocator(simulated.settings, capacity)
        check(fresh, drive(fresh, steps[:count]))
    live = drive(simulated, steps)
    check(simulated, live)
    assert capacity is None or simulated.peak_reserved_bytes <= capacity
    for handle in live:
        simulated.free(handle)
    simulated.empty_cache()
    assert simulated.reserved_bytes == simulated.allocated_bytes == simulated.requested_bytes == 0
    assert simulated.snapshot() == ()


@settings(max_examples=50, deadline=None)
@given(CONFIGURATIONS, STEPS)
def test_a_request_fails_only_if_reserved_memory_leaves_no_space(
    text: str, steps: list[tuple[str, int, int, int]]
) -> None:
    capacity = 120 * MIB
    simulated = CachingAllocator(AllocatorSettings.parse(text, (2, 13)), capacity)
    drive(simulated, steps)
    try:
        simulated.malloc(40 * MIB)
    except OutOfMemory as error:
        page = 20 * MIB if simulated.settings.expandable_segments else 0
        assert error.reserved == simulated.reserved_bytes
        assert error.reserved + 40 * MIB + page > error.capacity


@settings(max_examples=50, deadline=None)
@given(CONFIGURATIONS, CAPACITIES, STEPS)
def test_replay_is_the_allocator_event_by_event(
    text: str, capacity: int | None, steps: list[tuple[str, int, int, int]]
) -> None:
    chosen = AllocatorSettings.parse(text, (2, 13))
    simulated = CachingAllocator(chosen, capacity)
    trace, handles, sizes, history, failed = AllocationTrace(), {}, [], [], False
    for action, size, stream, choice in steps:
        if action == "a":
            trace.events.append(Event("alloc", len(sizes), size, stream))
            sizes.append(0)
            try:
                handles[len(sizes) - 1] = handle = simulated.malloc(size, stream)
                sizes[-1] = simulated.block_bytes(handle)
            except OutOfMemory:
                failed = True
        elif action == "f" and handles:
            allocation = sorted(handles)[choice % len(handles)]
            trace.events.append(Event("free", allocation, 0, stream))
            simulated.free(handles.pop(allocation))
        else:
            trace.events.append(Event("empty_cache", -1, 0))
            simulated.empty_cache()
        history.append((simulated.allocated_bytes, simulated.reserved_bytes))
        if failed:
            break
    result = replay(trace, chosen, capacity)
    assert list(result.block_bytes) == sizes
    assert list(zip(result.allocated_bytes, result.reserved_bytes, strict=True)) == history
    assert result.peak_allocated_bytes == simulated.peak_allocated_bytes
    assert (result.out_of_memory is not None) == failed
    if history:
        assert result.peak_allocated_at == [now for now, _ in history].index(result.peak_allocated_bytes)


@given(CONFIGURATIONS, STEPS, STEPS, CAPACITIES)
@settings(deadline=None)
def test_a_copy_goes_on_as_the_allocator_would(
    text: str,
    before: list[tuple[str, int, int, int]],
    after: list[tuple[str, int, int, int]],
    capacity: int | None,
) -> None:
    simulated = CachingAllocator(AllocatorSettings.parse(text, (2, 13)), capacity)
    drive(simulated, before)
    copied, snapshot, peaks = simulated.copy(), simulated.snapshot(), simulated.peak_reserved_bytes
    assert copied.snapshot() == snapshot
    drive(copied, after)
    assert (simulated.snapshot(), simulated.peak_reserved_bytes) == (snapshot, peaks)
    drive(simulated, after)
    assert copied.snapshot() == simulated.snapshot()
    assert copied.peak_reserved_bytes == simulated.peak_reserved_bytes
    assert copied.num_alloc_retries == simulated.num_alloc_retries
