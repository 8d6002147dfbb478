"""Kernels whose cost is their memory traffic: elementwise operations, fills, copies between host and GPU.

What one kernel does besides moving (gelu, dropout's random numbers, type conversions), and how much faster the L2 cache
is than memory, is in the measured efficiency of its family, by size relative to the L2 cache.

Joining tensors (``cat``, ``stack``): a grid of blocks for all parts, as large for each as the largest part needs.

A block copies 128 times 16 bytes of a part, or finds that the part has no more and ends, which takes nearly as long.
So a large part beside many small ones, as in DenseNet, costs a block of the large part's for each of the small ones'.
This holds where parts are contiguous, not channels-last, and what lies together of each is a multiple of 16 bytes.
Tensors of five dimensions and parts of other types are copied one after the other; other parts by a kernel that
computes where each number goes.

Source: ``getCatGridContig`` and ``CatArrayBatchedCopy_vectorized`` in aten/src/ATen/native/cuda/Shape.cu.
"""

from __future__ import annotations

from math import ceil, hypot, log2, prod

from trainatomy.catalog.files import read_yaml
from trainatomy.operators.cost.kernel import (
    NOTHING,
    Chip,
    KernelWork,
    Passes,
    name_of,
    number,
    on_gpu,
    whole_numbers,
)
from trainatomy.operators.traffic import is_asynchronous, traffic
from trainatomy.results.operations import Array, Call

_OWN = frozenset({"glu", "glu_backward", "softplus"})
"""Operators whose kernels are no plain loop over numbers: halves of a tensor, an exponential and a logarithm."""
_COPIED_FIRST = "masked_fill"
"""Operator that copies its input and changes the copy (aten/src/ATen/native/TensorAdvancedIndexing.cpp)."""
_COPIES = frozenset({"clone", "copy_"})
"""Operators that copy what is contiguous without a kernel of PyTorch's."""
_JOINED = frozenset({"cat", "stack"})
"""Operators with a kernel of their own that copies parts (aten/src/ATen/native/cuda/Shape.cu)."""
_HALF_BYTES = 2
"""Bytes of numbers for which a thread computes more of them at once, and converts them."""
_ARITHMETIC = frozenset({"add", "sub", "mul", "div"})
"""Operators of two operands whose types may differ."""
_SECTOR_BYTES = 32
"""Bytes that the GPU's cache reads at once."""
_WITHIN_REACH = 4
"""Numbers between neighbours of another tensor up to which a warp still reads whole sectors of it."""
_CACHED_BYTES = 2**17
"""Size up to which a multiprocessor's own cache holds a repeated operand, in whatever order it lies."""
_BLOCK_NUMBERS = 256
"""Numbers whose lines a block of threads reads about at once."""
_PINNED_SHARE = 0.87
"""Share of the bus that copies of pinned memory reach: 55 of 63 GB/s over PCIe 5, 27 of 31.5 over PCIe 4."""
_PINNED_SECONDS = 8.7e-6
"""Fixed cost of a copy of pinned memory: 1.2 us, and 7.5 us for the change from a kernel to a copy and back (4 KiB to
64 MiB both ways on an H200, copies between kernels against copies alone; torch 2.11, 2026-11-23)."""
_STAGED_BYTES, _FIRST_STAGED_SECONDS, _STAGED_BYTES_PER_SECOND = 2**20, 2.3e-5, 9.0e9
"""Pageable memory goes to the GPU through pinned buffers of the driver, which one thread fills.  A batch that is not in
the processor's caches goes at 8.2 to 10.6 GB/s, of 14 to 120 MB in nine trainings on images on an H200, by the profiler
(7.1 and 7.6 in two more); copies of the same tensor again and again, as a calibration's, at 14 GB/s."""
_LARGEST_MEASURED_BYTES, _NEW_MEMORY_BYTES_PER_SECOND = 2**26, 1.6e9
"""Host memory of more than 32 MiB is new for each tensor: glibc maps it for each request and gives it back
(``DEFAULT_MMAP_THRESHOLD_MAX``, malloc/malloc.c), so that a copy from the GPU waits for the kernel to clear each page.
64 MiB took 42.3 ms on an H200's host and 48.7 ms on an H100's (the calibrations of 2026-11-22), 1 MiB, whose memory was
used before, 20 us on both.  Larger copies go at the rate of the largest that calibrations measure."""


