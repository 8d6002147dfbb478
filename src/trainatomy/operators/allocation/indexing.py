"""Reading and writing by index, sorting and running sums.

``gather``, ``scatter``, ``index_select``, ``index_add`` and their in-place forms allocate no scratch on CUDA, unless
deterministic algorithms are required.

Embedding lookups and their gradients.

Temporary storage of CUB's device-wide algorithms.

The formulas are CUB's own; the tile sizes come from its tuning tables, for the key and value sizes that ATen uses
(8-byte indices and counters), and may move by a few kilobytes with CUB's version.

Source: CCCL 3.0 (CUDA 13.0), under cub/: util_temporary_storage.cuh, agent/single_pass_scan_operators.cuh,
device/dispatch/dispatch_radix_sort.cuh, dispatch_reduce.cuh, dispatch_scan.cuh, dispatch_select_if.cuh,
dispatch_unique_by_key.cuh and tuning/.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import torch

from trainatomy.allocator.blocks import round_up
from trainatomy.catalog.gpus import threads_per_multiprocessor
from trainatomy.catalog.versions import behaviour
from trainatomy.operators.allocation.plan import (
    Free,
    KernelCall,
    Out,
    Plan,
    Processor,
    Scratch,
    bound,
    ceil_div,
    compute_type,
    contiguous_copies,
    dense_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


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


_INT, _LONG = 4, 8
_SORTED_IN_PLACE = 4096
_MANY_TO_SORT = 1_000_000
_FEW_SEGMENTS = 128


def index(call: KernelCall) -> Plan:
    """Plan ``x[indices]``: masks become positions, 32-bit indices are converted, both until the result is allocated.

    Source: aten/src/ATen/native/TensorAdvancedIndexing.cpp (``make_info``).
    """
    indices = _indices(bound(call)["indices"])
    return [*_positions_of_masks(call, indices), *_converted(indices), Out(0)]


def nonzero(call: KernelCall) -> Plan:
    """Plan the positions of the elements that are not zero."""
    return _found(call, call.args[0].numel(), Out(0))


def masked_select(call: KernelCall) -> Plan:
    """Plan ``x[mask]`` with both expanded to a common shape (ATen/native/cuda/IndexKernel.cpp)."""
    named = bound(call)
    shape = torch.broadcast_shapes(named["self"].shape, named["mask"].shape)
    return [*_positions(call, shape, sum(call.selected)), Out(0)]


def masked_scatter(call: KernelCall) -> Plan:
    """Plan the running sum of a mask, by which each of its elements finds its value in a contiguous source.

    Source: aten/src/ATen/native/cuda/IndexKernel.cpp (``masked_scatter__cuda``), IndexKernel.cu.
    """
    named = bound(call)
    mask = named["mask"].expand(named["self"].shape)
    count = mask.numel()
    return [
        Out(0),
        Scratch(count * _LONG, "running sum"),
        *contiguous_copies(mask, name="contiguous mask"),
        Scratch(scan_bytes(count, _LONG), "scan"),
        Free("scan"),
        *contiguous_copies(named["source"], name="contiguous source"),
    ]


def masked_scatter_backward(call: KernelCall) -> Plan:
    """Plan ``masked_select`` of the gradient; taken as if the source had no more elements than the mask selects.

    Source: aten/src/ATen/native/TensorAdvancedIndexing.cpp (``masked_scatter_backward_symint``).
    """
    return [*_positions(call, call.args[0].shape, call.outputs[0].numel()), Out(0)]


def columns(call: KernelCall) -> Plan:
    """Plan ``im2col`` and ``col2im`` (``unfold``, ``fold``): a dense copy of a strided input, then the result.

    The result begins as large as the input and is allocated anew if it has to hold more
    (ATen/native/cuda/{Im2Col,Col2Im}.cu).
    """
    input_ = call.args[0]
    before, after = dense_bytes(input_), dense_bytes(call.outputs[0])
    copies = contiguous_copies(input_)
    if after <= before:
        return [Out(0, before), *copies]
    return [Scratch(before, "too small"), *copies, Out(0), Free("too small")]


def index_put(call: KernelCall) -> Plan:
    """Plan values written at indices, which needs no scratch, or added there, which sorts them by target.

    For n elements the linear index, its sorted copy, the original positions and a range have 8·n bytes each, besides
    the sort's own storage; values are expanded to n slices. Masks become positions first; with one value for all of
    them nothing is indexed (``masked_fill``). Left out: the check of indices that autograd's own call skips.

    Source: aten/src/ATen/native/cuda/Indexing.cu (``index_put_with_sort_kernel``), TensorAdvancedIndexing.cpp.
    """
    named = bound(call)
    self, given = named["self"], _indices(named["indices"])
    start: list[Out | Scratch | Free] = [Out(number) for number in range(len(call.outputs))]
    indices = _without_masks(call, given)
    if not named["accumulate"]:
        fills = named["values"].numel() == 1 and any(_is_mask(one) for _, one in given)
        return start if fills else [*start, *_positions_of_masks(call, given)]
    if not indices:
        return start
    masks = _positions_of_masks(call, given)
    places = torch.broadcast_shapes(*(one.shape for _, one in indices)).numel()
    plan = [*start, *contiguous_copies(self, name="contiguous self"), *masks, *_converted(indices)]
    plan += _linear_index(len(indices), places)
    plan += [Free("positions") for _ in range(sum(_is_mask(one) for _, one in given))]
    slices = _slice(self, indices)
    if named["values"].numel() != places * slices or not named["values"].is_contiguous():
        plan.append(Scratch(places * slices * self.dtype.itemsize, "expanded values"))
    if not _adjacent(indices):
        plan.append(Scratch(dense_bytes(self), "permuted self"))
    workspace = radix_sort_pairs_bytes(places, _LONG, _LONG, call.processor.capability, _bits(self, indices))
    plan += [Scratch(places * _LONG, name) for name in ("sorted indices", "original places", "range")]
    return [*plan, Scratch(workspace, "sort")]


def sort(call: KernelCall) -> Plan:
    """Plan a sort: up to 4096 values in place, after a range of their positions; more by CUB, with copies.

    Sources: aten/src/ATen/native/cuda/Sort.cpp (``sort_cuda_kernel``); SortStable.cu (``launch_stable_sort_kernel``).
    """
    named = bound(call)
    self = named["self"]
    length = self.shape[named["dim"]] if self.dim() else 1
    results: list[Out | Scratch | Free] = [Out(number) for number in range(len(call.outputs))]
    if length <= _SORTED_IN_PLACE:
        return [*results, Scratch(length * _LONG, "range")]
    dense = self.stride(named["dim"]) == 1 and self.is_contiguous()
    copies = [] if dense else [Scratch(dense_bytes(self), name) for name in ("sorted dimension last", "values")]
    if copies:
        copies.append(Scratch(self.numel() * _LONG, "indices"))
    return [*results, *copies, *_segments_sorted(call, self, length)]


def topk(call: KernelCall) -> Plan:
    """Plan values and indices, then a copy of an input that is not contiguous.

    Source: aten/src/ATen/native/cuda/TensorTopK.cpp. Left out: the buffers of the variant for few, very long rows.
    """
    return [Out(0), Out(1), *contiguous_copies(bound(call)["self"])]


def cumulative_sum(call: KernelCall) -> Plan:
    """Plan a contiguous input in the result's type and, for a single row, CUB's scan.

    Source: aten/src/ATen/native/cuda/ScanUtils.cuh.
    """
    named = bound(call)
    self, result = named["self"], call.outputs[0]
    plan: list[Out | Scratch | Free] = [Out(0)]
    if self.dtype != result.dtype:
        plan.append(Scratch(dense_bytes(self, result.dtype), "input in the result's type"))
    plan += contiguous_copies(self)
    if self.dim() and self.numel() == self.shape[named["dim"]]:
        plan.append(Scratch(scan_bytes(self.numel(), result.dtype.itemsize), "scan"))
    return plan


def repeated(call: KernelCall) -> Plan:
    """Plan the end of each element's repetitions, as 64-bit integers (aten/src/ATen/native/Repeat.h)."""
    return [Scratch(call.args[0].numel() * _LONG, "ends"), Out(0)]


