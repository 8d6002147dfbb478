"""Reductions and normalisations, whose cost is their memory traffic.

Reductions across rows, or along rows that do not follow each other: PyTorch's blocks for them, and their time.

A thread adds the numbers of a few neighbouring columns, one row after the other.  The threads of a block share the rows
of their columns where there are many; where a thread would still have 256 rows, blocks share them too, and the last one
to finish adds up what the others found.  Source: ``setReduceConfig`` in aten/src/ATen/native/cuda/Reduce.cuh.

Kernels that go along a dimension step by step: cumulative sums and the like, the loss of CTC, weight norm.

Constants and their source: ``catalog/efficiency.yaml``.
"""

from __future__ import annotations

from math import ceil, log2, prod, sqrt
from typing import NamedTuple

from trainatomy.catalog.files import read_yaml
from trainatomy.operators.cost.elementwise import contiguous_seconds, memory_bound
from trainatomy.operators.cost.indexing import sorted_values
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

_BLOCK_THREADS, _WARP_THREADS, _RESIDENT = 512, 32, 2048
"""Threads of a block at most, of a warp, and of a multiprocessor."""
_FEWEST, _MOST = 16, 256
"""Rows of a thread below which blocks do not share them, and from which on they do."""
_COLUMNS_OF_THREAD = 4
"""Neighbouring columns that a thread reads at once, where their number divides the row."""


class Blocks(NamedTuple):
    """Division of rows and columns among threads and blocks.

    Attributes:
        rows: Rows that a thread adds up.
        sharing: Blocks that share the rows of the same columns.
    """

    rows: float
    sharing: int