def memory_bound(
    family: str, chip: Chip, call: Call, *features: float, launches: int = 1, passes: Passes = ()
) -> KernelWork:
    """Return work that is nothing but traffic; its first feature is its size relative to the L2 cache."""
    moved = traffic(call).bytes + sum(size for _, size in passes)
    sizes = (log2(max(moved, 1) / chip.l2_bytes), *features)
    return KernelWork(family, sizes, bytes=moved, launches=launches, passes=passes)


def pointwise(call: Call, chip: Chip) -> KernelWork:
    """Return the work of one kernel that reads and writes; its family names the operator, width and layout."""
    device = on_gpu((*call.inputs, *call.outputs))
    if not device or not traffic(call).bytes:
        return NOTHING
    short = name_of(call)
    if short == "_to_copy" and call.inputs and call.outputs:
        source, result = call.inputs[0].itemsize, call.outputs[0].itemsize
        short = "widen" if result > source else "narrow" if result < source else "convert"
    if short in _OWN:
        return memory_bound(f"{short}.{_width(call)}", chip, call)
    result_array = call.outputs[0] if call.outputs else call.inputs[call.written[0]] if call.written else device[0]
    layout = _layout(call, result_array)
    if layout != "plain" and short != f"{_COPIED_FIRST}_":
        short = short.removesuffix("_")  # in place it is the same kernel
    family = f"{'joined by number' if short in _JOINED else 'traffic'}.{layout}.{_width(call)}.{short}"
    copied = 2 * result_array.bytes if short == _COPIED_FIRST else 0
    passes = (("copy before numbers are replaced", copied),) if copied else ()
    work = memory_bound(family, chip, call, launches=1 + bool(copied), passes=passes)
    if layout == "plain" and short in _COPIES and is_uneven(result_array.bytes):
        return work._replace(family="copied.uneven", seconds=copied_seconds(chip, result_array.bytes))
    if layout == "plain" or (short in _JOINED and layout != "transposed"):
        return work
    if short in _JOINED:
        return work._replace(seconds=_joined_seconds(chip, on_gpu(call.inputs), result_array, work.bytes))
    return work._replace(seconds=_indexed_seconds(chip, call, result_array, work, copied, layout))


def _indexed_seconds(chip: Chip, call: Call, result: Array, work: KernelWork, copied: int, layout: str) -> float:
    """Return the time of a kernel that computes where each number lies in each tensor.

    For every dimension that cannot be joined to its neighbour a thread divides the number's position by the size, and
    adds a multiple of the stride for each tensor (``OffsetCalculator`` in aten/src/ATen/cuda/detail). That bounds the
    kernel where the repeated operands are small, however little of them there is to read.
    """
    form: dict[str, float] = read_yaml("efficiency.yaml")["indexed"]
    tensors = [tensor for tensor in on_gpu(call.inputs) if tensor.elements > 1]
    cycles = form["dimension"] * _joined_dimensions(tensors, result) + form["tensor"] * (len(tensors) + 1)
    cycles += form["half"] * (result.itemsize <= _HALF_BYTES) + _conversion_cycles(call, tensors, result, form)
    if layout == "transposed":
        lines = max((_lines_share(tensor, result) for tensor in tensors), default=0.0)
        cycles = max(cycles, form["transposed"] * lines)
    moving, copying = ((each / (chip.bandwidth * form["bandwidth"])) for each in (work.bytes - copied, copied))
    seconds = form["start_seconds"] + hypot(moving, result.elements * cycles / chip.issue_rate)
    seconds += form["memory_seconds"] * max((_is_evicted(tensor, chip, form) for tensor in tensors), default=0.0)
    return seconds + form["start_seconds"] * bool(copied) + copying


