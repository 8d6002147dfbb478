"""Snapshot of the allocator: its segments and blocks at one moment, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainatomy.allocator.blocks import ALLOCATED, UNMAPPED, Block

if TYPE_CHECKING:
    from collections.abc import Iterable


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
