"""Rows by index: gathers, scatters, losses by class; zeros with a part written; sorts.

Embeddings and bags of them: rows of a table that tokens pick, and gradients that are added to these rows.

Constants and their source: ``catalog/efficiency.yaml``.
"""

from __future__ import annotations

from math import ceil, expm1, hypot, log, log2, prod, sqrt
from typing import Any

from trainatomy.catalog.files import read_yaml
from trainatomy.operators.cost.elementwise import (
    contiguous_seconds,
    copied_seconds,
    is_uneven,
    memory_bound,
    written_seconds,
)
from trainatomy.operators.cost.kernel import (
    NOTHING,
    Chip,
    KernelWork,
    efficiency_of,
    name_of,
    number,
    on_gpu,
    passes_to,
)
from trainatomy.operators.traffic import in_memory, traffic
from trainatomy.results.operations import CHOSEN_ROWS, SAME_ROW, Array, Call

_FILL_SECONDS = 8.0e-7
"""Start of a kernel that fills."""
_IMAGE_BYTES = 72.0
"""Traffic of a place of an image: its class, and the sectors that hold its score, which neighbours of another class do
not share."""
_SECTOR_BYTES = 64
"""Traffic of writing one element of a row."""


def gathered(call: Call, chip: Chip) -> KernelWork:
    """Return the work of ``index``, ``gather``, ``index_select``: rows and indices read, rows written.

    ``index`` picks whole rows of a multiple of 16 bytes, whose numbers lie side by side, by a block for each, as an
    embedding; else each number of the result by arithmetic (aten/src/ATen/native/cuda/IndexKernel.cu and
    IndexKernelUtils.h, ``fast_gather_kernel_eligible``).  What ``index_select`` takes to pick numbers along another
    dimension says nothing about rows.
    """
    if not traffic(call).written:
        return NOTHING
    work = memory_bound(f"table.{name_of(call)}", chip, call)
    if name_of(call) == "index_select" and number(call, "dim", "0") == "0" and _has_whole_rows(call.inputs[0]):
        return work._replace(family="table.rows_selected")
    indices = [array for array in call.inputs[1:] if array.dtype.startswith("int")]
    if name_of(call) != "index" or not indices or len(indices) < len(call.inputs) - 1:
        return work
    target, result = call.inputs[0], call.outputs[0]
    moving = work.bytes / (chip.bandwidth * 0.9)
    if _has_whole_rows(target) and _first_indexed(call, indices, result) == 0 and len(indices) == 1:
        picking = indices[0].elements * float(row_form()["row_seconds"]) / chip.multiprocessors
        return work._replace(family="table.index.rows", seconds=1.2e-6 + max(moving, picking))
    form = row_form()["picked"]
    working = result.elements * form["number_seconds"] / chip.multiprocessors
    return work._replace(family="table.index.numbers", seconds=float(form["start_seconds"] + max(moving, working)))


