"""Reductions across rows, or along rows that do not follow each other: PyTorch's blocks for them, and their time.

A thread adds the numbers of a few neighbouring columns, one row after the other.  The threads of a block share the rows
of their columns where there are many; where a thread would still have 256 rows, blocks share them too, and the last one
to finish adds up what the others found.  Source: ``setReduceConfig`` in aten/src/ATen/native/cuda/Reduce.cuh.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from trainatomy.catalog.files import read_yaml
from trainatomy.operators.cost.kernel import Chip

_THREADS, _WARP, _RESIDENT = 512, 32, 2048
"""Threads of a block at most, of a warp, and of a multiprocessor."""
_FEWEST, _MOST = 16, 256
"""Rows of a thread below which blocks do not share them, and from which on they do."""
_COLUMNS = 4
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
    at_once = next(each for each in (_COLUMNS, 2, 1) if width % each == 0)
    most, columns = _THREADS // at_once, max(columns // at_once, 1)
    across, down = min(_power_of_two(columns), most), min(_power_of_two(int(rows)), most)
    height = min(down, most // min(across, _WARP))
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
    across, down = min(_power_of_two(run), _THREADS), min(_power_of_two(results), _THREADS)
    height = min(down, _THREADS // min(across, _WARP))
    wide = min(across, _THREADS // height)
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
    threads = results * min(_power_of_two(int(rows)), _WARP)
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
    shared = min(max(_THREADS / width / between, 1.0), form["most_shared"])
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
