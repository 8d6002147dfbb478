"""Blocks, and pools of free blocks.

A segment is a doubly linked list of blocks in address order; adjacent free blocks are always merged. A pool keeps the
free blocks of one kind (small or large) and one stream in best-fit order: by size, then by address
(``BlockComparatorSize`` in c10/cuda/CUDACachingAllocator.cpp). PyTorch's set holds all streams and never crosses from
one to the next while it searches, so one sorted list for each stream is the same thing.

Sizes of blocks and segments for a request.

Source: ``round_size``, ``roundup_power2_next_division`` and ``get_allocation_size`` in
c10/cuda/CUDACachingAllocator.cpp, constants in c10/core/AllocatorConfig.h, the same in torch 2.9-2.13
(2.13 makes the 20 MiB a setting).

Snapshot of the allocator: its segments and blocks at one moment, as frozen values.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainatomy.allocator.segments import ExpandableSegment


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

    def copy(self) -> Block:
        """Return a block with the same attributes."""
        other = Block(self.pool, self.address, self.size, self.expandable)
        other.requested, other.state, other.inserted_at = self.requested, self.state, self.inserted_at
        other.prev, other.next = self.prev, self.next
        return other

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

    def empty_copy(self, search_count: SearchCount) -> Pool:
        """Return a pool with the same keys, for copies of the blocks."""
        other = Pool(self.is_small, self.stream, self.min_rest, self.page_bytes, search_count)
        other.keys = list(self.keys)
        return other

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


def take_part(pool: Pool, address: int, size: int) -> Block:
    """Take the block of ``size`` bytes at an address out of the free block that it lies in.

    Raises:
        ValueError: It does not lie in one.
    """
    block = next((one for one in pool.blocks.values() if one.address <= address < one.address + one.size), None)
    if block is None or address + size > block.address + block.size:
        raise ValueError(f"{size} bytes at {address:#x} are not free")
    cut_down(block, address, size)
    return block


def cut_down(block: Block, address: int, size: int) -> None:
    """Take a free block out of its pool, and let it be a part of itself; what lies around that stays free."""
    pool = block.pool
    pool.remove(block)
    if before := address - block.address:
        left = Block(pool, block.address, before, block.expandable)
        splice(left, block.prev, block)
        pool.insert(left)
    if after := block.address + block.size - address - size:
        right = Block(pool, address + size, after, block.expandable)
        splice(right, block, block.next)
        pool.insert(right)
    block.address, block.size = address, size


@dataclass(frozen=True, slots=True)
class BlockView:
    """Block, with sizes in bytes; ``requested`` is 0 for a free one."""

    address: int
    size: int
    requested: int
    is_allocated: bool


@dataclass(frozen=True, slots=True)
class SegmentView:
    """Contiguous range of reserved memory: one ``cudaMalloc``, or one mapped stretch of an expandable segment."""

    address: int
    size: int
    stream: int
    is_small: bool
    is_expandable: bool
    blocks: tuple[BlockView, ...]

    @property
    def allocated_bytes(self) -> int:
        """Size of the allocated blocks together."""
        return sum(block.size for block in self.blocks if block.is_allocated)


def segments_of(blocks: Iterable[Block]) -> tuple[SegmentView, ...]:
    """Return segments by address, from all mapped blocks (``snapshot`` in c10/cuda/CUDACachingAllocator.cpp)."""
    heads = (block for block in blocks if block.prev is None or block.prev.state == UNMAPPED)
    return tuple(sorted(map(_segment_from, heads), key=lambda segment: segment.address))


def _segment_from(head: Block) -> SegmentView:
    views = []
    block: Block | None = head
    while block is not None and block.state != UNMAPPED:
        is_allocated = block.state == ALLOCATED
        views.append(BlockView(block.address, block.size, block.requested if is_allocated else 0, is_allocated))
        block = block.next
    size = sum(view.size for view in views)
    pool = head.pool
    return SegmentView(head.address, size, pool.stream, pool.is_small, head.expandable is not None, tuple(views))
