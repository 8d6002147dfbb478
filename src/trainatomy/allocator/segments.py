"""Segments: their addresses, those that grow (expandable), and cached ones that are released selectively.

Addresses of segments, as the driver assigns them: they decide between two free blocks of equal size.

The rules are observed, not documented: 68 runs on an H200 (11,786 segments; encoders, decoders, both, and vision; fp32,
bf16 and fp16; driver 580.159.04, CUDA 13.0, torch 2.11.0, 2026-11-21) show that the driver

* takes address space from the top down, in reservations that are aligned to 32 MiB and rounded up to multiples of it
  (20 MiB take a reservation of 32, 120 MiB one of 128);
* serves a segment from the newest reservation that has space for it, at its lowest address (two of 16 MiB share a
  reservation, 12 MiB follow 20), and makes a new one only if none has space;
* starts with two reservations above all others: one with 24 MiB left, and a newer one of 416 MiB, of which the context
  holds all but the last 2 MiB until the first kernels of the step are loaded;
* places its own memory by the same rule: 26 MiB before that range opens and 10 MiB after; 64 MiB for each
  cuBLAS handle (one for each thread: forward, backward) just before its workspace, and 2 MiB more for the first;
* places blocks of pinned host memory of 2 MiB and more by the same rule: they decided the layout of BERT-base with
  reentrant checkpoints in host memory (12 blocks of 32 MiB, of which two lay in the context's range) and of
  Qwen2.5-0.5B with TRL's (26 of 8 MiB in the ends of other reservations, one of 16 MiB in the context's range),
  recorded on 2026-11-23.  How smaller blocks are placed was not seen: they are left out.

Given the addresses of the segments before it, 93 % of all segments lie where these rules say.

Gaps that other mappings of host memory leave or open differ between processes: 18 % of new reservations do not lie
below all others.  ``NewestFirst`` leaves them out; ``Scattered`` draws them, to see whether they matter.

Not modelled: the code of further kernels, 2 MiB at a time (in the first forward pass about 4 MiB more in fp32, 12 MiB
under autocast); and that convolutions open the context's range a few operations later.
What happens after ``cudaFree`` was not observed; assumed: a reservation that is wholly free returns to the address
space, and the highest gap that fits is taken first.

Cached blocks that the allocator releases selectively, before it releases all of them.

Source: ``release_available_cached_blocks`` and ``garbage_collect_cached_blocks`` in c10/cuda/CUDACachingAllocator.cpp,
torch 2.9-2.13.

Expandable segments: one range of addresses for each pool and stream, to which memory is mapped page by page.

Source: ``ExpandableSegment``, ``find_expandable_block``, ``map_block``, ``try_allocate_expandable_block`` and
``unmap_block`` in c10/cuda/CUDACachingAllocator.cpp, the same in torch 2.9-2.13 (2.13: the page of the large pool is
``large_segment_size_mb``).  A page is 2 MiB in the small pool and 20 MiB in the large one.  A request maps only the
pages that it needs beyond the free block before the unmapped range; if the driver refuses, the request fails.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Final, Protocol

from trainatomy.allocator.blocks import (
    ADDRESS_BITS,
    ALLOCATED,
    FREE,
    MIB,
    SMALL_SEGMENT_BYTES,
    UNMAPPED,
    Block,
    Pool,
    cut_down,
    merge,
    round_up,
    splice,
)

if TYPE_CHECKING:
    from collections.abc import Callable


RESERVATION_BYTES: Final = 32 * MIB
TOP_ADDRESS: Final = 1 << 52
"""Start of the context's range; later reservations lie below.  Arbitrary: only the order of addresses matters.

Higher than a driver's, so that trainings of thousands of TiB, which fit nowhere, have room below it."""
CONTEXT_RANGE_BYTES: Final = 414 * MIB
SPARE_ADDRESS: Final = TOP_ADDRESS + 480 * MIB
SPARE_BYTES: Final = 24 * MIB
FIRST_KERNELS_BYTES: Final = (26 * MIB, 10 * MIB)
HANDLE_BYTES: Final = 64 * MIB
HANDLE_KERNELS_BYTES: Final = 2 * MIB
SHARE_IN_GAPS: Final = 0.18
"""Share of new reservations that did not lie below all others in the 68 runs."""
GAP_BYTES: Final = 8192 * MIB
"""Room between two reservations where others may lie in gaps.  Arbitrary: only the order of addresses matters."""


