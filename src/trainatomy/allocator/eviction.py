"""Cached blocks that the allocator releases selectively, before it releases all of them.

Source: ``release_available_cached_blocks`` and ``garbage_collect_cached_blocks`` in c10/cuda/CUDACachingAllocator.cpp,
torch 2.9-2.13.
"""

from __future__ import annotations

from bisect import bisect_left

from trainatomy.allocator.blocks import ADDRESS_BITS, Block, Pool


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
