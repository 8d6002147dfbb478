"""Simulated CUDA caching allocator: blocks and segments without a GPU.

Source: ``DeviceCachingAllocator`` in c10/cuda/CUDACachingAllocator.cpp, torch 2.9-2.13; README.md beside this file
describes the rules.  Left out: private pools that are released (``MemPool``; those of CUDA graphs stay), streams
recorded on a block (``record_stream``: a free then waits for that stream, which depends on timing), callbacks that free
memory, sharing of memory between processes.

Out of memory: the prediction that a real run would stop here.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from copy import copy, deepcopy
from typing import TYPE_CHECKING

from trainatomy.allocator.blocks import (
    ADDRESS_BITS,
    ADDRESS_MASK,
    ALLOCATED,
    FREE,
    MIB,
    MIN_BLOCK_BYTES,
    SMALL_REQUEST_BYTES,
    SMALL_SEGMENT_BYTES,
    UNMAPPED,
    Block,
    Pool,
    SearchCount,
    SegmentView,
    block_bytes,
    round_up,
    segment_bytes,
    segments_of,
    splice,
    take_part,
)
from trainatomy.allocator.segments import (
    AddressPolicy,
    ExpandableSegment,
    NewestFirst,
    aged_blocks,
    best_fit,
    find_span,
    grow,
    oversize_blocks,
    unmap,
)
from trainatomy.results.trace import PRIVATE_POOL, DriverAction, pool_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainatomy.allocator.settings import AllocatorSettings


class OutOfMemory(Exception):  # a result that is raised, named as PyTorch names it
    """The allocator could not serve a request, even after it released every cached segment.

    Not a TrainatomyError: the caller decides whether this is a failure or the answer.

    Attributes:
        requested: Bytes that the program requested.
        segment: Bytes that the allocator requested from the driver.
        allocated: Allocated bytes at that moment.
        reserved: Reserved bytes at that moment.
        capacity: Limit of the reserved bytes.
    """

    def __init__(self, requested: int, segment: int, allocated: int, reserved: int, capacity: int) -> None:
        self.requested = requested
        self.segment = segment
        self.allocated = allocated
        self.reserved = reserved
        self.capacity = capacity
        super().__init__(requested, segment, allocated, reserved, capacity)

    def __str__(self) -> str:
        return (
            f"a request of {self.requested} bytes needs {self.segment} from the driver; "
            f"{self.reserved} of {self.capacity} are reserved, {self.allocated} of them allocated"
        )


UNBOUNDED = 1 << 62
UNBOUNDED_ADDRESSES = 1 << 48
"""Address space of an expandable segment on a GPU of unknown size: 4 TiB."""


class CachingAllocator:
    """Allocator of one GPU; all sizes in bytes.

    A handle is the block's address, and 0 stands for a request of 0 bytes, which allocates nothing, as PyTorch's
    null pointer does (``NativeCachingAllocator::allocate`` skips ``malloc`` for it, ``free`` ignores it).

    Args:
        settings: Settings of the allocator.
        capacity_bytes: Limit of the reserved bytes, beyond which ``cudaMalloc`` fails; None for no limit.
        device_bytes: Total memory of the GPU, by default the capacity.  ``per_process_memory_fraction`` and the
            address space of expandable segments (9/8 of it) refer to it.
        addresses: Placement of segments, by default as the driver's.
        on_driver: Called with (action, bytes) for each call of the driver.
    """

    def __init__(
        self,
        settings: AllocatorSettings,
        capacity_bytes: int | None = None,
        *,
        device_bytes: int | None = None,
        addresses: AddressPolicy | None = None,
        on_driver: Callable[[DriverAction, int], None] = lambda action, size: None,
    ) -> None:
        self.settings = settings
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.requested_bytes = self.peak_requested_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.num_alloc_retries = self.num_ooms = 0
        self._capacity = UNBOUNDED if capacity_bytes is None else capacity_bytes
        device = capacity_bytes if device_bytes is None else device_bytes
        self._device = device
        self._on_driver = on_driver
        fraction = settings.per_process_memory_fraction
        self._allowed = int(fraction * device) if device is not None and fraction < 1.0 else None
        self._collects = self._allowed is not None and settings.garbage_collection_threshold is not None
        self._max_split = settings.max_split_size_bytes or UNBOUNDED
        self._max_rounding = settings.max_non_split_rounding_bytes or settings.large_segment_bytes
        self._addresses: AddressPolicy = NewestFirst() if addresses is None else addresses
        self._expandable = settings.expandable_segments
        # What ``_find`` does then is part of ``malloc``, the hot path.
        self._takes_best_fit = not (self._collects or self._expandable or self._max_split != UNBOUNDED)
        self._rounded: dict[int, int] = {}
        self._live: dict[int, Block] = {}
        self._search_counts = {False: SearchCount(), True: SearchCount()}
        self._small: dict[int, Pool] = {}
        self._large: dict[int, Pool] = {}

    def malloc(self, requested_bytes: int, stream: int = 0) -> int:
        """Allocate and return the handle, 0 for 0 bytes.

        Raises:
            OutOfMemory: The request does not fit, even without cached segments.
        """
        if requested_bytes <= 0:
            if requested_bytes < 0:
                raise ValueError(f"cannot allocate {requested_bytes} bytes")
            return 0
        size = self._rounded.get(requested_bytes)
        if size is None:
            size = self._rounded[requested_bytes] = block_bytes(requested_bytes, self.settings.roundup_power2_divisions)
        is_small = size <= SMALL_REQUEST_BYTES
        pool = (self._small if is_small else self._large).get(stream) or self._new_pool(is_small, stream)
        if self._takes_best_fit:
            keys = pool.keys
            index = bisect_left(keys, size << ADDRESS_BITS)
            block = pool.blocks.pop(keys.pop(index) & ADDRESS_MASK) if index < len(keys) else None
        else:
            block = self._find(pool, size)
        if block is None:
            block = self._obtain(pool, requested_bytes, size)

        rest = block.size - size
        address = block.address
        if rest >= pool.min_rest and (size < self._max_split or pool.is_small or self._expandable):
            taken = Block(pool, address, size, block.expandable)
            splice(taken, block.prev, block)
            block.address = address + size
            block.size = rest
            pool.insert(block)
            block = taken

        block.state = ALLOCATED
        block.requested = requested_bytes
        self._live[address] = block
        self.allocated_bytes = allocated = self.allocated_bytes + block.size
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated
        self.requested_bytes = requested = self.requested_bytes + requested_bytes
        if requested > self.peak_requested_bytes:
            self.peak_requested_bytes = requested
        return address

    def malloc_at(self, address: int, size: int, requested_bytes: int, stream: int) -> int:
        """Allocate a block of ``size`` bytes at an address that is free in its pool, and return the handle.

        Raises:
            ValueError: The address is not free.
        """
        requested = block_bytes(requested_bytes, self.settings.roundup_power2_divisions)
        block = take_part((self._small if requested <= SMALL_REQUEST_BYTES else self._large)[stream], address, size)
        block.state, block.requested = ALLOCATED, requested_bytes
        self._live[address] = block
        self.allocated_bytes += size
        self.requested_bytes += requested_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self.peak_requested_bytes = max(self.peak_requested_bytes, self.requested_bytes)
        return address

    def free(self, handle: int) -> None:
        """Return a block to its pool, merged with adjacent free blocks.

        Raises:
            ValueError: The handle is not allocated.
        """
        if not handle:
            return
        block = self._live.pop(handle, None)
        if block is None:
            raise ValueError(f"handle {handle:#x} is not allocated")
        self.allocated_bytes -= block.size
        self.requested_bytes -= block.requested
        block.state = FREE
        pool = block.pool
        keys, blocks = pool.keys, pool.blocks
        before, after = block.prev, block.next
        if before is not None and before.state == FREE:
            del keys[bisect_left(keys, before.size << ADDRESS_BITS | before.address)]
            block.address = before.address
            block.size += before.size
            block.prev = previous = before.prev
            if previous is not None:
                previous.next = block
        if after is not None and after.state == FREE:
            del keys[bisect_left(keys, after.size << ADDRESS_BITS | after.address)]
            del blocks[after.address]
            block.size += after.size
            block.next = successor = after.next
            if successor is not None:
                successor.prev = block
        block.inserted_at = pool.search_count.searches
        blocks[block.address] = block
        insort(keys, block.size << ADDRESS_BITS | block.address)

    def largest_possible(self) -> float:
        """Return the larger of what the driver has left and the largest cached block (``cacheInfo``)."""
        cached = (
            pool.keys[-1] >> ADDRESS_BITS for kind in (self._large, self._small) for pool in kind.values() if pool.keys
        )
        return max(self._capacity - self.reserved_bytes, *cached, 0)

    def empty_cache(self) -> None:
        """Return every wholly free segment (expandable: page) to the driver, but for those of private pools."""
        for pool in (*self._pools(self._large), *self._pools(self._small)):
            self._release_pool(pool)

    def private_bytes(self) -> int:
        """Return the reserved bytes of private pools."""
        return sum(segment.size for segment in self.snapshot() if pool_of(segment.stream))

    def kernels_loaded(self) -> None:
        """Note that the model is on the GPU and its first step begins; addresses change (see ``segments.py``)."""
        self._addresses.kernels_loaded()

    def handle_created(self) -> None:
        """Note that a thread made its cuBLAS handle, whose workspace comes next: it takes addresses, too."""
        self._addresses.handle_created()

    def host_memory_pinned(self, size: int) -> None:
        """Note that the process pinned a block of host memory: a large one takes addresses, too."""
        if size >= SMALL_SEGMENT_BYTES:
            self._addresses.take(size)

    def block_bytes(self, handle: int) -> int:
        """Return the size of the block behind a live handle, with the rest that was not split off; 0 for handle 0."""
        return self._live[handle].size if handle else 0

    def state(self) -> tuple[int, frozenset[tuple[int, int]]]:
        """Return the reserved bytes, and (address, size) of all blocks in use: they determine the free blocks."""
        return self.reserved_bytes, frozenset((address, block.size) for address, block in self._live.items())

    def copy(self) -> CachingAllocator:
        """Return an allocator in the same state that goes on by itself, and tells nobody of its calls of the driver."""
        other = copy(self)
        other._on_driver = lambda action, size: None
        other._addresses = deepcopy(self._addresses)
        other._search_counts = {is_small: copy(count) for is_small, count in self._search_counts.items()}
        pools = {
            id(pool): pool.empty_copy(other._search_counts[pool.is_small])
            for of_kind in (self._small, self._large)
            for pool in of_kind.values()
        }
        other._small = {stream: pools[id(pool)] for stream, pool in self._small.items()}
        other._large = {stream: pools[id(pool)] for stream, pool in self._large.items()}
        blocks = {address: block.copy() for address, block in self._blocks()}
        for block in blocks.values():
            block.pool = pools[id(block.pool)]
            block.prev = None if block.prev is None else blocks[block.prev.address]
            block.next = None if block.next is None else blocks[block.next.address]
            if block.state == FREE:
                block.pool.blocks[block.address] = block
            elif block.state == UNMAPPED:
                block.pool.unmapped[block.address] = block
        other._live = {address: blocks[address] for address in self._live}
        return other

    def _blocks(self) -> Iterator[tuple[int, Block]]:
        """Yield all blocks with their addresses."""
        yield from self._live.items()
        for pool in (*self._small.values(), *self._large.values()):
            yield from pool.blocks.items()
            yield from pool.unmapped.items()

    def snapshot(self) -> tuple[SegmentView, ...]:
        """Return all segments by address, with their blocks."""
        free = [block for pools in (self._small, self._large) for pool in pools.values() for block in pool.in_order()]
        return segments_of([*self._live.values(), *free])

    def _new_pool(self, is_small: bool, stream: int) -> Pool:
        finely = is_small or self._expandable
        page = SMALL_SEGMENT_BYTES if is_small else self.settings.large_segment_bytes
        min_rest = MIN_BLOCK_BYTES if finely else MIB + 1
        pool = Pool(is_small, stream, min_rest, page, self._search_counts[is_small])
        (self._small if is_small else self._large)[stream] = pool
        return pool

    @staticmethod
    def _pools(of_kind: dict[int, Pool]) -> Iterator[Pool]:
        return (of_kind[stream] for stream in sorted(of_kind) if stream < PRIVATE_POOL)

    def _find(self, pool: Pool, size: int) -> Block | None:
        """Take the best fit out of its pool; no other candidate is tried (``get_free_block``)."""
        if self._collects:
            pool.search_count.searches += 1
        keys = pool.keys
        index = bisect_left(keys, size << ADDRESS_BITS)
        if index == len(keys):
            return None
        if self._expandable:
            index = best_fit(pool, index)
        found = keys[index]
        held = found >> ADDRESS_BITS
        if held >= self._max_split and (size < self._max_split or held >= size + self._max_rounding):
            return None
        del keys[index]
        return pool.blocks.pop(found & ADDRESS_MASK)

    def _obtain(self, pool: Pool, requested: int, size: int) -> Block:
        """Return a block of new memory, releasing cached memory if the driver refuses (``malloc``, ``alloc_block``).

        While memory of a private pool is allocated, no cached memory is released (``captures_underway``).
        """
        if self._collects:
            self._collect_garbage()
        block = self._allocate(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._allocate(pool, size)
        if block is None and pool.stream < PRIVATE_POOL:
            self.empty_cache()
            self.num_alloc_retries += 1
            block = self._allocate(pool, size)
        if block is None:
            self.num_ooms += 1
            segment = segment_bytes(size, self.settings.large_segment_bytes)
            limit = self._capacity if self._allowed is None else min(self._allowed, self._capacity)
            raise OutOfMemory(requested, segment, self.allocated_bytes, self.reserved_bytes, limit)
        return block

    def _allocate(self, pool: Pool, size: int) -> Block | None:
        segment = segment_bytes(size, self.settings.large_segment_bytes)
        if self._allowed is not None and self.reserved_bytes + segment > self._allowed:
            self._on_driver("refused", segment)
            return None
        if self._expandable:
            return grow(find_span(pool, size) or self._new_expandable(pool, size), size, self._claim)
        if not self._claim(segment):
            return None
        return Block(pool, self._addresses.take(segment), segment)

    def _new_expandable(self, pool: Pool, size: int) -> Block:
        span = UNBOUNDED_ADDRESSES if self._device is None else self._device + self._device // 8
        span = round_up(max(span, size), pool.page_bytes)
        segment = ExpandableSegment(self._addresses.take(span), span, pool.page_bytes)
        block = Block(pool, segment.base, span, segment)
        block.state = UNMAPPED
        pool.unmapped[block.address] = block
        return block

    def _claim(self, size: int) -> bool:
        """Ask the driver for memory; return False if that exceeds the capacity."""
        if self.reserved_bytes + size > self._capacity:
            self._on_driver("refused", size)
            return False
        self._on_driver("map" if self._expandable else "malloc", size)
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _release_pool(self, pool: Pool) -> None:
        for block in pool.in_order():
            if block.expandable is None:
                if not block.is_split:
                    self._release(block)
                continue
            if unmapped := unmap(block):
                self.reserved_bytes -= unmapped
                self._on_driver("unmap", unmapped)
            if not block.is_split and block.state == UNMAPPED:
                del pool.unmapped[block.address]
                self._addresses.give_back(block.address, block.size)

    def _release(self, block: Block) -> None:
        self._on_driver("free", block.size)
        block.pool.remove(block)
        self.reserved_bytes -= block.size
        self._addresses.give_back(block.address, block.size)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Release just enough blocks that ``max_split_size`` kept whole; return whether they are large enough."""
        if self._max_split == UNBOUNDED:
            return False
        blocks, suffices = oversize_blocks(pool, size, self._max_split)
        for block in blocks:
            self._release(block)
        return suffices

    def _collect_garbage(self) -> None:
        """Release large blocks that were not used for long, above the threshold."""
        assert self._allowed is not None and self.settings.garbage_collection_threshold is not None
        excess = self.reserved_bytes - int(self.settings.garbage_collection_threshold * self._allowed)
        cached = [block for pool in self._pools(self._large) for block in pool.in_order()]
        for block in aged_blocks(cached, self._search_counts[False].searches, excess):
            self._release(block)
