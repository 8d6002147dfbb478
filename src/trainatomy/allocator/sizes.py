"""How many bytes a request becomes: the block it is rounded to, and the segment that is asked of the driver.

Source: ``round_size``, ``roundup_power2_next_division`` and ``get_allocation_size`` in
c10/cuda/CUDACachingAllocator.cpp, constants in c10/core/AllocatorConfig.h, the same in torch 2.9-2.13
(2.13 makes the 20 MiB a setting).
"""

from __future__ import annotations

from typing import Final

MIB: Final = 1 << 20
MIN_BLOCK_BYTES: Final = 512
SMALL_REQUEST_BYTES: Final = 1 * MIB
"""The largest block of the small pool."""
SMALL_SEGMENT_BYTES: Final = 2 * MIB
LARGE_SEGMENT_BYTES: Final = 20 * MIB
OWN_SEGMENT_BYTES: Final = 10 * MIB
"""From here on a request gets a segment of its own size."""
SEGMENT_GRANULARITY_BYTES: Final = 2 * MIB


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below ``value``."""
    return -(-value // multiple) * multiple


def round_to_division(size: int, divisions: int) -> int:
    """The next of ``divisions`` equal steps between the powers of two around ``size``; a power of two stays itself."""
    floor = 1 << (size.bit_length() - 1)
    if size == floor:
        return size
    step = floor >> (divisions.bit_length() - 1)
    return round_up(size, step) if step else 2 * floor


def block_bytes(requested: int, divisions: tuple[int, ...]) -> int:
    """The bytes of the block that serves a request, before an unsplit rest is added.

    ``divisions`` holds, for the intervals from 1 MiB, 2 MiB, 4 MiB ... up to 32 GiB and more, how finely
    ``roundup_power2_divisions`` cuts them (0 or 1: not at all); requests below 1 MiB use the first.
    """
    if requested < MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    interval = min(max(requested.bit_length() - MIB.bit_length(), 0), len(divisions) - 1)
    parts = divisions[interval] if divisions else 0
    if parts > 1 and requested > MIN_BLOCK_BYTES * parts:
        return round_to_division(requested, parts)
    return round_up(requested, MIN_BLOCK_BYTES)


def segment_bytes(block: int, large_segment: int) -> int:
    """The bytes asked of ``cudaMalloc`` when no cached block serves a block of that size."""
    if block <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if block < OWN_SEGMENT_BYTES:
        return large_segment
    return round_up(block, SEGMENT_GRANULARITY_BYTES)