def _joined_seconds(chip: Chip, parts: list[Array], result: Array, moved: float) -> float:
    """Return the time of joining tensors of which some lie in another order."""
    form: dict[str, float] = read_yaml("efficiency.yaml")["indexed"]
    plain = form["dimension"] * len(result.shape) + form["tensor"] * 2
    cycles = sum(part.elements * max(form["transposed_part"] * _lines_share(part, result), plain) for part in parts)
    return form["start_seconds"] + hypot(moved / (chip.bandwidth * form["bandwidth"]), cycles / chip.issue_rate)


def _conversion_cycles(call: Call, tensors: list[Array], result: Array, form: dict[str, float]) -> float:
    """Return the cycles for a number where threads look up how to convert it (``dynamic_casting.cuh``)."""
    types, short = {tensor.dtype for tensor in tensors} - {result.dtype}, name_of(call).removesuffix("_")
    if short == "_to_copy":
        return form["from_bool"] * ("bool" in types)
    return form["conversion"] * (short in _ARITHMETIC and bool(types - {"bool"}))


def is_uneven(size: int) -> bool:
    """Return whether a copy within GPU memory is too large and of no multiple of a page, for which it takes longer."""
    form: dict[str, float] = read_yaml("efficiency.yaml")["indexed"]
    return size > form["uneven_bytes"] and size % form["page_bytes"] > 0


def copied_seconds(chip: Chip, size: int) -> float:
    """Return the time of copying contiguous memory within the GPU (``cudaMemcpyAsync``)."""
    form: dict[str, float] = read_yaml("efficiency.yaml")["indexed"]
    seconds = form["plain_seconds"] + 2 * size / (chip.bandwidth * form["bandwidth"])
    return max(seconds, form["uneven_seconds"]) if is_uneven(size) else seconds


def _lines_share(tensor: Array, result: Array) -> float:
    """Return the pieces of memory that a kernel reads of a tensor in another order, over the numbers; 0 if it is not.

    Fewer pieces are read where neighbours lie within a line of the cache, and where the block of threads also computes
    what lies beside a number.
    """
    step, between = _step_between(tensor, result)
    if between <= _WITHIN_REACH:
        return 0.0
    form: dict[str, float] = read_yaml("efficiency.yaml")["indexed"]
    within_line = min(form["same_line"] + (1 - form["same_line"]) * step / form["line_bytes"], 1.0)
    rows = max(_BLOCK_NUMBERS / between, 1.0)
    return max(within_line / (1 + form["row_of_block"] * (rows - 1)), form["least_lines"])


def _step_between(tensor: Array, result: Array) -> tuple[int, int]:
    """Return how many bytes neighbours of the result lie apart in a tensor, and its neighbours in the result's numbers.

    The latter is 0 where both have the same innermost dimension, or the tensor repeats a number along the result's.
    """
    strides, order = _strides_as(tensor, result), _order(_strides_as(result, result))
    own = _order(strides)
    if not order or not own or own[-1] == order[-1] or not strides[order[-1]]:
        return 0, 0
    between = prod(result.shape[dimension] for dimension in order[order.index(own[-1]) + 1 :])
    return strides[order[-1]] * tensor.itemsize, between


def _order(strides: list[int]) -> list[int]:
    """Return the dimensions from the outermost to the innermost in memory, without those that are repeated."""
    return sorted((d for d, stride in enumerate(strides) if stride), key=lambda d: (-strides[d], d))


def _is_evicted(tensor: Array, chip: Chip, form: dict[str, float]) -> float:
    """Return how far a part of a larger tensor is expected to have left the GPU's cache, from 0 to 1.

    Other kernels work on tensors as large as the whole before they come to its parts, as DenseNet's gradients do.
    Parts whose numbers lie apart share their sectors with others, which a recurrence has just worked on.
    """
    step = min((step for size, step in zip(tensor.shape, tensor.strides, strict=True) if size > 1), default=1)
    if step * tensor.itemsize >= _SECTOR_BYTES:
        return 0.0
    if 0 in tensor.strides or _is_dense(tensor):
        return 0.0
    whole = tensor.itemsize * (
        1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.strides, strict=True))
    )
    kept, evicted = form["kept"] * chip.l2_bytes, form["evicted"] * chip.l2_bytes
    return min(max((whole - kept) / (evicted - kept), 0.0), 1.0)