class AddressPolicy(Protocol):
    """Places segments in the address space of the device."""

    def take(self, size: int) -> int:
        """Return the address of a new segment of ``size`` bytes."""

    def give_back(self, address: int, size: int) -> None:
        """Take back the addresses of a segment that was freed."""

    def kernels_loaded(self) -> None:
        """Note that the model is on the GPU and its first step begins."""

    def handle_created(self) -> None:
        """Note that a thread made its cuBLAS handle; its workspace comes next."""


class FreeRanges:
    """Unused ranges of addresses, sorted; adjacent ranges are merged.

    Attributes:
        largest: Bytes of the largest range.
    """

    __slots__ = ("_ranges", "largest")

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        self.largest = 0

    def take(self, size: int, *, highest: bool = False) -> int | None:
        """Take from the start of the lowest range that fits, or the end of the highest; None if no range fits."""
        if size > self.largest:
            return None
        order = range(len(self._ranges))
        for i in reversed(order) if highest else order:
            address, available = self._ranges[i]
            if available >= size:
                rest = available - size
                self._ranges[i : i + 1] = [(address if highest else address + size, rest)] if rest else []
                self.largest = max((left for _, left in self._ranges), default=0)
                return address + rest if highest else address
        return None

    def add(self, address: int, size: int) -> tuple[int, int]:
        """Add a range and return its union with adjacent ones."""
        ranges = self._ranges
        i = bisect_left(ranges, (address, 0))
        if i < len(ranges) and ranges[i][0] == address + size:
            size += ranges.pop(i)[1]
        if i and sum(ranges[i - 1]) == address:
            i -= 1
            address, before = ranges.pop(i)
            size += before
        ranges.insert(i, (address, size))
        self.largest = max(self.largest, size)
        return address, size


@dataclass(slots=True, eq=False)
class Reservation:
    """Range of addresses that the driver holds, and its free parts."""

    address: int
    size: int
    free: FreeRanges = field(default_factory=FreeRanges)


class NewestFirst:
    """Placement by the rules above; address space never runs out."""

    def __init__(self) -> None:
        spare = Reservation(SPARE_ADDRESS, RESERVATION_BYTES)
        spare.free.add(SPARE_ADDRESS + RESERVATION_BYTES - SPARE_BYTES, SPARE_BYTES)
        self._context = Reservation(TOP_ADDRESS, CONTEXT_RANGE_BYTES + SMALL_SEGMENT_BYTES)
        self._context.free.add(TOP_ADDRESS + CONTEXT_RANGE_BYTES, SMALL_SEGMENT_BYTES)
        self._by_age = [spare, self._context]
        self._by_address = [self._context, spare]
        self._bottom = TOP_ADDRESS
        self._gaps = FreeRanges()
        """Address space above ``_bottom`` that was returned."""
        self._are_kernels_loaded = False
        self._has_handle = False

    def kernels_loaded(self) -> None:
        """Take addresses for the first kernels and open the context's range; a second call changes nothing."""
        if self._are_kernels_loaded:
            return
        self._are_kernels_loaded = True
        before, after = FIRST_KERNELS_BYTES
        self.take(before)
        self._context.free.add(TOP_ADDRESS, CONTEXT_RANGE_BYTES)
        self.take(after)

    def handle_created(self) -> None:
        """Take addresses for a cuBLAS handle, and for its kernels with the first one; they are never returned."""
        self.take(HANDLE_BYTES)
        if not self._has_handle:
            self._has_handle = True
            self.take(HANDLE_KERNELS_BYTES)

    def take(self, size: int) -> int:
        """Return an address in the newest reservation with space, else at the start of a new one."""
        for reservation in reversed(self._by_age):
            if reservation.free.largest >= size:  # asked before the call, as most have no space left
                address = reservation.free.take(size)
                assert address is not None
                return address
        return self._reserve(size)

    def _reserve(self, size: int) -> int:
        """Make a reservation for a segment and return the segment's address."""
        reserved = round_up(size, RESERVATION_BYTES)
        address = self._place(reserved)
        reservation = Reservation(address, reserved)
        if reserved > size:
            reservation.free.add(address + size, reserved - size)
        self._by_age.append(reservation)
        self._by_address.insert(self._index(address), reservation)
        return address

    def _place(self, size: int) -> int:
        """Return the address of a new reservation: in the highest gap that was returned, else below all others."""
        address = self._gaps.take(size, highest=True)
        if address is None:
            self._bottom -= size
            address = self._bottom
        return address

    def give_back(self, address: int, size: int) -> None:
        """Free a range in its reservation; an empty reservation becomes a gap, except those of the context."""
        index = self._index(address) - 1
        reservation = self._by_address[index]
        whole = (reservation.address, reservation.size)
        if reservation.free.add(address, size) == whole and reservation.address < TOP_ADDRESS:
            del self._by_address[index]
            self._by_age.remove(reservation)
            self._gaps.add(*whole)

    def _index(self, address: int) -> int:
        """Return how many reservations start at or below an address."""
        return bisect_right(self._by_address, address, key=lambda reservation: reservation.address)


