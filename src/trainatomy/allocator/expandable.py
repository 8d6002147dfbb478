"""Expandable segments: one range of addresses for each pool and stream, to which memory is mapped page by page.

Source: ``ExpandableSegment``, ``find_expandable_block``, ``map_block``, ``try_allocate_expandable_block`` and
``unmap_block`` in c10/cuda/CUDACachingAllocator.cpp, the same in torch 2.9-2.13 (2.13: the page of the large pool is
``large_segment_size_mb``).  A page is 2 MiB in the small pool and 20 MiB in the large one.  A request maps only the
pages that it needs beyond the free block before the unmapped range; if the driver refuses, the request fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainatomy.allocator.blocks import ALLOCATED, FREE, UNMAPPED, Block, Pool, merge, splice
from trainatomy.allocator.sizes import round_up

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class ExpandableSegment:
    """Reserved range of addresses; ``size`` is a multiple of ``page_bytes``."""

    base: int
    size: int
    page_bytes: int

    def page_at_or_after(self, address: int) -> int:
        """Return the first page boundary that is not below ``address``."""
        return self.base + round_up(address - self.base, self.page_bytes)

    def page_at_or_before(self, address: int) -> int:
        """Return the last page boundary that is not above ``address``."""
        return address - (address - self.base) % self.page_bytes


def grown_size(block: Block) -> int:
    """Return the size that a free block can grow to by mapping what follows it; best fit compares this size."""
    after = block.next
    return block.size + (after.size if after is not None and after.state == UNMAPPED else 0)


def best_fit(pool: Pool, index: int) -> int:
    """Advance from the smallest block that fits while the next one could grow to less; return its index in the keys.

    The last block of a segment counts with all its address space, so that blocks that cannot grow come first
    (``get_free_block``).
    """
    size = grown_size(pool.at(index))
    while index + 1 < len(pool.keys) and (after := grown_size(pool.at(index + 1))) < size:
        index += 1
        size = after
    return index


def find_span(pool: Pool, size: int) -> Block | None:
    """Return the first block of the lowest run of free and unmapped blocks that spans ``size`` bytes of addresses."""
    for address in sorted(pool.unmapped):
        block = pool.unmapped[address]
        if block.prev is not None and block.prev.state != ALLOCATED:
            block = block.prev
        if _spans(block, size):
            return block
    return None


def _spans(block: Block | None, size: int) -> bool:
    while block is not None and block.state != ALLOCATED and size > 0:
        size -= block.size
        block = block.next
    return size <= 0


def grow(first: Block, size: int, claim: Callable[[int], bool]) -> Block | None:
    """Map memory until ``first`` and what follows it hold ``size`` bytes, and take that free block out of its pool.

    Args:
        first: First block of the range.
        size: Bytes that the block must hold.
        claim: Asks the driver for bytes; returns False if it refuses.

    Returns:
        The block, or None if the driver refused (memory mapped before stays in the pool).
    """
    block = first
    if block.state == UNMAPPED and not _map(block, min(block.size, size), claim):
        return None
    while block.size < size:
        after = block.next
        if after is None or not _map(after, min(size - block.size, after.size), claim):
            return None
        block = after
    block.pool.remove(block)
    return block


def _map(block: Block, size: int, claim: Callable[[int], bool]) -> bool:
    segment, pool = block.expandable, block.pool
    assert segment is not None
    mapped = round_up(size, segment.page_bytes)
    if not claim(mapped):
        return False
    del pool.unmapped[block.address]
    block.state = FREE
    if mapped < block.size:
        rest = Block(pool, block.address + mapped, block.size - mapped, segment)
        rest.state = UNMAPPED
        splice(rest, block, block.next)
        pool.unmapped[rest.address] = rest
        block.size = mapped
    merge(block, block.prev)
    merge(block, block.next)
    pool.insert(block)
    return True


def unmap(block: Block) -> int:
    """Return the whole pages inside a free block to the driver; returns their bytes (0 if there are none)."""
    segment, pool = block.expandable, block.pool
    assert segment is not None
    begin = segment.page_at_or_after(block.address)
    end = segment.page_at_or_before(block.address + block.size)
    if begin >= end:
        return 0
    pool.remove(block)
    if before := begin - block.address:
        left = Block(pool, block.address, before, segment)
        splice(left, block.prev, block)
        pool.insert(left)
    if after := block.address + block.size - end:
        right = Block(pool, end, after, segment)
        splice(right, block, block.next)
        pool.insert(right)
    block.address, block.size, block.state = begin, end - begin, UNMAPPED
    merge(block, block.prev)
    merge(block, block.next)
    pool.unmapped[block.address] = block
    return end - begin
