"""PyTorch's own batch norm, channels-first: the kernels that run in bfloat16, for which cuDNN has none.

The statistics, and the whole gradient, are computed by one block of 512 threads for each channel. A thread walks over
its share of the channel, one number after the other, and each of them waits for memory; a multiprocessor that holds
several blocks is bound by their arithmetic instead (running means divide), and four is the most that it holds. The
result is written by many small blocks, each of which has to start.

Source: aten/src/ATen/native/cuda/Normalization.cuh, torch 2.11. Constants: ``catalog/efficiency.yaml``.
"""

from __future__ import annotations

from math import ceil, prod
from typing import Any, NamedTuple

from trainatomy.operators.cost.kernel import Chip
from trainatomy.results.operations import Array

_SIZES = (32, 64, 128, 256, 512)
_THREADS, _HELD, _MOST_HELD = 2048, 4, 32
"""Threads that a multiprocessor holds, and its blocks of 512 and of fewer threads."""
_LEAST_THREADS, _MOST_BLOCKS = 64, 256 * 1024
"""Threads of a block that writes the result, and how many such blocks there are at most."""


class Blocks(NamedTuple):
    """The division of a channel among the threads of its block.

    Attributes:
        turns: Numbers that a thread walks over.
        rounds: Times that the multiprocessors have to be filled with blocks.
        last: Blocks of a multiprocessor in the last round.
    """

    turns: int
    rounds: int
    last: int


def statistics_seconds(x: Array, backward: bool, chip: Chip, form: dict[str, Any]) -> float:
    """Return the time of the kernel with a block for each channel: the statistics, or the whole gradient."""
    blocks = blocks_of(x, chip)
    read = (3 if backward else 2) * x.bytes
    least, span = form["missed"]
    missed = min(max((read / chip.l2_bytes - least) / span, 0.0), 1.0)
    waiting = form["cached"] + (form["from_memory"] - form["cached"]) * missed
    full, rest = (
        form["block_seconds"] + blocks.turns * max(waiting, held * form["crowded"]) for held in (_HELD, blocks.last)
    )
    moved = (3 + 2 * missed if backward else 1) * x.bytes
    further = full - form["first_seconds"]  # the next blocks start while others still run
    return float(max((blocks.rounds - 1) * further + rest, moved / (chip.bandwidth * form["bandwidth"])))


def result_seconds(x: Array, chip: Chip, form: dict[str, Any]) -> float:
    """Return the time of the kernel that writes the result of a forward."""
    batch, channels, places = x.shape[0], x.shape[1], prod(x.shape[2:])
    threads = max(_threads(places // 4), min(_threads(places), _LEAST_THREADS))
    samples = max(_LEAST_THREADS // threads, 1)
    rows = max(1, min(_MOST_BLOCKS // channels, ceil(batch / samples)))
    turns = ceil(batch / (rows * samples)) * ceil(places / threads)
    held = min(_MOST_HELD, _THREADS // (threads * samples)) * chip.multiprocessors
    waves = max(1.0, channels * rows / held)
    working = waves * (form["result_block_seconds"] + turns * form["result_seconds"])
    return float(max(working, 2 * x.bytes / (chip.bandwidth * form["result_bandwidth"])))


def blocks_of(x: Array, chip: Chip) -> Blocks:
    """Return how the numbers of a channel are divided."""
    batch, channels, places = x.shape[0], x.shape[1], prod(x.shape[2:])
    threads = _threads(places)
    turns = ceil(batch / max(_SIZES[-1] // threads, 1)) * ceil(places / threads)
    rounds = ceil(channels / (chip.multiprocessors * _HELD))
    left = channels - (rounds - 1) * chip.multiprocessors * _HELD
    return Blocks(turns, rounds, ceil(left / chip.multiprocessors))


def _threads(places: int) -> int:
    return next((size for size in _SIZES if places <= size), _SIZES[-1])
