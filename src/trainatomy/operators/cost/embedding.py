"""Embeddings and bags of them: rows of a table that tokens pick, and gradients that are added to these rows.

Constants and their source: ``catalog/efficiency.yaml``.
"""

from __future__ import annotations

from math import ceil, expm1, hypot, log, log2, sqrt
from typing import Any

from trainatomy.catalog.files import read_yaml
from trainatomy.operators.cost.elementwise import contiguous_seconds, memory_bound
from trainatomy.operators.cost.kernel import Chip, KernelWork, efficiency_of, number, passes_to
from trainatomy.operators.traffic import in_memory
from trainatomy.results.operations import SAME_ROW, Call

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