class Scattered(NewestFirst):
    """Placement in which some new reservations lie in gaps between earlier ones, as host memory's mappings leave them.

    Which ones, and in which gaps, is drawn by a seed.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = Random(seed)
        self._between: list[FreeRanges] = []
        """The gap above each reservation that lay below all others."""

    def _place(self, size: int) -> int:
        if self._between and self._random.random() < SHARE_IN_GAPS:
            address = self._random.choice(self._between).take(size, highest=True)
            if address is not None:
                return address
        gap = FreeRanges()
        gap.add(self._bottom - GAP_BYTES, GAP_BYTES)
        self._between.append(gap)
        self._bottom -= GAP_BYTES
        return super()._place(size)


def oversize_blocks(pool: Pool, size: int, max_split: int) -> tuple[list[Block], bool]:
    """Return the oversize blocks to free for a request of ``size`` bytes, and whether they are large enough together.

    That is the smallest one that is large enough; if there is none, the largest ones until the sum suffices (they are
    freed even if it never does).
    """
    wanted = max(size, max_split)
    blocks = pool.in_order()
    index = bisect_left(pool.keys, wanted << ADDRESS_BITS)
    if index < len(blocks) and blocks[index].expandable is None:
        return [blocks[index]], True
    chosen: list[Block] = []
    total = 0
    for block in reversed(blocks[:index]):
        if total >= wanted or block.size < max_split:
            break
        if block.expandable is None:
            total += block.size
            chosen.append(block)
    return chosen, total >= wanted


def aged_blocks(cached: list[Block], searches: int, excess: int) -> list[Block]:
    """Return the unsplit blocks to free so that ``excess`` bytes are reclaimed: first those of at least average age.

    A block's age is the number of searches in the large pool since it was freed.  A round takes all blocks that are old
    enough, even if fewer would do; further rounds use the average of the rest until enough is reclaimed.
    """
    chosen: list[Block] = []
    left = [block for block in cached if not block.is_split and block.expandable is None]
    reclaimed = 0
    while left and reclaimed < excess:
        average = sum(searches - block.inserted_at for block in left) / len(left)
        old = [block for block in left if searches - block.inserted_at >= average]
        left = [block for block in left if searches - block.inserted_at < average]
        reclaimed += sum(block.size for block in old)
        chosen += old
    return chosen


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
    segment = block.expandable
    assert segment is not None
    begin = segment.page_at_or_after(block.address)
    end = segment.page_at_or_before(block.address + block.size)
    if begin >= end:
        return 0
    cut_down(block, begin, end - begin)
    block.state = UNMAPPED
    merge(block, block.prev)
    merge(block, block.next)
    block.pool.unmapped[block.address] = block
    return end - begin