def piecewise_seconds(chip: Chip, parts: list[Array], result: Array) -> float:
    """Return the time of copying parts of a result one after the other, with a kernel for each that computes places."""
    form: dict[str, float] = read_yaml("efficiency.yaml")["indexed"]
    seconds = 0.0
    for part in parts:
        cycles = form["dimension"] * _joined_dimensions([part], part) + form["tensor"] * 2
        cycles += form["dimension"] + form["half"] * (result.itemsize <= _HALF_BYTES)
        moved = part.elements * (part.itemsize + result.itemsize) / (chip.bandwidth * form["bandwidth"])
        seconds += form["start_seconds"] + hypot(moved, part.elements * cycles / chip.issue_rate)
    return seconds


def reordering_seconds(chip: Chip, tensor: Array) -> float:
    """Return the time of writing a tensor in another order, whose neighbours lie apart in one of the two."""
    form: dict[str, float] = read_yaml("efficiency.yaml")["indexed"]
    return _copy_seconds(chip, tensor, form["transposed"])


def contiguous_seconds(chip: Chip, tensor: Array) -> float:
    """Return the time of copying a tensor to where its numbers follow each other in the order of its shape."""
    form: dict[str, float] = read_yaml("efficiency.yaml")["indexed"]
    strides = [prod(tensor.shape[dimension + 1 :]) for dimension in range(len(tensor.shape))]
    result = tensor._replace(strides=tuple(strides))
    cycles = form["dimension"] * _joined_dimensions([tensor], result) + form["tensor"] * 2
    return _copy_seconds(chip, tensor, max(cycles, form["transposed"] * _lines_share(tensor, result)))


def written_seconds(chip: Chip, tensor: Array, place: Array) -> float:
    """Return the time of copying a tensor into a part of a larger one.

    Where only some numbers of a sector are written, the others are read for it and written again.
    """
    form: dict[str, float] = read_yaml("efficiency.yaml")["indexed"]
    dimensions = _joined_dimensions([tensor], place)
    if dimensions <= 1 and _is_dense(place):
        return copied_seconds(chip, tensor.bytes)
    cycles = form["dimension"] * dimensions + form["tensor"] * 2 + form["half"] * (place.itemsize <= _HALF_BYTES)
    cycles = max(cycles, form["transposed"] * _lines_share(tensor, place))
    most = _SECTOR_BYTES // place.itemsize
    step = min(min((step for size, step in zip(place.shape, place.strides, strict=True) if size > 1), default=1), most)
    moved = tensor.bytes * (1 + (2 * step if step > 1 else 1))
    moving = moved / (chip.bandwidth * form["bandwidth"])
    return form["plain_seconds"] + hypot(moving, tensor.elements * cycles / chip.issue_rate)


def _copy_seconds(chip: Chip, tensor: Array, cycles: float) -> float:
    """Return the time of a copy that takes a multiprocessor so many cycles for a number."""
    form: dict[str, float] = read_yaml("efficiency.yaml")["indexed"]
    moving = 2 * tensor.bytes / (chip.bandwidth * form["bandwidth"])
    return form["start_seconds"] + hypot(moving, tensor.elements * cycles / chip.issue_rate)


def _joined_dimensions(tensors: list[Array], result: Array) -> int:
    """Return the dimensions that are left when those are joined that follow each other in all tensors' memory."""
    every = [_strides_as(tensor, result) for tensor in (result, *tensors)]
    joined: list[int] = []
    for dimension in sorted((d for d, size in enumerate(result.shape) if size > 1), key=lambda d: -result.strides[d]):
        size = result.shape[dimension]
        if not joined or any(strides[joined[-1]] != size * strides[dimension] for strides in every):
            joined.append(dimension)
        else:
            joined[-1] = dimension
    return len(joined)


