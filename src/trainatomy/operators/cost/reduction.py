"""Reductions and normalisations, whose cost is their memory traffic."""

from __future__ import annotations

from math import ceil, log2, prod

from trainatomy.catalog.files import read_yaml
from trainatomy.operators.cost.across import (
    across_seconds,
    apart_seconds,
    scattered_rows_seconds,
    short_rows_seconds,
)
from trainatomy.operators.cost.elementwise import contiguous_seconds, memory_bound
from trainatomy.operators.cost.kernel import (
    NOTHING,
    Chip,
    KernelWork,
    Passes,
    efficiency_of,
    largest,
    name_of,
    number,
    on_gpu,
    whole_numbers,
)
from trainatomy.operators.traffic import traffic
from trainatomy.results.operations import Array, Call

_ROW_SECONDS, _NUMBER_SECONDS = 1.9e-7, 1.9e-10
"""Time of a multiprocessor for a row of layer norm, and for each of its numbers: a row is a block of 128 threads,
however short it is (aten/src/ATen/native/cuda/layer_norm_kernel.cu, ``vectorized_layer_norm_kernel``).  Swin
transformers on an H200 with torch 2.11 (2026-11-27): 176,000 rows of 96 numbers take 278 us, 44,000 of 192 79 us."""
_CALIBRATED_ROW = 512
"""Numbers of the shortest rows whose layer norm's gradients calibrations measure."""
_COLUMNS, _ROWS_OF_TURN, _SHARED_ROWS = 32, 256, 64 * 1024
"""Columns of a block of layer norm's gradients of weight and bias, rows that it takes at a time, and rows from which on
blocks share them."""
_PAIR_THREADS = 256
"""Threads of a pair of distances (``forward_threads`` in aten/src/ATen/native/cuda/DistanceKernel.cu)."""
_INTEGER_BYTES = 8
"""Bytes of the numbers to which truth values are converted before they are added up."""
_SHORT_ROW, _WARP = 128, 32
"""Numbers of rows from which on a thread reads several at once; threads of a warp."""
_WARP_ROW = 1024
"""Softmax keeps rows up to this long in the registers of a warp (aten/src/ATen/native/cuda/PersistentSoftmax.cuh)."""


def pairs(call: Call, chip: Chip) -> KernelWork:
    """Return the work of the distances of pairs of rows: a block of threads for each pair."""
    work = memory_bound(f"pairs.{name_of(call)}", chip, call)
    turns = ceil(call.inputs[0].shape[-1] / _PAIR_THREADS) * call.outputs[0].elements
    form: dict[str, float] = read_yaml("efficiency.yaml")["pairs"]
    return work._replace(seconds=form["start_seconds"] + turns * form["pair_seconds"] / chip.multiprocessors)


def reduction(call: Call, chip: Chip) -> KernelWork:
    """Return the work of sums, means, norms, extrema: along rows (the innermost dimension), across them, or of all."""
    source = largest(call.inputs)
    if source is None or not source.elements:
        return NOTHING
    kept = call.outputs[0].elements if call.outputs else 1
    dims = whole_numbers(number(call, "dim"))
    inner = max((d for d, size in enumerate(source.shape) if size > 1), key=lambda d: -source.strides[d], default=0)
    reduced = {d % max(len(source.shape), 1) for d in dims}
    way = "all" if kept == 1 else "rows" if inner in reduced else "columns"
    depth = max(source.elements / max(kept, 1), 1)
    kind = _kind_of_reduction(call)
    converted = source.dtype == "bool" and name_of(call) == "sum"
    passes = (("conversion to 64 bits", 2 * _INTEGER_BYTES * source.elements),) if converted else ()
    family = f"{kind}.{way}.{source.itemsize * 8}"
    work = memory_bound(family, chip, call, log2(depth) / 2, launches=1 + converted, passes=passes)
    run = _neighbours(source, reduced, inner)
    if way == "columns" and (apart := _apart_seconds(chip, source, reduced, inner, kept)):
        return work._replace(family=f"apart.{kind}.{source.itemsize * 8}", seconds=apart)
    if way == "rows" and run == depth < _SHORT_ROW:
        seconds = short_rows_seconds(chip, depth, kept, work.bytes)
        return work._replace(family=f"short rows.{kind}.{source.itemsize * 8}", seconds=seconds)
    if way == "columns":
        return work._replace(seconds=across_seconds(chip, depth, kept, run, work.bytes))
    if way == "rows" and run < depth:
        seconds = scattered_rows_seconds(chip, depth, run, kept, work.bytes)
        return work._replace(family=f"parts.{kind}.{source.itemsize * 8}", seconds=seconds)
    return work


def _kind_of_reduction(call: Call) -> str:
    """Return the root of the family: sums and the like take a step for a number, others more."""
    short = name_of(call)
    if short == "logsumexp":
        return short
    if short.startswith(("var", "std")):
        return "variance"
    return "extremum" if len(call.outputs) > 1 or short.startswith("arg") else "reduction"


