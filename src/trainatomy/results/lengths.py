"""A training whose samples differ in length: its epochs, memory over their steps, and the spread of the step time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Batching = Literal["padded", "padded to the maximum", "packed", "joined"]


Unit = Literal["tokens", "audio samples", "pixels"]
"""What the length of a sample counts."""


SAMPLING_RATE = 16_000
"""Samples of a recording in a second, as the speech models of transformers hear them."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Median, 5th and 95th percentile, and the worst (largest) of several values."""

    median: float
    low: float
    high: float
    worst: float

    @classmethod
    def of(cls, values: list[float], weights: list[float] | None = None) -> Distribution:
        """Return the distribution of values that occur as often as their weights say."""
        pairs = sorted(zip(values, weights or [1.0] * len(values), strict=True))
        return cls(_quantile(pairs, 0.5), _quantile(pairs, 0.05), _quantile(pairs, 0.95), pairs[-1][0])


def _quantile(pairs: list[tuple[float, float]], share: float) -> float:
    """Return the smallest value that at least this share of the weight does not exceed."""
    wanted, so_far = share * sum(weight for _, weight in pairs), 0.0
    for value, weight in pairs:
        so_far += weight
        if so_far >= wanted * (1 - 1e-12):
            return value
    return pairs[-1][0]


@dataclass(frozen=True, slots=True)
class SampleLengths:
    """Number of samples in an epoch, and their lengths.

    Attributes:
        count: Number of samples.
        shortest: Tokens of the shortest one, after truncation and with those that stand for images; where recordings
            differ, samples of its recording; where images without text do, their pixels.
        mean: Mean of the same.
        longest: The same of the longest.
        unit: What is counted.
    """

    count: int
    shortest: int
    mean: float
    longest: int
    unit: Unit = "tokens"


@dataclass(frozen=True, slots=True)
class OrderPrediction:
    """One epoch: the samples in the order of a seed, as one GPU has them.

    Attributes:
        seed: Seed of the order.
        rank: The data-parallel rank that has them.
        steps: Numbers of the steps that were replayed, from 0: all of a short epoch; of a long one the first ones, then
            those that bring a longer batch than any before, each with the step before it.
        longest: Tokens of the longest row of each of these steps.
        allocated_bytes: Highest allocated memory during each of these steps.
        reserved_bytes: Reserved memory at the end of each of these steps, on a GPU of any size.
        peak_allocated_bytes: The most that is allocated.
        peak_reserved_bytes: The most that is reserved on this GPU, or else on one that is large enough.
        num_alloc_retries: Times that the allocator released its cache to serve a request.
        fits: Whether the epoch never runs out of memory.
    """

    seed: int
    steps: tuple[int, ...]
    longest: tuple[int, ...]
    allocated_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    num_alloc_retries: int
    fits: bool
    rank: int = 0


@dataclass(frozen=True, slots=True)
class FullestBatch:
    """The batch of an order that computes the most tokens, with padding; the first one of several.

    Attributes:
        step: Number of its optimizer step, from 0.
        rows: Rows of it.
        row_tokens: Tokens of each row, with padding.
        samples: Tokens of each of its samples, longest first.
        images: Height and width of the images of each of its samples, largest first, where they differ.
        image_size: Height and width to which images are padded, if they are.
    """

    step: int
    rows: int
    row_tokens: int
    samples: tuple[int, ...]
    images: tuple[tuple[int, int], ...] = ()
    image_size: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class LengthsPrediction:
    """Epochs of samples that differ in length.

    ``Prediction.memory`` is that of the order with the highest reserved memory (``worst_seed``), ``Prediction.time``
    that of the mean step.

    Attributes:
        samples: The samples of an epoch.
        batching: What makes rows of equal length: padding to the longest of a batch or to the maximum, packs of one
            length, or joining a batch in one row.
        sampling: Order of samples, as `train_sampling_strategy`.
        steps: Optimizer steps of an epoch; a last one that is not full is left out.
        shapes: Shapes of batches that occur in the orders.
        executed_shapes: Shapes that were executed; the next longer one stands for each of the others.
        orders: The orders of samples; none where all batches have one length.
        worst_seed: Seed of the order that ``Prediction.memory`` is of; None where all batches have one length.
        worst_rank: Rank that it is of.
        waiting_share: Share of the time of a step in which a rank waits for the one with the longest batch, in the mean
            of ranks and steps; 0 on one GPU.
        peak_allocated_bytes: Distribution over the orders; None where all batches have one length.
        peak_reserved_bytes: Distribution over the orders; None where all batches have one length.
        step_seconds: Distribution over steps; None if no time was predicted or all batches have one length.
        tokens_per_step: Mean tokens of the samples in a step.
        padded_tokens_per_step: Mean tokens that a step computes, with those of the padding.
        padding_share: Share of them that are padding.
        tokens_per_second: Tokens of samples per second; None if no time was predicted.
        padded_tokens_per_second: The same with padding.
        new_shape_seconds: What a step takes longer whose shapes have not occurred before, in the mean of the executed
            shapes; not part of ``step_seconds``.  None if no time was predicted.
        fullest: The fullest batch of the order that memory is of; None where all batches have one length.
        new_shapes: Shapes that occur in an epoch, in the mean of the orders; None where all batches have one length.
    """

    samples: SampleLengths
    batching: Batching
    sampling: str
    steps: int
    shapes: int
    executed_shapes: int
    orders: tuple[OrderPrediction, ...]
    worst_seed: int | None
    peak_allocated_bytes: Distribution | None
    peak_reserved_bytes: Distribution | None
    step_seconds: Distribution | None
    tokens_per_step: float
    padded_tokens_per_step: float
    padding_share: float
    tokens_per_second: float | None
    padded_tokens_per_second: float | None
    new_shape_seconds: float | None = None
    new_shapes: float | None = None
    worst_rank: int = 0
    fullest: FullestBatch | None = None
    waiting_share: float = 0.0

    @property
    def is_sampled(self) -> bool:
        """Whether only a part of a long epoch's steps was replayed."""
        return any(len(order.steps) < self.steps for order in self.orders)
