"""Expandable segments; functions are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.9-2.13)."""

from __future__ import annotations

import pytest

from trainatomy.allocator import AllocatorSettings, CachingAllocator, OutOfMemory
from trainatomy.allocator.blocks import MIB


def allocator(capacity: int | None = None, extra: str = "") -> CachingAllocator:
    return CachingAllocator(AllocatorSettings.parse(f"expandable_segments:True{extra}", (2, 13)), capacity)


def test_pages_are_2_mib_and_20_mib() -> None:
    simulated = allocator()
    simulated.malloc(1)
    assert simulated.reserved_bytes == 2 * MIB
    simulated.malloc(30 * MIB)
    assert simulated.reserved_bytes == 42 * MIB


def test_page_of_the_large_pool_is_a_setting_since_2_13() -> None:
    simulated = allocator(extra=",large_segment_size_mb:64")
    simulated.malloc(30 * MIB)
    assert simulated.reserved_bytes == 64 * MIB


def test_the_segment_grows_after_its_free_tail() -> None:
    """Check that ``try_allocate_expandable_block`` maps only the bytes that the free tail lacks."""
    simulated = allocator()
    first = simulated.malloc(30 * MIB)  # 10 of 40 are free
    second = simulated.malloc(25 * MIB)  # lacks 15
    assert second == first + 30 * MIB
    assert simulated.reserved_bytes == 60 * MIB
    (segment,) = simulated.snapshot()
    assert [block.size for block in segment.blocks] == [30 * MIB, 25 * MIB, 5 * MIB]
    assert [block.is_allocated for block in segment.blocks] == [True, True, False]
    assert segment.is_expandable


def test_rests_of_512_are_split_off_in_the_large_pool() -> None:
    simulated = allocator()
    assert simulated.block_bytes(simulated.malloc(20 * MIB - 512)) == 20 * MIB - 512


def test_best_fit_sees_the_tail_at_the_size_to_which_it_can_grow() -> None:
    """``get_free_block``: the tail (5 MiB free) fits 4 MiB tighter, but the finished block of 8 MiB is taken."""
    simulated = allocator()
    held = [simulated.malloc(size * MIB) for size in (8, 27)]
    simulated.free(held[0])
    assert simulated.malloc(4 * MIB) == held[0]
    assert simulated.reserved_bytes == 40 * MIB


def test_empty_cache_unmaps_whole_free_pages() -> None:
    """``unmap_block``: pages that hold a part of a live block stay, their free rest stays in the pool."""
    simulated = allocator()
    first, second, third = (simulated.malloc(30 * MIB) for _ in range(3))  # 100 MiB mapped
    simulated.free(second)  # 30..60: the page 40..60 is wholly free
    simulated.empty_cache()
    assert simulated.reserved_bytes == 80 * MIB
    segments = simulated.snapshot()
    assert [(segment.address - first, segment.size) for segment in segments] == [(0, 40 * MIB), (60 * MIB, 40 * MIB)]
    # The gap is filled first: the free 10 before it, then its 20.
    assert simulated.malloc(30 * MIB) == second
    assert simulated.reserved_bytes == 100 * MIB
    for handle in (first, second, third):
        simulated.free(handle)
    simulated.empty_cache()
    assert simulated.reserved_bytes == 0
    assert simulated.snapshot() == ()


def test_out_of_memory_leaves_the_rest_usable() -> None:
    simulated = allocator(capacity=60 * MIB)
    simulated.malloc(30 * MIB)
    with pytest.raises(OutOfMemory):
        simulated.malloc(31 * MIB)
    assert (simulated.num_alloc_retries, simulated.num_ooms) == (1, 1)
    simulated.malloc(30 * MIB)
    assert simulated.reserved_bytes == 60 * MIB


def test_streams_have_segments_of_their_own() -> None:
    simulated = allocator(capacity=100 * MIB)
    simulated.malloc(2 * MIB, stream=0)
    simulated.malloc(2 * MIB, stream=7)
    assert [(segment.stream, segment.size) for segment in simulated.snapshot()] in (
        [(0, 20 * MIB), (7, 20 * MIB)],
        [(7, 20 * MIB), (0, 20 * MIB)],
    )