def _apart_seconds(chip: Chip, source: Array, reduced: set[int], inner: int, kept: int) -> float:
    """Return the time of a reduction whose threads read numbers that lie apart; 0 where they lie beside each other.

    Results are contiguous.  PyTorch orders the dimensions that are kept by the results' strides, not the inputs', and
    lets neighbouring threads take the reduced dimension if its stride is smaller than that of the last kept one, else
    the latter (``reorder_dimensions`` in aten/src/ATen/TensorIterator.cpp, ``setReduceConfig`` in
    aten/src/ATen/native/cuda/Reduce.cuh).
    """
    sizes = [size for size in enumerate(source.shape) if size[1] > 1]
    last = max(dimension for dimension, _ in sizes if dimension not in reduced)
    along = min((source.strides[dimension] for dimension, _ in sizes if dimension in reduced), default=0)
    beside = source.strides[last]
    if not along or not beside or (last == inner and beside <= along):
        return 0.0
    between = prod(size for dimension, size in sizes if dimension > inner and dimension not in reduced)
    width = min(source.elements / kept, _WARP) if along < beside else 1.0
    return apart_seconds(chip, source.elements, min(along, beside) * source.itemsize, width, kept, between)


def _neighbours(source: Array, reduced: set[int], inner: int) -> int:
    """Return the numbers that lie beside each other in dimensions that are reduced, or kept, as the innermost is."""
    if not source.shape or source.strides[inner] != 1:
        return 1
    run = 1
    for dimension in sorted((d for d, size in enumerate(source.shape) if size > 1), key=lambda d: source.strides[d]):
        if source.strides[dimension] != run or (dimension in reduced) != (inner in reduced):
            break
        run *= source.shape[dimension]
    return run


def normalisation(call: Call, chip: Chip) -> KernelWork:
    """Return the work of layer, root-mean-square and group norms, and of softmax.

    The backward of a norm reads gradient and input a second time for the gradients of weight and bias. Inputs that are
    not dense are copied first, and those of layer norm too whose rows are in another order
    (``layer_norm_cuda`` in aten/src/ATen/native/cuda/layer_norm_kernel.cu makes them contiguous).
    """
    short = name_of(call)
    source = largest(call.inputs)
    if source is None or not source.elements:
        return NOTHING
    passes, launches = _further_passes(call, short)
    channels = "group_norm" in short  # a block of threads works on one of them
    width = source.shape[1 if channels else -1] if len(source.shape) > 1 else source.elements
    copied: list[Array] = []
    if "norm" in short:
        every = [tensor for tensor in on_gpu(call.inputs) if tensor.elements == source.elements]
        copied = [tensor for tensor in every if not _has_dense_rows(tensor)]
        copied += [tensor for tensor in every if "layer_norm" in short and _has_other_rows(tensor)]
        launches += len(copied)
    length = f".{'long' if width > _WARP_ROW else 'short'}" if "softmax" in short else ""
    family = f"normalisation.{short}.{source.itemsize * 8}{length}"
    work = memory_bound(family, chip, call, log2(max(width, 1)) / 2, launches=launches, passes=passes)
    beside = sum((contiguous_seconds(chip, tensor) for tensor in copied), 0.0)
    work = work._replace(beside=beside)
    by_rows = source.elements / max(width, 1) * (_ROW_SECONDS + width * _NUMBER_SECONDS) / chip.multiprocessors
    reach = efficiency_of(family)
    if short == "native_layer_norm" and by_rows > work.bytes / (chip.bandwidth * reach.share):
        return work._replace(family="rows.native_layer_norm", seconds=1.5e-6 + by_rows)
    if short == "native_layer_norm_backward" and width < _CALIBRATED_ROW:
        seconds = _short_rows_backward(call, chip, source, width)
        return work._replace(family="columns.native_layer_norm_backward", seconds=seconds)
    return work


def _short_rows_backward(call: Call, chip: Chip, source: Array, width: int) -> float:
    """Return the time of the gradients of a layer norm with short rows.

    The gradients of weight and bias have a block for each 32 columns, which walks over all rows, 256 at a time; many
    rows of few columns are shared by blocks, whose sums are added in a second pass. The gradient of the input has a
    block for each row (``LaunchGammaBetaBackwardCUDAKernel`` and ``LayerNormBackwardKernelImplInternal`` in
    aten/src/ATen/native/cuda/layer_norm_kernel.cu).
    """
    form: dict[str, float] = read_yaml("efficiency.yaml")["layer_norm_backward"]
    rows, blocks = source.elements / width, width / _COLUMNS
    once, start = source.bytes / (chip.bandwidth * form["bandwidth"]), form["start_seconds"]
    to_input = start + max(3 * once, rows * form["row_seconds"] / chip.multiprocessors)
    if "True" not in number(call, "output_mask", "[True, True, True]").split(",", 1)[1]:
        return to_input
    if rows > _SHARED_ROWS and blocks < chip.multiprocessors / 2:
        return to_input + 2 * start + 2 * once
    turns = ceil(rows / _ROWS_OF_TURN) * (form["turn_seconds"] + blocks * form["block_turn_seconds"])
    return to_input + start + max(turns, 2 * once)


def _further_passes(call: Call, short: str) -> tuple[Passes, int]:
    """Return the passes beyond the first, and the number of kernels."""
    if "norm" in short and short.endswith("backward"):
        return (("second read for weight and bias", traffic(call).read),), 2
    if short == "_safe_softmax":
        return (("finding and replacing rows that are masked whole", traffic(call).bytes),), 5
    return (), 1


def _has_dense_rows(tensor: Array) -> bool:
    """Return whether rows follow each other as the shape says (channels-last images count as dense too)."""
    return bool(tensor.strides) and (
        min((s for s in tensor.strides if s), default=1) == tensor.strides[-1] or len(tensor.shape) == 4
    )


def _has_other_rows(tensor: Array) -> bool:
    """Return whether rows are dense but do not follow each other in the order of the shape."""
    if not _has_dense_rows(tensor):
        return False
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size > 1 and stride != expected:
            return True
        expected *= size
    return False
