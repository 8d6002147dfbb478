"""The batches of an epoch whose samples differ in length: draws lengths, orders samples, pads or joins batches.

The orders are those of the Trainer: PyTorch's ``RandomSampler``, the samples in sequence, or transformers'
``LengthGroupedSampler``, each with a seed.  A batch or a step that is not full at the end of an epoch is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import torch

from trainatomy.errors import WorkloadError

if TYPE_CHECKING:
    from trainatomy.workload.data import DataSpec
    from trainatomy.workload.lengths import LengthsSpec
    from trainatomy.workload.schema import Workload


MOST_TOKENS = 2**20
"""Bound of what a distribution without a maximum draws."""


class BatchShape(NamedTuple):
    """What a step depends on: rows and tokens of each row, and whether rows are padded (joined: of several samples)."""

    rows: int
    length: int
    is_mixed: bool


@dataclass(frozen=True, slots=True)
class LengthBatch:
    """A batch: the tokens of each of its samples, and the length that they are padded to.

    ``is_joined``: the samples lie behind each other in one row.
    """

    lengths: tuple[int, ...]
    padded: int
    is_joined: bool = False

    @property
    def shape(self) -> BatchShape:
        """Return what a step depends on."""
        if self.is_joined:
            return BatchShape(1, sum(self.lengths), len(self.lengths) > 1)
        return BatchShape(len(self.lengths), self.padded, min(self.lengths) < self.padded)

    @property
    def tokens(self) -> int:
        """Return the tokens of the samples."""
        return sum(self.lengths)

    @property
    def padded_tokens(self) -> int:
        """Return the tokens that the model computes, with those of the padding."""
        shape = self.shape
        return shape.rows * shape.length

    @classmethod
    def of(cls, shape: BatchShape, *, is_joined: bool) -> LengthBatch:
        """Return a batch of that shape."""
        rows, length, is_mixed = shape
        if is_joined:
            return cls((length - 1, 1) if is_mixed else (length,), length, is_joined=True)
        shorter = max(1, length // 2) if is_mixed else length
        return cls((length,) * (rows - 1) + (shorter,), length)


Step = tuple[LengthBatch, ...]
"""The batches of an optimizer step."""


@dataclass(frozen=True, slots=True)
class Order:
    """The steps of an epoch in the order that a seed gives."""

    seed: int
    steps: tuple[Step, ...]


def sample_lengths(data: DataSpec) -> list[int]:
    """Return the tokens of every sample, truncated to ``sequence_length``."""
    spec = data.lengths
    assert spec is not None
    drawn = _of_histogram(spec) if spec.histogram else _of_distribution(spec)
    limit = data.sequence_length
    return drawn if limit is None else [min(length, limit) for length in drawn]


def longest_row(data: DataSpec) -> int:
    """Return the tokens of the longest sample as it is padded."""
    return _padded(data, max(sample_lengths(data)))


def _padded(data: DataSpec, length: int) -> int:
    multiple = data.pad_to_multiple_of or 1
    return -(-length // multiple) * multiple


def _of_histogram(spec: LengthsSpec) -> list[int]:
    """Return the samples of a histogram, or as many as are wanted of them, drawn with replacement."""
    assert spec.histogram is not None
    every = [length for length, count in spec.histogram.items() for _ in range(count)]
    if spec.samples is None or spec.samples == len(every):
        return every
    return Random(spec.seed).choices(every, k=spec.samples)


def _of_distribution(spec: LengthsSpec) -> list[int]:
    """Return samples of a distribution; Python draws them, because PyTorch's default device may be meta."""
    draw, low, high = Random(spec.seed), spec.minimum or 1, spec.maximum or MOST_TOKENS
    if spec.distribution == "uniform":
        return [draw.randint(low, high) for _ in range(spec.count)]
    of = draw.normalvariate if spec.distribution == "normal" else draw.lognormvariate
    return [int(min(max(of(spec.mean or 0.0, spec.sigma or 0.0), low), high)) for _ in range(spec.count)]


def orders(workload: Workload, *, count: int | None = None) -> tuple[Order, ...]:
    """Return the orders of a workload's epoch, the first ``count`` of them.

    Raises:
        WorkloadError: The samples do not fill one step.
    """
    spec = workload.data.lengths
    assert spec is not None
    lengths = sample_lengths(workload.data)
    is_fixed = workload.train.train_sampling_strategy == "sequential"
    wanted = 1 if is_fixed else (count or spec.orders)
    return tuple(Order(seed, _steps(workload, lengths, seed)) for seed in range(spec.seed, spec.seed + wanted))


def _steps(workload: Workload, lengths: Sequence[int], seed: int) -> tuple[Step, ...]:
    size, accumulation = workload.batch_size, workload.train.gradient_accumulation_steps
    indices = iter(_indices(workload, lengths, seed))
    found: list[Step] = []
    while workload.steps is None or len(found) < workload.steps:
        batches = [list(islice(indices, size)) for _ in range(accumulation)]
        if len(batches[-1]) < size:
            break
        found.append(tuple(_batch(workload.data, [lengths[index] for index in batch]) for batch in batches))
    if not found:
        raise WorkloadError(
            f"data.lengths: {len(lengths)} samples do not fill one step of {size * accumulation}: give more `samples`",
            key="data.lengths",
        )
    return tuple(found)


def _indices(workload: Workload, lengths: Sequence[int], seed: int) -> Iterator[int]:
    """Return the indices of samples in the order in which the Trainer would take them."""
    from torch.utils.data import RandomSampler

    strategy = workload.train.train_sampling_strategy
    generator = torch.Generator().manual_seed(seed)
    if strategy == "sequential":
        return iter(range(len(lengths)))
    if strategy == "group_by_length":
        from transformers.trainer_pt_utils import LengthGroupedSampler

        group = workload.batch_size * workload.train.gradient_accumulation_steps
        return iter(LengthGroupedSampler(group, lengths=list(lengths), generator=generator))
    return iter(RandomSampler(range(len(lengths)), generator=generator))


def _batch(data: DataSpec, lengths: Sequence[int]) -> LengthBatch:
    """Return the batch of samples of these lengths."""
    if data.padding_free:
        return LengthBatch(tuple(lengths), sum(lengths), is_joined=True)
    return LengthBatch(tuple(lengths), _padded(data, max(lengths)))
