"""Private pools of the simulated allocator, as CUDA graphs use them."""

import pytest

from trainatomy.allocator.replay import replay
from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.allocator.simulated import CachingAllocator, OutOfMemory
from trainatomy.results.trace import PRIVATE_POOL, AllocationTrace, Event, shared_origin

MIB = 1 << 20
SETTINGS = AllocatorSettings()


def trace_of(*events: Event) -> AllocationTrace:
    """Return a trace of these events."""
    trace = AllocationTrace(events=list(events))
    trace.origins = [shared_origin("aten::empty", "", "forward", 0)] * sum(event.action == "alloc" for event in events)
    return trace


def test_blocks_of_a_private_pool_serve_nobody_else() -> None:
    allocator = CachingAllocator(SETTINGS)
    allocator.free(allocator.malloc(64 * MIB, PRIVATE_POOL + 1))
    allocator.malloc(64 * MIB)
    assert allocator.reserved_bytes == 128 * MIB
    allocator.malloc(64 * MIB, PRIVATE_POOL + 1)
    assert allocator.reserved_bytes == 128 * MIB
    assert allocator.private_bytes() == 64 * MIB


def test_emptying_the_cache_leaves_private_pools() -> None:
    allocator = CachingAllocator(SETTINGS)
    allocator.free(allocator.malloc(64 * MIB, PRIVATE_POOL + 1))
    allocator.free(allocator.malloc(32 * MIB))
    allocator.empty_cache()
    assert allocator.reserved_bytes == 64 * MIB


def test_a_request_outside_gets_no_memory_of_a_private_pool() -> None:
    allocator = CachingAllocator(SETTINGS, 100 * MIB)
    allocator.free(allocator.malloc(64 * MIB, PRIVATE_POOL + 1))
    with pytest.raises(OutOfMemory):
        allocator.malloc(64 * MIB)


def test_a_request_in_a_private_pool_releases_no_cached_memory() -> None:
    allocator = CachingAllocator(SETTINGS, 100 * MIB)
    allocator.free(allocator.malloc(64 * MIB))
    with pytest.raises(OutOfMemory):
        allocator.malloc(64 * MIB, PRIVATE_POOL + 1)
    assert allocator.num_alloc_retries == 0
    assert allocator.malloc(65 * MIB)  # one outside does
    assert allocator.num_alloc_retries == 1


@pytest.mark.parametrize("size", [300, 3 * MIB, 30 * MIB])
def test_restored_blocks_lie_where_they_were(size: int) -> None:
    pool = PRIVATE_POOL + 1
    events = [
        Event("alloc", 0, size, pool),
        Event("alloc", 1, size, pool),
        Event("alloc", 2, size, pool),
        Event("free", 0, 0),
        Event("free", 1, 0),
        Event("free", 2, 0),
        Event("alloc", 3, size, pool),
        Event("alloc", 4, size, pool),  # where a best fit would take the lowest address
    ]
    trace = trace_of(*events)
    trace.places = {3: 1}
    seen: dict[int, int] = {}
    found = replay(trace, SETTINGS, on_event=lambda allocator, handle: seen.__setitem__(len(seen), handle))
    assert seen[6] == seen[1]
    assert seen[7] == (seen[0] if size < 30 * MIB else seen[7])
    assert seen[7] != seen[6]
    assert found.block_bytes[3] == found.block_bytes[1]


def test_restoring_what_is_in_use_is_refused() -> None:
    allocator = CachingAllocator(SETTINGS)
    handle = allocator.malloc(3 * MIB, PRIVATE_POOL)
    with pytest.raises(ValueError, match="not free"):
        allocator.malloc_at(handle, 3 * MIB, 3 * MIB, PRIVATE_POOL)


def test_a_copy_has_the_same_private_pools() -> None:
    allocator = CachingAllocator(SETTINGS)
    handle = allocator.malloc(3 * MIB, PRIVATE_POOL)
    copy = allocator.copy()
    copy.free(handle)
    assert copy.malloc(4 * MIB, PRIVATE_POOL) == handle
    assert allocator.allocated_bytes == 3 * MIB