def _segments_sorted(call: KernelCall, self: torch.Tensor, length: int) -> list[Scratch | Free]:
    """Plan CUB's sorts of ``length`` values each: separate if long or alone, as one sort if few."""
    count, size, capability = self.numel(), self.dtype.itemsize, call.processor.capability
    segments = count // length
    if segments == 1 or length >= _MANY_TO_SORT:
        workspace = radix_sort_pairs_bytes(length, size, _LONG, capability)
        one: list[Scratch | Free] = [Scratch(workspace, "sort"), Free("sort")]
        return [Scratch(length * _LONG, "places"), *one * segments]
    if segments < _FEW_SEGMENTS:
        pairs = [Scratch(count * _LONG, "places and segments"), Scratch(count * _LONG, "sorted places and segments")]
        return [*pairs, Scratch(count * size, "keys"), Scratch(radix_sort_pairs_bytes(count, size, _LONG, capability))]
    return [Scratch(count * _LONG, "places"), Scratch(aliased((count * size, count * _LONG)), "sort")]


def _indices(argument: Any) -> list[tuple[int, torch.Tensor]]:
    """Return the index tensors with the dimension that each indexes."""
    return [(dimension, one) for dimension, one in enumerate(argument) if one is not None]


def _positions_of_masks(call: KernelCall, indices: Sequence[tuple[int, torch.Tensor]]) -> list[Scratch | Out | Free]:
    """Plan the positions of each mask, in order."""
    masks = [one for _, one in indices if _is_mask(one)]
    return [
        step for mask, count in zip(masks, call.selected, strict=False) for step in _positions(call, mask.shape, count)
    ]


