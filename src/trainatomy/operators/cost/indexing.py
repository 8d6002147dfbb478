"""Rows by index: gathers, scatters, losses by class; zeros with a part written; sorts."""

from __future__ import annotations

from math import ceil, log2, prod, sqrt

from trainatomy.operators.cost.elementwise import (
    copied_seconds,
    is_uneven,
    memory_bound,
    written_seconds,
)
from trainatomy.operators.cost.embedding import ROW_BYTES, WARP, most_of_one_row, row_form
from trainatomy.operators.cost.kernel import (
    NOTHING,
    Chip,
    KernelWork,
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
