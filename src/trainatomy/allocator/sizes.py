"""Sizes of blocks and segments for a request.

Source: ``round_size``, ``roundup_power2_next_division`` and ``get_allocation_size`` in
c10/cuda/CUDACachingAllocator.cpp, constants in c10/core/AllocatorConfig.h, the same in torch 2.9-2.13
(2.13 makes the 20 MiB a setting).
"""

from __future__ import annotations

from typing import Final

MIB: Final = 1 << 20
MIN_BLOCK_BYTES: Final = 512
SMALL_REQUEST_BYTES: Final = 1 * MIB
"""Largest block of the small pool."""
SMALL_SEGMENT_BYTES: Final = 2 * MIB
LARGE_SEGMENT_BYTES: Final = 20 * MIB
OWN_SEGMENT_BYTES: Final = 10 * MIB
"""Smallest request that gets a segment of its own size."""
SEGMENT_GRANULARITY_BYTES: Final = 2 * MIB


def round_up(value: int, multiple: int) -> int:
    """Round ``value`` up to a multiple."""
    return -(-value // multiple) * multiple


def round_to_division(size: int, divisions: int) -> int:
    """Round up to one of ``divisions`` equal steps between the powers of two around ``size``; powers of two stay."""
    floor = 1 << (size.bit_length() - 1)
    if size == floor:
        return size
    step = floor >> (divisions.bit_length() - 1)
    return round_up(size, step) if step else 2 * floor


def block_bytes(requested: int, divisions: tuple[int, ...]) -> int:
    """Return the bytes of the block that serves a request, before a rest that is not split off is added.

    Args:
        requested: Bytes that the program requested.
        divisions: ``roundup_power2_divisions`` for the intervals from 1 MiB, 2 MiB, 4 MiB ... up to 32 GiB and more
            (0 or 1: none); requests below 1 MiB use the first.
    """
    if requested < MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    interval = min(max(requested.bit_length() - MIB.bit_length(), 0), len(divisions) - 1)
    parts = divisions[interval] if divisions else 0
    if parts > 1 and requested > MIN_BLOCK_BYTES * parts:
        return round_to_division(requested, parts)
    return round_up(requested, MIN_BLOCK_BYTES)


def segment_bytes(block: int, large_segment: int) -> int:
    """Return the bytes that ``cudaMalloc`` is called with when no cached block serves a block of that size."""
    if block <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if block < OWN_SEGMENT_BYTES:
        return large_segment
    return round_up(block, SEGMENT_GRANULARITY_BYTES)