def _positions(call: KernelCall, shape: Sequence[int], count: int) -> list[Scratch | Out | Free]:
    """Plan a matrix with the positions of ``count`` true elements of a mask."""
    return _found(call, math.prod(shape), Scratch(count * len(shape) * _LONG, "positions"))


def _found(call: KernelCall, elements: int, result: Scratch | Out) -> list[Scratch | Out | Free]:
    """Plan ``nonzero``: elements are counted, then selected (aten/src/ATen/native/cuda/Nonzero.cu, torch 2.9-2.13)."""
    return [
        Scratch(_INT, "count"),
        Scratch(sum_bytes(elements, _INT, call.processor), "sum"),
        Free("sum"),
        result,
        Scratch(select_bytes(elements), "select"),
        Free("select"),
        Free("count"),
    ]


def _without_masks(call: KernelCall, indices: Sequence[tuple[int, torch.Tensor]]) -> list[tuple[int, torch.Tensor]]:
    """Return the indices with an index for each dimension of a mask in place of it, and the dimension of each."""
    counts, found = iter(call.selected), list[tuple[int, torch.Tensor]]()
    skipped = 0  # dimensions that masks of several dimensions add
    for dimension, one in indices:
        if not _is_mask(one):
            found.append((dimension + skipped, one))
            continue
        positions = torch.empty(next(counts, 0), dtype=torch.long, device="meta")
        found += [(dimension + skipped + number, positions) for number in range(one.dim())]
        skipped += one.dim() - 1
    return found


def _is_mask(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.bool, torch.uint8)


def _converted(indices: Sequence[tuple[int, torch.Tensor]]) -> list[Scratch]:
    return [
        Scratch(one.numel() * _LONG, f"index {dimension} of 64 bits")
        for dimension, one in indices
        if one.dtype == torch.int32
    ]


def _linear_index(count: int, places: int) -> list[Scratch | Free]:
    """Plan every index wrapped and multiplied by its stride; the first product holds the sum."""
    plan: list[Scratch | Free] = []
    for number in range(count):
        wrapped, product = f"wrapped index {number}", f"linear index {number}"
        plan += [Scratch(places * _LONG, wrapped), Scratch(places * _LONG, product), Free(wrapped)]
        if number:
            plan.append(Free(product))
    return plan


def _slice(self: torch.Tensor, indices: Sequence[tuple[int, torch.Tensor]]) -> int:
    """Return the elements of ``self`` at one index: the product of the dimensions that are not indexed."""
    indexed = {dimension for dimension, _ in indices}
    count = 1
    for dimension, size in enumerate(self.shape):
        count *= 1 if dimension in indexed else size
    return count


def _adjacent(indices: Sequence[tuple[int, torch.Tensor]]) -> bool:
    dimensions = [dimension for dimension, _ in indices]
    return dimensions == list(range(dimensions[0], dimensions[-1] + 1))


