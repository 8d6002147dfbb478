"""Blocks, and pools of free blocks.

A segment is a doubly linked list of blocks in address order; adjacent free blocks are always merged. A pool keeps the
free blocks of one kind (small or large) and one stream in best-fit order: by size, then by address
(``BlockComparatorSize`` in c10/cuda/CUDACachingAllocator.cpp). PyTorch's set holds all streams and never crosses from
one to the next while it searches, so one sorted list for each stream is the same thing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from trainatomy.allocator.expandable import ExpandableSegment

ADDRESS_BITS: Final = 53
ADDRESS_MASK: Final = (1 << ADDRESS_BITS) - 1

FREE: Final = 0
ALLOCATED: Final = 1
UNMAPPED: Final = 2
"""State of a part of an expandable segment's address space that has no memory."""


class Block:
    """Range of one segment: free, allocated or unmapped; ``requested`` is the size that the program requested."""

    __slots__ = ("address", "expandable", "inserted_at", "next", "pool", "prev", "requested", "size", "state")

    def __init__(self, pool: Pool, address: int, size: int, expandable: ExpandableSegment | None = None) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.expandable = expandable
        self.requested = 0
        self.state = FREE
        self.inserted_at = 0
        self.prev: Block | None = None
        self.next: Block | None = None

    @property
    def is_split(self) -> bool:
        """True if the segment holds other blocks as well."""
        return self.prev is not None or self.next is not None


@dataclass(slots=True)
class SearchCount:
    """Number of searches for a free block in all pools of one kind; garbage collection measures age by it."""

    searches: int = 0


class Pool:
    """Free blocks of one kind and stream, and the unmapped ranges of its expandable segments.

    Attributes:
        keys: Sorted keys of the free blocks; ``size << ADDRESS_BITS | address`` orders as the pair does.
        blocks: Free blocks by address.
        unmapped: Unmapped blocks by address.
        min_rest: Smallest remainder that is split off a block.
        page_bytes: Page of an expandable segment.
        search_count: Searches in all pools of this kind.
    """

    __slots__ = ("blocks", "is_small", "keys", "min_rest", "page_bytes", "search_count", "stream", "unmapped")

    def __init__(self, is_small: bool, stream: int, min_rest: int, page_bytes: int, search_count: SearchCount) -> None:
        self.is_small = is_small
        self.stream = stream
        self.min_rest = min_rest
        self.page_bytes = page_bytes
        self.search_count = search_count
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}
        self.unmapped: dict[int, Block] = {}

    def insert(self, block: Block) -> None:
        """Add a free block."""
        block.inserted_at = self.search_count.searches
        insort(self.keys, block.size << ADDRESS_BITS | block.address)
        self.blocks[block.address] = block

    def remove(self, block: Block) -> None:
        """Remove a free block."""
        del self.keys[bisect_left(self.keys, block.size << ADDRESS_BITS | block.address)]
        del self.blocks[block.address]

    def at(self, index: int) -> Block:
        """Return the free block of ``keys[index]``."""
        return self.blocks[self.keys[index] & ADDRESS_MASK]

    def in_order(self) -> list[Block]:
        """Return a list of the free blocks by size and address."""
        return [self.blocks[key & ADDRESS_MASK] for key in self.keys]


def merge(block: Block, neighbour: Block | None) -> None:
    """Merge an adjacent block in the same state into ``block``, which is in no pool (``try_merge_blocks``)."""
    if neighbour is None or neighbour.state != block.state:
        return
    if neighbour.state == FREE:
        block.pool.remove(neighbour)
    else:
        del block.pool.unmapped[neighbour.address]
    if block.prev is neighbour:
        block.address = neighbour.address
        block.prev = neighbour.prev
        if block.prev is not None:
            block.prev.next = block
    else:
        block.next = neighbour.next
        if block.next is not None:
            block.next.prev = block
    block.size += neighbour.size


def splice(block: Block, before: Block | None, after: Block | None) -> None:
    """Link ``block`` between two adjacent blocks."""
    block.prev, block.next = before, after
    if before is not None:
        before.next = block
    if after is not None:
        after.prev = block
