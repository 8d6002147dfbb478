"""The allocator's rules; functions are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.9-2.13)."""

from __future__ import annotations

import pytest

from trainatomy.allocator import AllocatorSettings, CachingAllocator, OutOfMemory
from trainatomy.allocator.blocks import MIB


def allocator(text: str = "", capacity: int | None = None, device: int | None = None) -> CachingAllocator:
    return CachingAllocator(AllocatorSettings.parse(text, (2, 13)), capacity, device_bytes=device)


def test_zero_bytes_allocate_nothing() -> None:
    """``NativeCachingAllocator::allocate`` calls malloc only for a size other than 0; free ignores a null pointer."""
    simulated = allocator()
    assert simulated.malloc(0) == 0
    simulated.free(0)
    assert simulated.block_bytes(0) == simulated.reserved_bytes == simulated.allocated_bytes == 0


@pytest.mark.parametrize("size", [-1, -512])
def test_negative_sizes_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="cannot allocate"):
        allocator().malloc(size)


def test_freeing_twice_is_refused() -> None:
    simulated = allocator()
    handle = simulated.malloc(10)
    simulated.free(handle)
    with pytest.raises(ValueError, match="not allocated"):
        simulated.free(handle)


def test_statistics() -> None:
    simulated = allocator()
    handle = simulated.malloc(1000)
    assert (simulated.requested_bytes, simulated.allocated_bytes, simulated.reserved_bytes) == (1000, 1024, 2 * MIB)
    simulated.free(handle)
    assert (simulated.requested_bytes, simulated.allocated_bytes, simulated.reserved_bytes) == (0, 0, 2 * MIB)
    assert (simulated.peak_requested_bytes, simulated.peak_allocated_bytes, simulated.peak_reserved_bytes) == (
        1000,
        1024,
        2 * MIB,
    )


@pytest.mark.parametrize(
    ("first", "second", "block"),
    [
        (2 * MIB, MIB, MIB),  # small request: its own pool
        (20 * MIB, 19 * MIB, 20 * MIB),  # a rest of 1 MiB is not split off the large pool
        (20 * MIB, 19 * MIB - 512, 19 * MIB - 512),  # one of more than 1 MiB is
    ],
)
def test_should_split(first: int, second: int, block: int) -> None:
    simulated = allocator()
    simulated.free(simulated.malloc(first))
    handle = simulated.malloc(second)
    assert simulated.block_bytes(handle) == simulated.allocated_bytes == block