def blocks_of(rows: float, columns: int, width: int, multiprocessors: int) -> Blocks:
    """Return how the threads share a reduction.

    Args:
        rows: Numbers that are added up for each result.
        columns: Results.
        width: Neighbouring results, whose inputs lie beside each other.
        multiprocessors: Of the GPU.
    """
    at_once = next(each for each in (_COLUMNS_OF_THREAD, 2, 1) if width % each == 0)
    most, columns = _BLOCK_THREADS // at_once, max(columns // at_once, 1)
    across, down = min(_power_of_two(columns), most), min(_power_of_two(int(rows)), most)
    height = min(down, most // min(across, _WARP_THREADS))
    wide = min(across, most // height)
    shared = rows >= min(height * _FEWEST, _MOST)
    each = rows / height if shared else rows
    grid = ceil(columns / wide / (1 if shared else height))
    target = multiprocessors * (_RESIDENT // (wide * height))
    if not shared or rows / height < _MOST or grid > target:
        return Blocks(each, 1)
    sharing = max(min(ceil(target / grid), ceil(each / _FEWEST)), ceil(each / _MOST))
    return Blocks(each / sharing, sharing)


def across_seconds(chip: Chip, rows: float, columns: int, width: int, moved: float) -> float:
    """Return the time of a reduction that moves this many bytes; the other arguments are those of ``blocks_of``."""
    form: dict[str, float] = read_yaml("efficiency.yaml")["reduction_across"]
    blocks = blocks_of(rows, columns, width, chip.multiprocessors)
    seconds = form["start_seconds"] + blocks.rows * form["row_seconds"]
    if blocks.sharing > 1:
        seconds += form["sharing_seconds"] + blocks.sharing * form["block_seconds"]
    return seconds + moved / (chip.bandwidth * form["bandwidth"])


def scattered_rows_seconds(chip: Chip, rows: float, run: int, results: int, moved: float) -> float:
    """Return the time of a reduction along rows whose parts lie apart, such as the first and the last dimension.

    Threads of a warp take neighbouring numbers of a part, and a thread computes where each of its numbers lies.

    Args:
        chip: The GPU.
        rows: Numbers that are added up for each result.
        run: Neighbouring numbers of these.
        results: Results.
        moved: Bytes that are moved.
    """
    form: dict[str, float] = read_yaml("efficiency.yaml")["reduction_along_parts"]
    across, down = min(_power_of_two(run), _BLOCK_THREADS), min(_power_of_two(results), _BLOCK_THREADS)
    height = min(down, _BLOCK_THREADS // min(across, _WARP_THREADS))
    wide = min(across, _BLOCK_THREADS // height)
    each, grid, sharing = rows / wide, ceil(results / height), 1
    if each >= min(height * _FEWEST, _MOST):
        each, grid = each / height, results
        target = chip.multiprocessors * (_RESIDENT // (wide * height))
        if each >= _MOST and grid <= target:
            sharing = max(min(ceil(target / grid), ceil(each / _FEWEST)), ceil(each / _MOST))
            each /= sharing
    threads = grid * sharing * wide * height
    working = (threads * form["thread_cycles"] + rows * results * form["number_cycles"]) / chip.issue_rate
    seconds = form["start_seconds"] + max(each * form["waiting_seconds"], working, moved / (chip.bandwidth * 0.8))
    shared = read_yaml("efficiency.yaml")["reduction_across"]
    return float(seconds + (shared["sharing_seconds"] + sharing * shared["block_seconds"]) * (sharing > 1))


def short_rows_seconds(chip: Chip, rows: float, results: int, moved: float) -> float:
    """Return the time of a reduction along short rows: up to a warp of threads for each result, whatever it adds up."""
    form: dict[str, float] = read_yaml("efficiency.yaml")["reduction_along_short_rows"]
    threads = results * min(_power_of_two(int(rows)), _WARP_THREADS)
    working = threads * form["thread_cycles"] / chip.issue_rate
    return form["start_seconds"] + max(working, moved / (chip.bandwidth * form["bandwidth"]))


def apart_seconds(chip: Chip, numbers: int, step: int, width: float, results: int, between: float) -> float:
    """Return the time of a reduction whose neighbouring threads read numbers that lie apart.

    Args:
        chip: The GPU.
        numbers: Numbers that are read.
        step: Bytes from the number of a thread to that of the next one.
        width: Threads of a result.
        results: Results.
        between: Results until the neighbours of a number are wanted: a block of threads that computes so many reads
            them with it.  Where the GPU does not compute so many at once, and the cache does not hold what they read,
            each number is read from memory for itself.
    """
    form: dict[str, float] = read_yaml("efficiency.yaml")["reduction_apart"]
    read = numbers * min(step, form["sector_bytes"])
    shared = min(max(_BLOCK_THREADS / width / between, 1.0), form["most_shared"])
    seconds = read / (form["bytes_of_cycle"] * chip.issue_rate * (1 + form["shared"] * (shared - 1)))
    at_once = chip.multiprocessors * _RESIDENT / width
    if between > at_once and read / results * between > chip.l2_bytes * form["cached"]:
        seconds = max(seconds, read * form["fetched"] / (chip.bandwidth * form["bandwidth"]))
    cycles = read_yaml("efficiency.yaml")["reduction_along_short_rows"]["thread_cycles"]
    working = results * width * cycles / chip.issue_rate
    return float(form["start_seconds"] + max(seconds, working))


def _power_of_two(number: int) -> int:
    """Return the largest power of two up to a number."""
    return 1 << (max(number, 1).bit_length() - 1)


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


_WHOLE_TARGETS = 450
"""Time steps, samples and classes, weighted, from which on ``_ctc_loss_backward`` collects gradients by places
(``is_large`` in aten/src/ATen/native/cuda/LossCTC.cu)."""

_TILE, _THREADS = 16, 512
"""Numbers of the last dimension that a block of weight norm takes, and its threads."""


def scan(call: Call, chip: Chip) -> KernelWork:
    """Return the work of a cumulative sum, product, extremum or logarithm of sums.

    Along the last dimension a block of threads takes rows; along others a thread takes a column and goes from one
    number to the next (``scan_dim`` in aten/src/ATen/native/cuda/ScanUtils.cuh).
    """
    source = call.inputs[0]
    if len(source.shape) < 2 or not source.elements:
        return sorted_values(call, chip)
    dim = int(number(call, "dim", "-1")) % len(source.shape)
    steps, beside = source.shape[dim], prod(source.shape[dim + 1 :])
    form: dict[str, float] = read_yaml("efficiency.yaml")["scan"]
    work = memory_bound(f"scan.{'rows' if beside == 1 else 'columns'}.{name_of(call)}", chip, call)
    if beside == 1:
        cycles = form["logarithm_cycles" if name_of(call) == "logcumsumexp" else "number_cycles"]
        seconds = source.elements * cycles / chip.issue_rate
    else:
        seconds = steps * form["step_seconds"]
    return work._replace(
        seconds=form["start_seconds"] + max(seconds, work.bytes / (chip.bandwidth * form["bandwidth"]))
    )


def ctc(call: Call, chip: Chip) -> KernelWork:
    """Return the work of the loss of CTC, or of its gradient: threads for the places of a target take each time step.

    The gradient takes the steps back, and then collects the gradients of classes: for each place along the time steps,
    or, of short sequences, for each time step along the places and the classes.
    """
    backward = "backward" in call.name
    scores, targets = call.inputs[backward], call.inputs[1 + backward]
    steps, batch, classes = scores.shape
    longest = targets.shape[-1] if len(targets.shape) > 1 else targets.elements / batch
    places = 2 * longest + 1
    form: dict[str, float] = read_yaml("efficiency.yaml")["ctc"]
    seconds = form["start_seconds"] + steps * (form["step_seconds"] + form["root_seconds"] * sqrt(places))
    if backward and 2 * steps + 24 * batch / 10 + 2 * classes / 10 > _WHOLE_TARGETS:
        seconds += steps * form["collected_step"] + form["passes"] * scores.bytes / chip.bandwidth
    elif backward:
        seconds += places * form["collected_place"] + classes * form["collected_class"]
    work = memory_bound(f"ctc.{'backward' if backward else 'forward'}", chip, call, launches=26 if backward else 6)
    return work._replace(seconds=seconds)


def weight_norm(call: Call, chip: Chip) -> KernelWork:
    """Return the work of weight norm, or of its gradient.

    Along the last dimension, as positional convolutions of wav2vec 2.0 have it, a block walks over all rows of 16
    numbers, however few blocks that are (aten/src/ATen/native/cuda/WeightNorm.cu, ``*_last_dim_kernel``).
    """
    weight = call.inputs[0]
    dim = int(number(call, "dim", "0")) % len(weight.shape)
    if dim == 0 or dim < len(weight.shape) - 1:
        return normalisation(call, chip)
    way, last = "backward" if "backward" in call.name else "forward", weight.shape[-1]
    form: dict[str, float] = read_yaml("efficiency.yaml")["weight_norm"]
    steps = ceil(weight.elements / last * _TILE / _THREADS) * ceil(ceil(last / _TILE) / chip.multiprocessors)
    seconds = form["start_seconds"] + steps * form[f"{way}_step"]
    return memory_bound(f"weight norm.{way}", chip, call)._replace(seconds=seconds)