def _strides_as(tensor: Array, result: Array) -> list[int]:
    """Return a tensor's strides by the dimensions of the result, with 0 where it is repeated."""
    missing = len(result.shape) - len(tensor.shape)
    own = zip(tensor.shape, tensor.strides, strict=True)
    return ([0] * missing + [stride if size > 1 else 0 for size, stride in own])[-len(result.shape) :]


def rearranged(call: Call, chip: Chip) -> KernelWork:
    """Return the work of ``roll``, ``flip`` and triangles: a thread divides its position by sizes and strides.

    ``roll`` has a kernel for each dimension (``roll_cuda_kernel``), ``triu`` and ``tril`` a thread for each 4 bytes
    (``triu_tril_kernel``).  Sources: aten/src/ATen/native/cuda/{TensorTransformations,TriangularOps}.cu.
    """
    if not call.outputs or not traffic(call).bytes:
        return NOTHING
    form: dict[str, float] = read_yaml("efficiency.yaml")["rearranged"]
    short, result = name_of(call).removesuffix("_"), call.outputs[0]
    times = max(len(whole_numbers(number(call, "dims"))), 1) if short == "roll" else 1
    moved = traffic(call).bytes
    passes = (("further dimensions, one after the other", (times - 1) * moved),) if times > 1 else ()
    work = memory_bound(f"rearranged.{short}.{_width(call)}", chip, call, launches=times, passes=passes)
    threads = result.elements / (max(4 // result.itemsize, 1) if short in ("triu", "tril") else 1)
    working = threads * form[short] / chip.issue_rate
    return work._replace(seconds=times * (form["start_seconds"] + max(moved / (chip.bandwidth * 0.9), working)))


def fill(call: Call, chip: Chip) -> KernelWork:
    """Return the work of a kernel that writes and reads nothing: zeros, full, arange, random numbers."""
    return memory_bound("traffic.fill", chip, call) if traffic(call).bytes else NOTHING


def moved_once(call: Call, chip: Chip) -> KernelWork:
    """Return the work of a kernel of which only its tensors are known: each is read or written once."""
    return memory_bound("traffic.plain.mixed.triton", chip, call) if traffic(call).bytes else NOTHING


def transfer(call: Call, chip: Chip) -> KernelWork:
    """Return the work of a copy between host memory and GPU memory, over the bus."""
    arrives = any(not tensor.on_host for tensor in call.outputs)
    size = max((tensor.bytes for tensor in call.inputs), default=0) or 4  # ``copy_`` names its target too
    if is_asynchronous(call):
        return KernelWork("pinned", (log2(size),), seconds=_PINNED_SECONDS + size / (_PINNED_SHARE * chip.bus))
    family = f"transfer.{'to_gpu' if arrives else 'to_cpu'}"
    if arrives and size > _STAGED_BYTES:
        seconds = _FIRST_STAGED_SECONDS + (size - _STAGED_BYTES) / _STAGED_BYTES_PER_SECOND
        return KernelWork("staged", (log2(size),), seconds=seconds)
    if not arrives and size > _LARGEST_MEASURED_BYTES:
        return KernelWork("mapped", (log2(size),), seconds=size / _NEW_MEMORY_BYTES_PER_SECOND)
    return KernelWork(family, (log2(size),), seconds=1.2e-6 + size / 2.0e10)


def _width(call: Call) -> str:
    """Return the bits of the numbers that are moved; ``mixed`` where they differ by more than masks."""
    sizes = {t.itemsize for t in on_gpu((*call.inputs, *call.outputs)) if t.elements > 1 and t.itemsize > 1}
    return str(8 * sizes.pop()) if len(sizes) == 1 else "mixed" if sizes else "8"


def _layout(call: Call, result: Array) -> str:
    """Return which kind of elementwise kernel runs (aten/src/ATen/native/cuda/CUDALoops.cuh).

    ``plain``: all tensors are laid out alike; ``broadcast``: a smaller operand is repeated; ``rows``: large operands
    are laid out differently but have the same innermost dimension, unless one repeats a number along it; else
    ``transposed``, also where a smaller operand lies so and the multiprocessors' own caches do not hold it.
    """
    small = any(1 < t.elements < result.elements for t in on_gpu(call.inputs))
    worst = "broadcast" if small else "plain"
    result_order, joined = _memory_order(result, result), name_of(call) in _JOINED
    for tensor in on_gpu(call.inputs):
        repeated = tensor.elements * 2 < result.elements or len(tensor.shape) != len(result.shape)
        if repeated:
            if not joined and tensor.bytes > _CACHED_BYTES and _step_between(tensor, result)[1] > _WITHIN_REACH:
                return "transposed"
            continue
        order = _memory_order(tensor, result)
        if order == result_order and (_is_dense(tensor) or tensor.elements < result.elements):
            continue
        if order[-1:] != result_order[-1:] and tensor.strides[result_order[-1]]:
            further = result_order[result_order.index(order[-1]) + 1 :] if order and order[-1] in result_order else ()
            if not further or prod(result.shape[dimension] for dimension in further) > _WITHIN_REACH:
                return "transposed"
        worst = "rows"
    return worst


def _memory_order(tensor: Array, like: Array) -> list[int]:
    """Return the dimensions from the outermost to the innermost in memory, without those of size 1."""
    dimensions = [d for d, size in enumerate(like.shape) if size > 1 and tensor.shape[d] > 1 and tensor.strides[d]]
    return sorted(dimensions, key=lambda d: (-tensor.strides[d], d))


def _is_dense(tensor: Array) -> bool:
    """Return whether the elements lie in memory without gaps."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=False) if size)
    return span <= tensor.elements


_VECTOR_BYTES, _THREADS, _BLOCKS_OF_A_MULTIPROCESSOR = 16, 128, 32
_PARTS_OF_A_KERNEL = 128
_MOST_DIMENSIONS = 4
_SHORT_BYTES = 128
"""Below this, what lies together of a part is less than a line of the cache, and others write the rest of the line."""


def joined(call: Call, chip: Chip) -> KernelWork:
    """Return the work of joining tensors."""
    parts = [part for part in on_gpu(call.inputs) if part.elements]
    if len(parts) < 2 or not call.outputs:
        return pointwise(call, chip)
    result = call.outputs[0]
    if _dimensions(call) > _MOST_DIMENSIONS or any(part.dtype != result.dtype for part in parts):
        work = memory_bound(f"joined.copies.{8 * result.itemsize}", chip, call, launches=len(parts))
        return work._replace(seconds=piecewise_seconds(chip, parts, result))
    if not _is_vectorised(call, parts):
        return pointwise(call, chip)
    form: dict[str, float] = read_yaml("efficiency.yaml")["joined"]
    most = chip.multiprocessors * _BLOCKS_OF_A_MULTIPROCESSOR
    blocks = min(ceil(max(part.bytes for part in parts) / (_VECTOR_BYTES * _THREADS)), most)
    launches = ceil(len(parts) / _PARTS_OF_A_KERNEL)
    working = blocks * len(parts) * form["block_cycles"] / chip.issue_rate
    moving = traffic(call).bytes / (chip.bandwidth * form["bandwidth"])
    work = memory_bound(f"joined.vectors.{8 * parts[0].itemsize}", chip, call, launches=launches)
    return work._replace(seconds=launches * form["start_seconds"] + max(working, moving))


def _dimensions(call: Call) -> int:
    """Return the dimensions of what is joined; ``stack`` joins along a dimension that the tensors have, unless last."""
    return len(call.outputs[0].shape) - (name_of(call) == "stack" and _axis(call) < len(call.inputs[0].shape))


def _axis(call: Call) -> int:
    axis = int(number(call, "dim", "0"))
    return axis + len(call.outputs[0].shape) if axis < 0 else axis


def _is_vectorised(call: Call, parts: list[Array]) -> bool:
    """Return whether one kernel copies all parts, 16 bytes at a time."""
    axis = _axis(call)
    together = [prod(part.shape[axis:]) * part.itemsize for part in parts]
    return all(part.is_contiguous for part in parts) and all(
        size >= _SHORT_BYTES and not size % _VECTOR_BYTES for size in together
    )