def test_small_pool_splits_down_to_512() -> None:
    simulated = allocator()
    handles = [simulated.malloc(512) for _ in range(2 * MIB // 512)]
    assert simulated.reserved_bytes == 2 * MIB
    assert handles == list(range(handles[0], handles[0] + 2 * MIB, 512))
    simulated.malloc(1)
    assert simulated.reserved_bytes == 4 * MIB


def test_best_fit_takes_the_smallest_then_the_lowest() -> None:
    simulated = allocator()
    held = [simulated.malloc(size * MIB) for size in (40, 30, 30, 60)]
    for handle in held:
        simulated.free(handle)
    assert simulated.malloc(29 * MIB + MIB // 2) == min(held[1], held[2])
    assert simulated.malloc(31 * MIB) == held[0]


def test_only_the_best_fit_is_tried() -> None:
    """``get_free_block``: a request below max_split_size must not take a block above it, and no other is looked for."""
    simulated = allocator("max_split_size_mb:32")
    simulated.free(simulated.malloc(64 * MIB))
    simulated.malloc(24 * MIB)
    assert simulated.reserved_bytes == (64 + 24) * MIB


@pytest.mark.parametrize(("request_mib", "reserved_mib"), [(81, 100), (80, 180), (100, 100)])
def test_oversize_requests_waste_less_than_a_large_segment(request_mib: int, reserved_mib: int) -> None:
    simulated = allocator("max_split_size_mb:32")
    simulated.free(simulated.malloc(100 * MIB))
    handle = simulated.malloc(request_mib * MIB)
    assert simulated.reserved_bytes == reserved_mib * MIB
    assert simulated.block_bytes(handle) == (100 * MIB if reserved_mib == 100 else 80 * MIB)


def test_max_non_split_rounding() -> None:
    simulated = allocator("max_split_size_mb:32,max_non_split_rounding_mb:40")
    simulated.free(simulated.malloc(100 * MIB))
    simulated.malloc(61 * MIB)
    assert simulated.reserved_bytes == 100 * MIB


def test_streams_do_not_share_blocks() -> None:
    simulated = allocator()
    simulated.free(simulated.malloc(1, stream=1))
    simulated.malloc(1, stream=2)
    assert simulated.reserved_bytes == 4 * MIB


def test_free_merges_with_both_neighbours() -> None:
    simulated = allocator()
    held = [simulated.malloc(512 * 1024) for _ in range(4)]
    for index in (0, 2, 1, 3):
        simulated.free(held[index])
    (segment,) = simulated.snapshot()
    assert [block.size for block in segment.blocks] == [2 * MIB]


def test_empty_cache_keeps_segments_in_use() -> None:
    simulated = allocator()
    kept = simulated.malloc(1)
    simulated.free(simulated.malloc(30 * MIB))
    assert simulated.reserved_bytes == 32 * MIB
    simulated.empty_cache()
    assert simulated.reserved_bytes == 2 * MIB
    simulated.free(kept)
    simulated.empty_cache()
    assert simulated.reserved_bytes == 0
    assert simulated.snapshot() == ()


def test_a_full_gpu_releases_what_is_cached() -> None:
    simulated = allocator(capacity=100 * MIB)
    simulated.free(simulated.malloc(60 * MIB))
    simulated.malloc(70 * MIB)
    assert (simulated.num_alloc_retries, simulated.reserved_bytes) == (1, 70 * MIB)


def test_out_of_memory() -> None:
    simulated = allocator(capacity=100 * MIB)
    simulated.malloc(60 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        simulated.malloc(41 * MIB)
    error = caught.value
    assert (error.requested, error.segment) == (41 * MIB, 42 * MIB)
    assert (error.allocated, error.reserved, error.capacity) == (60 * MIB, 60 * MIB, 100 * MIB)
    assert (simulated.num_ooms, simulated.num_alloc_retries) == (1, 1)
    simulated.malloc(40 * MIB)
    assert simulated.reserved_bytes == 100 * MIB


def test_one_oversize_block_is_enough() -> None:
    """``release_available_cached_blocks``: the smallest oversize block that fits goes, no retry is counted."""
    simulated = allocator("max_split_size_mb:32", capacity=200 * MIB)
    held = [simulated.malloc(size * MIB) for size in (90, 70, 40)]
    for handle in held:
        simulated.free(handle)
    simulated.malloc(50 * MIB)  # 70 is 20 larger: not taken, but freed
    assert (simulated.num_alloc_retries, simulated.reserved_bytes) == (0, (90 + 40 + 50) * MIB)


def test_several_oversize_blocks_from_the_largest_on() -> None:
    simulated = allocator("max_split_size_mb:32", capacity=200 * MIB)
    held = [simulated.malloc(size * MIB) for size in (50, 60, 40, 50)]
    for handle in held:
        simulated.free(handle)
    simulated.malloc(110 * MIB)
    assert (simulated.num_alloc_retries, simulated.reserved_bytes) == (0, (40 + 50 + 110) * MIB)


def test_memory_fraction_bounds_what_is_reserved() -> None:
    simulated = allocator("per_process_memory_fraction:0.5", capacity=200 * MIB)
    simulated.malloc(100 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        simulated.malloc(1)
    assert caught.value.capacity == 100 * MIB


def test_garbage_collection_frees_the_blocks_not_used_for_longest() -> None:
    """``garbage_collect_cached_blocks``: blocks of at least average age, counted in searches of the large pool."""
    simulated = allocator("garbage_collection_threshold:0.5,per_process_memory_fraction:0.9", capacity=1000 * MIB)
    used, unused = simulated.malloc(300 * MIB), simulated.malloc(250 * MIB)
    simulated.free(unused)
    simulated.free(used)
    for _ in range(5):
        simulated.free(simulated.malloc(290 * MIB))
    simulated.malloc(310 * MIB)  # 550 are reserved, 100 above the threshold
    assert simulated.reserved_bytes == (300 + 310) * MIB
    assert simulated.num_alloc_retries == 0


def test_garbage_collection_needs_a_fraction() -> None:
    simulated = allocator("garbage_collection_threshold:0.1", capacity=1000 * MIB)
    simulated.free(simulated.malloc(300 * MIB))
    simulated.malloc(310 * MIB)
    assert simulated.reserved_bytes == 610 * MIB