def _bits(self: torch.Tensor, indices: Sequence[tuple[int, torch.Tensor]]) -> int:
    """Return the bits of the largest linear index (``get_num_bits``)."""
    after = 1
    for size in self.shape[indices[-1][0] + 1 :]:
        after *= size
    return max(1, ((self.numel() - 1) // max(after, 1)).bit_length())


_FEW_INDICES = 3072
_ROWS_PER_PARTIAL = 10
_BLOCK_AT_MOST = 1024
_ATOMIC_BLOCKS_PER_MULTIPROCESSOR = 4


def embedding(call: KernelCall) -> Plan:
    """Plan a copy of indices that cannot be viewed as one row (aten/src/ATen/native/Embedding.cpp, ``reshape``)."""
    indices = bound(call)["indices"]
    flat = indices.dim() <= 1 or _merges_to_one_row(indices)
    return [Out(0)] if flat else [Scratch(dense_bytes(indices), "flat indices"), Out(0)]


def embedding_dense_backward(call: KernelCall) -> Plan:
    """Plan the gradient of the table; up to 3072 indices need nothing but contiguous copies.

    More indices are sorted together with their positions and cut into segments of equal indices and partial segments of
    at most 10 rows, whose sums (fp32 for 16-bit gradients) are added up at the end. With n indices, V rows of width H,
    s = min(n, V) segments and p = ⌊n/10⌋ + s partial segments, the largest buffer holds p·H sums.

    Source: aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu, torch 2.9-2.13.
    """
    named = bound(call)
    indices, by_frequency = named["indices"], named["scale_grad_by_freq"]
    copies = contiguous_copies(indices, named["grad_output"])
    if indices.numel() <= _FEW_INDICES and not by_frequency:
        return [*copies, Out(0)]
    size = indices.dtype.itemsize
    return [*copies, *_sorted(call, indices.numel(), size, by_frequency), *_summed(call, indices.numel(), size)]


def _sorted(call: KernelCall, count: int, index_bytes: int, by_frequency: bool) -> list[Scratch | Free]:
    size = count * index_bytes
    plan: list[Scratch | Free] = [Scratch(size, name) for name in ("sorted indices", "original places", "range")]
    workspace = radix_sort_pairs_bytes(count, index_bytes, index_bytes, call.processor.capability)
    plan += [Scratch(workspace, "sort"), Free("sort"), Free("range")]
    if by_frequency:
        by_key = scan_bytes(count, index_bytes)
        plan.append(Scratch(size, "count"))
        plan += [Scratch(by_key, "count up"), Free("count up"), Scratch(by_key, "count down"), Free("count down")]
    return plan


def _summed(call: KernelCall, count: int, index_bytes: int) -> list[Out | Scratch | Free]:
    weight = call.outputs[0]
    rows, width = weight.shape
    segments = min(count, rows)
    partial = count // _ROWS_PER_PARTIAL + segments
    capability = call.processor.capability
    plan: list[Out | Scratch | Free] = [
        Out(0),
        Scratch(count * index_bytes, "segment offsets"),
        Scratch(8, "number of segments"),
        Scratch(count * index_bytes, "unique keys"),
        Scratch(unique_by_key_bytes(count, index_bytes, capability), "unique"),
        Free("unique"),
        Free("unique keys"),
        Scratch(segments * index_bytes, "partial segments"),
        Scratch(segments * index_bytes, "partial segments before"),
        Scratch(scan_bytes(segments, index_bytes), "scan"),
        Free("scan"),
        Scratch(8, "number of partial segments"),
        Scratch(partial * index_bytes, "partial segment offsets"),
    ]
    compute = compute_type(weight.dtype)
    if _adds_atomically(call, segments, partial, width):
        plan.append(Scratch(partial * index_bytes, "segment of partial"))
        if compute != weight.dtype:
            plan.append(Scratch(weight.numel() * compute.itemsize, "gradient in the compute type"))
    else:
        plan.append(Scratch(partial * width * compute.itemsize, "partial sums"))
    return plan


def _adds_atomically(call: KernelCall, segments: int, partial: int, width: int) -> bool:
    """Return whether few long segments are added with atomics, without partial sums.

    Deterministic algorithms are assumed to be off.
    """
    if not behaviour("embedding_backward_adds_atomically", call.processor.torch_version):
        return False
    wide = round_up(width, call.processor.warp_size)
    grid = ceil_div(segments * wide, min(wide, _BLOCK_AT_MOST))
    return grid < call.processor.multiprocessors * _ATOMIC_BLOCKS_PER_MULTIPROCESSOR and partial > grid * 4


def _merges_to_one_row(tensor: torch.Tensor) -> bool:
    """Return whether ``reshape(-1)`` is a view: every dimension longer than 1 steps over the next exactly."""
    spans = [(stride, stride * size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    return all(outer[0] == inner[1] for outer, inner in itertools.pairwise(spans))