def _has_whole_rows(target: Array) -> bool:
    """Return whether rows are of a multiple of 16 bytes, and their numbers side by side in memory."""
    if prod(target.shape[1:]) * target.itemsize % ROW_BYTES:
        return False
    expected = 1
    for size, stride in zip(reversed(target.shape[1:]), reversed(target.strides[1:]), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _first_indexed(call: Call, indices: list[Array], values: Array) -> int:
    """Return the first dimension of the target that is indexed, as the call says, or else by the shapes of values."""
    target = call.inputs[0]
    if text := number(call, "indices"):
        given = [part == "*" for part in text.split(", ")]
        return given.index(True) if True in given else 0
    shape = max((array.shape for array in indices), key=len)
    for first in range(len(target.shape) - len(indices) + 1):
        if values.shape == (*target.shape[:first], *shape, *target.shape[first + len(indices) :]):
            return first
    return 0


def scattered(call: Call, chip: Chip) -> KernelWork:
    """Return the work of ``index_put``, ``scatter``, ``index_add``.

    Values and indices are read, and the rows that they hit read and written; the target is copied first where the
    operator is not in place.
    """
    tensors = on_gpu(call.inputs)
    if not tensors:
        return NOTHING
    target, others = tensors[0], tensors[1:]
    rows = 2 * max((t.bytes for t in others), default=0)
    copied = 0 if call.written else 2 * target.bytes
    passes_moved = sum(in_memory(t) for t in others) + rows + copied
    passes = passes_to(call, passes_moved, "rows that are hit instead of the whole target")
    family, launches = f"table.{name_of(call)}", 1 + (not call.written)
    if number(call, "accumulate") != "True":
        work = memory_bound(family, chip, call, launches=launches, passes=passes)
        if name_of(call).startswith("index_add"):
            return work._replace(seconds=_added_seconds(chip, max(t.elements for t in others), rows, copied))
        return work
    work = memory_bound("table.accumulated", chip, call, launches=launches + 20, passes=passes)
    seconds, beside = _accumulated_seconds(chip, call)
    return work._replace(seconds=seconds + copied / (chip.bandwidth * 0.9), beside=beside)


def _added_seconds(chip: Chip, numbers: int, moved: float, copied: float) -> float:
    """Return the time of ``index_add``: a thread computes where each number goes and adds it there atomically.

    Args:
        chip: The GPU.
        numbers: Numbers that are added.
        moved: Bytes of reading them and adding them to the result.
        copied: Bytes of copying the target first.
    """
    form: dict[str, float] = row_form()["added"]
    working = numbers * form["number_cycles"] / chip.issue_rate
    seconds = form["start_seconds"] + max(working, moved / (chip.bandwidth * 0.9))
    return seconds + (form["copy_seconds"] + copied / (chip.bandwidth * 0.9)) * bool(copied)


def _accumulated_seconds(chip: Chip, call: Call) -> tuple[float, float]:
    """Return the time of adding values where indices may repeat, and how much longer the row with the most takes.

    The positions are computed and sorted; then a warp takes each of them, for 128 neighbouring numbers, and again for
    each row before the indexed dimensions (``index_put_with_sort_kernel`` in aten/src/ATen/native/cuda/Indexing.cu).
    Where the same index occurs again, the warp reads, adds and writes the row once more (``indexing_backward_kernel``);
    of at most 32 numbers it adds all of them before it writes.
    """
    form, target = row_form()["accumulated"], call.inputs[0]
    indices = [array for array in call.inputs[1:-1] if array.dtype.startswith("int")]
    if indices:
        first = _first_indexed(call, indices, call.inputs[-1])
        given = [part == "*" for part in number(call, "indices", "*").split(", ")]
        beside = all(given[first : first + len(indices)])
        before = prod(target.shape[:first]) if beside else 1
        positions = max(array.elements for array in indices)
    else:  # a mask is the positions where it is true, as many as there are rows of values
        masked = sum(len(array.shape) for array in call.inputs[1:-1])
        before, positions = 1, call.inputs[-1].elements // max(prod(target.shape[masked:]), 1)
    values = max(call.inputs[-1].elements, before * positions)
    tasks = before * positions * ceil(values / (before * max(positions, 1)) / 128)
    sorting = form["one_tile_seconds"] if positions <= row_form()["one_tile"] else form["sort_seconds"]
    adding = tasks * form["task_seconds"] / chip.multiprocessors
    width = values // (before * max(positions, 1))
    in_turn = 0.0
    if width > WARP:
        rows = max(target.elements // max(before * width, 1), 1)
        in_turn = _repeats(call, positions, rows) * form["repeat_seconds"]
    return float(sorting + adding), max(0.0, float(in_turn - adding))


def _repeats(call: Call, positions: int, rows: int) -> float:
    """Return how often the index that occurs most often does: of random ones, or of what an untrained router chose."""
    if SAME_ROW in call.numbers:
        return positions
    most = most_of_one_row(positions, rows)
    return max(most, positions / sqrt(2 * rows)) if CHOSEN_ROWS in call.numbers else most


def part_of_zeros(call: Call, chip: Chip) -> KernelWork:
    """Return the work of ``slice_backward``, ``select_backward``, ``constant_pad_nd``: a fill, then a part written.

    A pad of nothing is a copy.
    """
    part, out = call.inputs[0], call.outputs[0]
    if part.shape == out.shape and part.is_contiguous:
        if is_uneven(out.bytes):
            return memory_bound("copied.uneven", chip, call)._replace(seconds=copied_seconds(chip, out.bytes))
        return memory_bound(f"traffic.plain.{8 * out.itemsize}.clone", chip, call)
    if part.bytes >= out.bytes:  # a pad below zero: only the copy of what is left
        passes = passes_to(call, 2 * out.bytes, "the part that is left, without the rest")
        return memory_bound("table.part_left", chip, call, passes=passes)
    wide = part.bytes * 8 > out.bytes
    family = f"table.part_of_zeros.{'wide' if wide else 'narrow'}"
    passes = passes_to(call, out.bytes + 2 * part.bytes, "the part written after the fill")
    work = memory_bound(family, chip, call, launches=2, passes=passes)
    filling = _FILL_SECONDS + out.bytes / (chip.bandwidth * 0.9)
    return work._replace(seconds=filling + written_seconds(chip, part, _place_of_part(call)))


def _place_of_part(call: Call) -> Array:
    """Return the part of the result that is written, as a view of it."""
    part, out = call.inputs[0], call.outputs[0]
    strides, dimension = list(out.strides), int(number(call, "dim", "0"))
    if len(part.shape) < len(out.shape):
        del strides[dimension]
    elif step := number(call, "step"):
        strides[dimension] *= int(step)
    return out._replace(shape=part.shape, strides=tuple(strides))


def negative_log_likelihood(call: Call, chip: Chip) -> KernelWork:
    """Return the work of the loss: one block of threads over the rows; backward fills and writes one number a row.

    Of images it is many blocks (aten/src/ATen/native/cuda/NLLLoss2d.cu), which traffic bounds.
    """
    rows = max(call.inputs[2 if "backward" in call.name else 1].elements, 1)  # a target for each, of pixels too
    if "backward" in call.name:
        passes = passes_to(call, call.outputs[0].bytes + rows * _SECTOR_BYTES, "a memory sector for each row")
        return memory_bound("table.nll_loss_backward", chip, call, launches=2, passes=passes)
    if "2d" in call.name:
        passes = passes_to(call, rows * _IMAGE_BYTES, "a memory sector for each place")
        return memory_bound("table.nll_loss2d_forward", chip, call, passes=passes)
    moved = rows * 40.0
    passes = passes_to(call, moved, "a memory sector for each row")
    seconds = 3e-6 + rows * 1.2e-8
    return KernelWork("table.nll_loss_forward", (log2(rows),), bytes=moved, seconds=seconds, passes=passes)


def sorted_values(call: Call, chip: Chip) -> KernelWork:
    """Return the work of a radix sort (a histogram and eight passes for each 8 bytes of a key), ``topk`` or a scan."""
    source = call.inputs[0]
    sorts = name_of(call) in ("sort", "argsort")
    digits = 2 * source.itemsize if sorts else 3
    further = (ceil(digits / 2) - 1) * traffic(call).bytes
    passes = (("further passes over the keys", further),) if further else ()
    return memory_bound(f"sort.{name_of(call)}", chip, call, launches=digits + 2 if sorts else 2, passes=passes)


_SMALL_EMBEDDING = 3072
"""Most tokens for which embedding's backward is one kernel without a sort (aten/src/ATen/native/cuda/Embedding.cu)."""
_SAME_ROW_SECONDS = 3.6e-8
"""Further time per token in that kernel, which adds tokens of the same row one after the other; measured on an H200 in
a BERT, where all tokens share a table of two token types."""
ROW_BYTES = 16
"""Rows of a multiple of this many bytes are picked whole."""
WARP, _SUM_BYTES = 32, 4
"""Threads of a warp, each of which adds up a number of a row; bytes of its sum."""
_BLOCK_THREADS = 1024
"""Most threads of a block."""
_PARTIAL_ROWS = 10
"""Tokens of a row that embedding's backward adds into one partial sum (``NROWS_PER_THREAD``)."""
_FUSED_BLOCKS, _FUSED_SHARE = 4, 4
"""Partial sums are added atomically below as many blocks per multiprocessor (``MAX_ATOMIC_ACCUM_BLOCKS_PER_SM``), and
where there are more than as many of them for each block."""


def embedding(call: Call, chip: Chip) -> KernelWork:
    """Return the work of writing rows, a block of threads for each; a row that is picked again is in the cache.

    Rows of no multiple of 16 bytes are picked number by number (``index_select``).
    """
    table, indices = call.inputs[0], call.inputs[-1]
    rows, width = max(table.shape[0], 1), table.shape[-1] * table.itemsize
    again = (indices.elements + rows * expm1(-indices.elements / rows)) * width
    repeated = indices.bytes - in_memory(indices)
    passes = tuple(each for each in (("broadcast indices", repeated), ("rows picked again", -again)) if each[1])
    copying = contiguous_seconds(chip, indices) if repeated else 0.0
    if width % ROW_BYTES:
        work, form = memory_bound("table.embedding_by_number", chip, call, passes=passes), row_form()["by_number"]
        seconds = form["start_seconds"] + work.bytes / (chip.bandwidth * form["bandwidth"])
        return work._replace(seconds=seconds, beside=copying)
    work = memory_bound("table.embedding", chip, call, passes=passes)
    reach = efficiency_of("table.embedding")
    moving = reach.kernel_seconds + work.bytes / (chip.bandwidth * reach.share)
    picking = indices.elements * float(row_form()["row_seconds"]) / chip.multiprocessors
    return work._replace(seconds=max(moving, 1.2e-6 + picking), beside=copying)


def embedding_backward(call: Call, chip: Chip) -> KernelWork:
    """Return the work of zeros for the whole table and rows added, with a sort of the tokens where there are many.

    A gradient and indices that are not contiguous are copied first.
    """
    gradient, ids = call.inputs[:2]
    copies = [tensor for tensor in (gradient, ids) if not tensor.is_contiguous]
    copying = sum(contiguous_seconds(chip, tensor) for tensor in copies)
    work = _sorted_rows(call, chip, ids.elements, "") if ids.elements > _SMALL_EMBEDDING else _few_rows(call, chip)
    return work._replace(beside=work.beside + copying, launches=work.launches + len(copies))


def _few_rows(call: Call, chip: Chip) -> KernelWork:
    """Return the work of one kernel that adds the rows of tokens one after the other."""
    gradient, ids = call.inputs[:2]
    moved = call.outputs[0].bytes + 2 * gradient.bytes
    passes = passes_to(call, moved, "rows added to the table, without the indices")
    family = "table.embedding_backward.direct"
    rows = max(call.outputs[0].shape[0], 1)
    features = (log2(max(ids.elements, 1)), log2(rows) / 2)
    work = memory_bound(family, chip, call, *features, launches=2, passes=passes)
    efficiency = efficiency_of(family)
    sharing = 1.0 if SAME_ROW in call.numbers else min(1.0, 2 / rows)
    in_turn = ids.elements * (float(row_form()["token_seconds"]) + _SAME_ROW_SECONDS * sharing)
    moving = moved / (chip.bandwidth * efficiency.share)
    return work._replace(seconds=efficiency.kernel_seconds + moving + in_turn)


def row_form() -> dict[str, Any]:
    """Return the constants of kernels that pick rows or add to them."""
    form: dict[str, Any] = read_yaml("efficiency.yaml")["embedding"]
    return form


def _sorted_rows(call: Call, chip: Chip, tokens: int, bags: str) -> KernelWork:
    """Return the work of sorting tokens and adding a gradient for each of them to the table.

    Tokens of the same row are added by the same threads, so that distinct rows bound it: as many as random tokens hit.
    Besides, one thread goes through the partial sums of a row, see ``_in_turn``.
    """
    form, table = row_form(), call.outputs[0]
    entries, width = max(table.shape[0], 1), table.shape[-1]
    moved = table.bytes + 2 * tokens * width * table.itemsize
    passes = passes_to(call, moved, "zeros of the table, and a row for each index")
    one_tile = tokens <= form["one_tile"]
    hit = 1.0 if SAME_ROW in call.numbers else entries * -expm1(-tokens / entries)
    warps = hit * ceil(width / WARP)
    adding = (hit * form["segment_seconds"] + warps * form["segment_warp_seconds"]) / chip.multiprocessors
    adding += warps * WARP * _SUM_BYTES / (chip.bandwidth * form["segment_bandwidth"])
    adding += tokens * width * table.itemsize / (chip.bandwidth * 0.9)
    sorting = form["one_tile_seconds"] if one_tile else form["sort_seconds"] + tokens * form["sorted_token_seconds"]
    filling = 2e-6 + table.bytes / (chip.bandwidth * 0.9)
    reading = 2 * tokens * width * table.itemsize / (chip.bandwidth * 0.9)
    seconds = sorting + filling + (max(adding, reading) if one_tile else adding)
    family = f"table.embedding_backward.{'tile' if one_tile else 'sorted'}{bags}"
    features = (log2(max(tokens, 1)), log2(entries) / 2, log2(width) / 2)
    launches = 12 if one_tile else 31
    beside = _in_turn(call, chip, tokens, is_bag=bool(bags))
    return KernelWork(family, features, bytes=moved, launches=launches, seconds=seconds, passes=passes, beside=beside)


def _in_turn(call: Call, chip: Chip, tokens: int, *, is_bag: bool) -> float:
    """Return how long a thread goes from one partial sum of ten tokens to the next, for the row with the most tokens.

    It notes where each of them begins, and adds them up (``sum_and_scatter``) unless there are few blocks for many
    partial sums: then threads add theirs atomically, and another kernel notes the row of each
    (aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu, ``use_fused_kernel``, as of torch 2.11).
    """
    turns, table = row_form()["partial_sums"], call.outputs[0]
    entries, width = max(table.shape[0], 1), table.shape[-1]
    fullest = tokens if SAME_ROW in call.numbers else most_of_one_row(tokens, entries)
    rows, warped = min(tokens, entries), ceil(width / WARP) * WARP
    blocks = ceil(rows * warped / min(warped, _BLOCK_THREADS))
    fused = not is_bag and blocks < _FUSED_BLOCKS * chip.multiprocessors
    fused = fused and tokens // _PARTIAL_ROWS + rows > _FUSED_SHARE * blocks
    further = max(ceil(fullest / _PARTIAL_ROWS) - 1, 0)
    return float(further * (turns["noted_seconds"] + turns["noted_seconds" if fused else "added_seconds"]))


def most_of_one_row(indices: float, rows: int) -> float:
    """Return how many of random indices fall on the row that has the most of them."""
    mean = indices / rows
    return min(indices, mean + sqrt(2 * mean * log(rows)))


def embedding_bag(call: Call, chip: Chip) -> KernelWork:
    """Return the work of reading a row for each index and adding those of a bag one after the other.

    A warp adds 32 numbers of a bag's result (aten/src/ATen/native/cuda/EmbeddingBag.cu).
    """
    table, ids = call.inputs[:2]
    form, width = row_form(), table.shape[1] * table.itemsize
    moved = ids.elements * width + 2 * ids.bytes + call.outputs[0].bytes
    passes = passes_to(call, moved, "rows that are picked instead of the whole table")
    parts, bags = ceil(table.shape[1] / 32), max(call.outputs[0].shape[0], 1)
    working = parts * (bags * form["bag_seconds"] + ids.elements * form["read_seconds"]) / chip.multiprocessors
    in_turn = ids.elements / bags * form["waiting_seconds"]
    seconds = 1.7e-6 + hypot(working, in_turn)
    features = (log2(max(moved, 1) / chip.l2_bytes), log2(max(width, 1)) / 2, log2(max(ids.elements / bags, 1)))
    return KernelWork("table.embedding_bag", features, bytes=moved, launches=1, seconds=seconds, passes=passes)


def embedding_bag_backward(call: Call, chip: Chip) -> KernelWork:
    """Return the work of sorting the indices and adding a gradient of its bag for each of them to the table.

    These are the kernels of embedding's backward (aten/src/ATen/native/cuda/EmbeddingBag.cu,
    ``embedding_bag_backward_cuda_sum_avg``); a maximum has one index for each number of a bag, and no sort.
    """
    gradient, ids, table = call.inputs[0], call.inputs[1], call.outputs[0]
    if number(call, "mode", "0") == "2":
        passes = passes_to(call, table.bytes + 2 * gradient.bytes, "rows added to the table")
        return memory_bound("table.embedding_bag_backward", chip, call, launches=2, passes=passes)
    return _sorted_rows(call, chip, ids.elements, ".bags")
