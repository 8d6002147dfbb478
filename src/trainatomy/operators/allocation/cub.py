"""Temporary storage of CUB's device-wide algorithms.

The formulas are CUB's own; the tile sizes come from its tuning tables, for the key and value sizes that ATen uses
(8-byte indices and counters), and may move by a few kilobytes with CUB's version.

Source: CCCL 3.0 (CUDA 13.0), under cub/: util_temporary_storage.cuh, agent/single_pass_scan_operators.cuh,
device/dispatch/dispatch_radix_sort.cuh, dispatch_reduce.cuh, dispatch_scan.cuh, dispatch_select_if.cuh,
dispatch_unique_by_key.cuh and tuning/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainatomy.allocator.blocks import round_up
from trainatomy.catalog.gpus import threads_per_multiprocessor
from trainatomy.operators.allocation.plan import ceil_div

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainatomy.operators.allocation.plan import Processor

_ALIGNMENT = 256
_SHARED_MEMORY_PER_BLOCK = 48 * 1024
_RADIX_BITS = 8
_TILE_PADDING = 32
_SINGLE_TILE = (256, 19)
_SCAN_TILE = (128, 15)
_SELECT_TILE = (128, 10)
_REDUCE_TILE = (256, 16)
_REDUCE_WAVES = 5


def aliased(sizes: Sequence[int]) -> int:
    """Return the bytes of one blob with buffers of ``sizes``, each aligned to 256 bytes (``AliasTemporaries``).

    The first buffer is aligned too.
    """
    return sum(round_up(size, _ALIGNMENT) for size in sizes) + _ALIGNMENT - 1


def radix_sort_pairs_bytes(
    count: int, key_bytes: int, value_bytes: int, capability: tuple[int, int], bits: int | None = None
) -> int:
    """Return the storage of ``DeviceRadixSort::SortPairs`` for 4- or 8-byte keys, with a 64-bit count.

    One tile needs 1 byte. Else (onesweep) 256 bins of 8 bytes a pass, 256 lookback counters of 4 bytes a block, a
    second copy of keys and values where there are several passes, and a 4-byte counter a pass. ``bits``: sorted bits of
    the keys, all by default.
    """
    widest = max(key_bytes, value_bytes)
    threads, items = _scaled(*_SINGLE_TILE, widest)
    if count <= threads * items:
        return 1
    threads, items = _scaled(*_onesweep(key_bytes, value_bytes, capability), widest)
    tile = threads * items
    portion = (2**28 - 1) // tile * tile
    portions = ceil_div(count, portion)
    passes = ceil_div(key_bytes * 8 if bits is None else bits, _RADIX_BITS)
    bins = 2**_RADIX_BITS
    blocks = ceil_div(min(count, portion), tile)
    second_copy = (count * key_bytes, count * value_bytes) if passes > 1 else (0, 0)
    return aliased((portions * passes * bins * 8, blocks * bins * 4, *second_copy, portions * passes * 4))


def scan_bytes(count: int, value_bytes: int) -> int:
    """Return the storage of ``DeviceScan`` with an operator of ATen: two values per tile, and 32 tiles more."""
    tile = _memory_bound_tile(*_SCAN_TILE, value_bytes)
    return aliased((_tile_states(ceil_div(count, tile), 2 * value_bytes),))


def unique_by_key_bytes(count: int, key_bytes: int, capability: tuple[int, int]) -> int:
    """Return the storage of ``DeviceSelect::UniqueByKey`` with 4-byte values and a 64-bit count: 16 bytes a tile."""
    if key_bytes == 8 and capability >= (9, 0):
        tile = 384 * 10 if capability >= (10, 0) else 640 * 7
    elif key_bytes == 8 and capability == (8, 0):
        tile = 256 * 7
    else:
        tile = 64 * min(11, 11 * 4 // key_bytes)
    return aliased((_tile_states(ceil_div(count, tile), 16), 0))


def select_bytes(count: int) -> int:
    """Return the storage of ``DeviceSelect::Flagged`` for 8-byte positions and 4-byte counts: 8 bytes a tile."""
    return aliased((_tile_states(ceil_div(count, _memory_bound_tile(*_SELECT_TILE, 8)), 8), 0))


def sum_bytes(count: int, value_bytes: int, processor: Processor) -> int:
    """Return the storage of ``DeviceReduce::Sum``: 1 byte for a single tile, else a sum for each block that can run."""
    threads, _ = _REDUCE_TILE
    if count <= _memory_bound_tile(*_REDUCE_TILE, value_bytes):
        return 1
    blocks = threads_per_multiprocessor(processor) // threads * processor.multiprocessors * _REDUCE_WAVES
    return aliased((blocks * value_bytes,))


def _tile_states(tiles: int, descriptor_bytes: int) -> int:
    """Return ``ScanTileState::AllocationSize``: a blob of its own inside the algorithm's."""
    return aliased(((tiles + _TILE_PADDING) * descriptor_bytes, 0, 0))


def _onesweep(key_bytes: int, value_bytes: int, capability: tuple[int, int]) -> tuple[int, int]:
    """Return threads and 4-byte items of the onesweep kernel for pairs (tuning_radix_sort.cuh)."""
    if capability >= (9, 0):
        items = (30, 24) if key_bytes == 8 else (17, 29)
        return 384, items[value_bytes >= 8]
    if capability >= (8, 0):
        return 384, 17 if key_bytes == 4 else 21
    if capability >= (7, 0):
        return 256, 23
    return 256, 30


def _scaled(threads: int, items: int, item_bytes: int) -> tuple[int, int]:
    """Scale threads and items for 4-byte values to values of ``item_bytes`` (``RegBoundScaling``)."""
    items = max(1, items * 4 // max(4, item_bytes))
    room = round_up(_SHARED_MEMORY_PER_BLOCK // (item_bytes * items), 32)
    return min(threads, room), items


def _memory_bound_tile(threads: int, items: int, item_bytes: int) -> int:
    """Return the items of one tile (``MemBoundScaling``)."""
    items = max(1, min(items * 4 // item_bytes, items * 2))
    room = round_up(_SHARED_MEMORY_PER_BLOCK // (item_bytes * items), 32)
    return min(threads, room) * items
