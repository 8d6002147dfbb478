"""The batches of an epoch whose samples differ in length: draws lengths, orders samples, pads or joins batches.

The orders are those of the Trainer: PyTorch's ``RandomSampler``, the samples in sequence, or transformers'
``LengthGroupedSampler``, each with a seed.  On several GPUs, the Trainer deals batches out to its ranks in turn
(accelerate's ``BatchSamplerShard``), a plain loop deals out samples (PyTorch's ``DistributedSampler``).  Where TRL
packs samples, they are shuffled first, with the same seed, and the packs are put in order.  A batch or a step that is
not full at the end of an epoch is left out.

Packs of samples, made by TRL's own function (``trl.pack_dataset``).

Epochs of several ranks whose batches differ in length: the ones that are replayed, and waits for the slowest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import RandomSampler

from trainatomy.errors import WorkloadError
from trainatomy.results.lengths import SAMPLING_RATE
from trainatomy.workload.batching import Batching, batching_of
from trainatomy.workload.lengths import Image, LengthsSpec, number_of, pixels_of
from trainatomy.workload.loops import LOOPS

if TYPE_CHECKING:
    from trainatomy.workload.schema import Workload


def packs(lengths: Sequence[int], size: int, strategy: str) -> list[tuple[int, ...]]:
    """Return the tokens of each document in each pack.

    Args:
        lengths: Tokens of each sample, in order.
        size: Tokens that a pack holds at most.
        strategy: TRL's ``packing_strategy``. With ``wrapped``, which ignores where samples end, a pack is one document.
    """
    from datasets import Dataset
    from trl import pack_dataset

    from trainatomy.training.trl import quiet_trl

    with quiet_trl():
        packed = pack_dataset(Dataset.from_dict({"input_ids": [[0] * length for length in lengths]}), size, strategy)
    if "seq_lengths" in packed.column_names:
        return [tuple(documents) for documents in packed["seq_lengths"]]
    return [(len(ids),) for ids in packed["input_ids"]]


MOST_TOKENS, MOST_SECONDS, MOST_PIXELS = 2**20, "3600s", 2**14
"""Bounds of what a distribution without a maximum draws; pixels are those of a side."""


class BatchShape(NamedTuple):
    """Shape of a step: rows and tokens of each row, and whether rows are padded (joined: of several samples).

    ``tokens`` are those of the samples, and ``documents`` the number of joined samples; both are 0 where the step does
    not depend on them (``Batching.prompt``).  Of samples with images, ``tokens`` are the pixels that encoders see, and
    ``samples`` says what each is, the largest first: its length, and what the processor makes of its image.  Images
    that are padded to one size have its pixels as length, and it as the only one of ``samples``.
    """

    rows: int
    length: int
    is_mixed: bool
    tokens: int = 0
    documents: int = 0
    samples: tuple[tuple[int, ...], ...] = ()

    @property
    def kind(self) -> tuple[int, bool]:
        """Return what shapes have in common that can stand for each other."""
        return self.rows, self.is_mixed

    @property
    def size(self) -> int:
        """Return the positions and the tokens that the step computes."""
        return self.rows * self.length + self.tokens

    def covers(self, other: BatchShape) -> bool:
        """Return whether a batch of this shape is at least as large as one of the other in every respect."""
        sides = (self.samples[0], other.samples[0]) if len(self.samples) == len(other.samples) == 1 else ((), ())
        pairs = ((self.length, other.length), (self.tokens, other.tokens), *zip(*sides, strict=True))
        return all(own >= theirs for own, theirs in pairs)


class Sample(NamedTuple):
    """A sample with images or a recording.

    Attributes:
        length: Tokens of its row, with those that stand for images; samples of its recording; or the pixels of an image
            without text.
        image: Height and width of its images before the model's processor.
        layout: What the processor makes of them (``Layout``).
        seen: Pixels that the encoder sees of them.
    """

    length: int
    image: Image | None = None
    layout: tuple[int, ...] = ()
    seen: int = 0


@dataclass(frozen=True, slots=True)
class LengthBatch:
    """A batch: the tokens of each of its samples, and the length that they are padded to.

    ``is_joined``: the samples lie behind each other in one row. ``is_counted``: the step depends on the number of their
    tokens. ``sequences``: sequences of each sample.  ``media``: the samples themselves, if they have images or
    recordings.  ``side``: height and width to which images without text are padded.
    """

    lengths: tuple[int, ...]
    padded: int
    is_joined: bool = False
    is_counted: bool = False
    sequences: int = 1
    media: tuple[Sample, ...] = ()
    side: Image | None = None

    @property
    def shape(self) -> BatchShape:
        """Return what a step depends on."""
        is_mixed = min(self.lengths) < self.padded
        if self.side is not None:
            return BatchShape(len(self.lengths), self.padded, is_mixed, samples=(self.side,))
        if any(sample.image for sample in self.media):
            samples = sorted(((sample.length, *sample.layout) for sample in self.media), reverse=True)
            seen = sum(sample.seen for sample in self.media)
            return BatchShape(len(self.lengths), self.padded, is_mixed, seen, samples=tuple(samples))
        count, tokens = len(self.lengths), sum(self.lengths) if self.is_counted else 0
        if self.is_joined:
            is_mixed = count > 1 or sum(self.lengths) < self.padded
            return BatchShape(1, self.padded, is_mixed, tokens, count if self.is_counted else 0)
        return BatchShape(count, self.padded, is_mixed, tokens)

    @property
    def tokens(self) -> int:
        """Return the tokens of the samples."""
        return self.sequences * sum(self.lengths)

    @property
    def padded_tokens(self) -> int:
        """Return the tokens that the model computes, with those of the padding."""
        shape = self.shape
        return self.sequences * shape.rows * shape.length

    @classmethod
    def of(cls, shape: BatchShape, batching: Batching) -> LengthBatch:
        """Return a batch of that shape."""
        return cls.made(_lengths_of(shape, batching), shape.length, batching)

    @classmethod
    def made(cls, lengths: Sequence[int], padded: int, batching: Batching) -> LengthBatch:
        """Return the batch of samples of these lengths."""
        is_counted = batching.prompt is not None
        return cls(tuple(lengths), padded, batching.is_joined, is_counted, batching.sequences)

    @classmethod
    def of_media(cls, samples: Sequence[Sample], batching: Batching) -> LengthBatch:
        """Return the batch of samples with images or recordings."""
        lengths = tuple(sample.length for sample in samples)
        images = [sample.image for sample in samples]
        if None not in images and all(sample.length == prod(sample.layout[:2]) for sample in samples):
            height, width = (max(sample.layout[place] for sample in samples) for place in (0, 1))
            return cls(lengths, height * width, media=tuple(samples), side=(height, width))
        return cls(lengths, batching.rounded_up(max(lengths)), is_counted=None in images, media=tuple(samples))


def _lengths_of(shape: BatchShape, batching: Batching) -> list[int]:
    """Return lengths of samples that make a batch of that shape."""
    rows, length, is_mixed, tokens, documents = shape[:5]
    if batching.prompt is None:
        if batching.is_joined:
            return [length - 1, 1] if is_mixed else [length]
        return [length] * (rows - 1) + [max(1, length // 2) if is_mixed else length]
    if batching.is_joined:
        return _shared(tokens, documents)
    longest = max(-(-tokens // rows), _fewest(length, batching))
    return [longest, *_shared(tokens - longest, rows - 1)]


def _shared(tokens: int, count: int) -> list[int]:
    """Return this many numbers that add up to ``tokens`` and differ by at most one."""
    return [tokens // count + (place < tokens % count) for place in range(count)]


def _fewest(padded: int, batching: Batching) -> int:
    """Return the fewest tokens that are padded to a length."""
    return padded - batching.multiple + 1


def fewest_tokens(rows: int, padded: int, batching: Batching) -> int:
    """Return the fewest tokens of samples in this many rows, the longest of which is padded to a length."""
    return _fewest(padded, batching) + (rows - 1) * ((batching.prompt or 0) + 1)


Step = tuple[LengthBatch, ...]
"""The batches of an optimizer step."""


@dataclass(frozen=True, slots=True)
class Order:
    """The steps of an epoch in the order that a seed gives, as one rank has them."""

    seed: int
    steps: tuple[Step, ...]
    rank: int = 0


def sample_lengths(workload: Workload) -> list[int]:
    """Return the tokens of every sample that is trained on, after truncation.

    Raises:
        WorkloadError: A sample has no token after its prompt, or all are left out for their length.
    """
    batching, prompt = batching_of(workload), workload.data.prompt_length
    found = drawn_lengths(workload)
    if batching.cut_to is not None:
        found = [min(length, batching.cut_to) for length in found]
    if batching.at_most is not None:
        found = [length for length in found if length <= batching.at_most]
    if not found:
        message = f"all samples are longer than trl.max_length, {batching.at_most}: TRL leaves them out"
        raise WorkloadError(f"data.lengths: {message}", key="data.lengths")
    if prompt is not None and min(found) <= prompt:
        message = f"{prompt} leaves nothing of the shortest sample of data.lengths, which has {min(found)} tokens"
        raise WorkloadError(f"data.prompt_length: {message}", key="data.prompt_length")
    return found


def drawn_lengths(workload: Workload) -> list[int]:
    """Return the tokens of every sample before truncation."""
    return [number_of(size) for size in drawn_sizes(workload)]


def drawn_sizes(workload: Workload) -> list[int | str]:
    """Return the size of every sample, as ``data.lengths`` writes it."""
    spec = workload.data.lengths
    assert spec is not None
    return _of_histogram(spec) if spec.histogram else _of_distribution(spec)


def longest_row(workload: Workload) -> int:
    """Return the tokens of the longest row as it is padded: of a sample, or of a pack that ignores where they end."""
    batching = batching_of(workload)
    if batching.packs == "wrapped":
        return batching.pack_length
    longest = max(sample_lengths(workload))
    return batching.rounded_up(min(longest, batching.pack_length) if batching.packs else longest)


def _of_histogram(spec: LengthsSpec) -> list[int | str]:
    """Return the samples of a histogram, or as many as are wanted of them, drawn with replacement."""
    assert spec.histogram is not None
    every = [length for length, count in spec.histogram.items() for _ in range(count)]
    if spec.samples is None or spec.samples == len(every):
        return every
    return Random(spec.seed).choices(every, k=spec.samples)


def _of_distribution(spec: LengthsSpec) -> list[int | str]:
    """Return samples of a distribution; Python draws them, because PyTorch's default device may be meta.

    Both sides of an image are drawn by themselves.
    """
    if spec.kind == "images":
        lows, highs = pixels_of(spec.minimum or "1x1"), pixels_of(spec.maximum or f"{MOST_PIXELS}x{MOST_PIXELS}")
        draw = Random(spec.seed)
        return [
            "x".join(str(round(_drawn(spec, draw, low, high))) for low, high in zip(lows, highs, strict=True))
            for _ in range(spec.count)
        ]
    draw, is_text = Random(spec.seed), spec.kind == "tokens"
    unit = 1 if is_text else SAMPLING_RATE
    low, high = number_of(spec.minimum or 1), number_of(spec.maximum or (MOST_TOKENS if is_text else MOST_SECONDS))
    if is_text:
        return [int(_drawn(spec, draw, low, high)) for _ in range(spec.count)]
    return [f"{_drawn(spec, draw, low / unit, high / unit):.3f}s" for _ in range(spec.count)]


def _drawn(spec: LengthsSpec, draw: Random, low: float, high: float) -> float:
    """Draw a number from a distribution within these limits."""
    if spec.distribution == "uniform":
        return draw.randint(int(low), int(high)) if spec.kind != "seconds" else draw.uniform(low, high)
    of = draw.normalvariate if spec.distribution == "normal" else draw.lognormvariate
    return min(max(of(spec.mean or 0.0, spec.sigma or 0.0), low), high)


def orders(
    workload: Workload, samples: Sequence[Sample] | None = None, *, count: int | None = None
) -> tuple[Order, ...]:
    """Return the orders of a workload's epoch, the first ``count`` of them, each for every data-parallel rank.

    Args:
        workload: Describes the samples.
        samples: The samples, if they have images or recordings.
        count: Number of orders.

    Raises:
        WorkloadError: The samples do not fill one step.
    """
    spec = workload.data.lengths
    assert spec is not None
    drawn = sample_lengths(workload) if samples is None else samples
    is_fixed = workload.train.train_sampling_strategy == "sequential"
    wanted = 1 if is_fixed else (count or spec.orders)
    return tuple(
        Order(seed, steps, rank)
        for seed in range(spec.seed, spec.seed + wanted)
        for rank, steps in enumerate(_steps_of_ranks(workload, drawn, seed))
    )


def _steps_of_ranks(workload: Workload, drawn: Sequence[int] | Sequence[Sample], seed: int) -> list[tuple[Step, ...]]:
    """Return the steps of each rank; a last one that does not fill all ranks is left out."""
    size, ranks = workload.batch_size, workload.parallel.data_parallel_size
    accumulation, batching = workload.train.gradient_accumulation_steps, batching_of(workload)
    rows = _rows(batching, drawn, seed)
    indices = list(_indices(workload, [row.length if isinstance(row, Sample) else sum(row) for row in rows], seed))
    count = len(indices) // (size * accumulation * ranks)
    count = count if workload.steps is None else min(count, workload.steps)
    if not count:
        what, needed = "packs" if batching.packs else "samples", size * accumulation * ranks
        raise WorkloadError(
            f"data.lengths: {len(rows)} {what} do not fill one step of {needed}: give more `samples`",
            key="data.lengths",
        )
    found = []
    for rank in range(ranks):
        dealt = iter(_dealt(indices, rank, ranks, size, by_batch=LOOPS[workload.loop].by_trainer))
        batches = [[rows[index] for index in islice(dealt, size)] for _ in range(count * accumulation)]
        made = [_batch(batching, each) for each in batches]
        found.append(tuple(tuple(made[place : place + accumulation]) for place in range(0, len(made), accumulation)))
    return found


def _dealt(indices: Sequence[int], rank: int, ranks: int, size: int, *, by_batch: bool) -> list[int]:
    """Return the samples of a rank: every n-th batch of the order, or every n-th sample."""
    if not by_batch:
        return list(indices[rank::ranks])
    return [
        index for start in range(rank * size, len(indices), ranks * size) for index in indices[start : start + size]
    ]


def _rows(batching: Batching, drawn: Sequence[Any], seed: int) -> list[Any]:
    """Return the documents of each row that is drawn: a sample, or those of a pack."""
    if batching.packs is None:
        return [each if isinstance(each, Sample) else (each,) for each in drawn]
    lengths: Sequence[int] = drawn
    return packs(Random(seed).sample(lengths, len(lengths)), batching.pack_length, batching.packs)


def _indices(workload: Workload, lengths: Sequence[int], seed: int) -> Iterator[int]:
    """Return the indices of samples in the order in which the Trainer would take them."""
    strategy = workload.train.train_sampling_strategy
    generator = torch.Generator().manual_seed(seed)
    if strategy == "sequential":
        return iter(range(len(lengths)))
    if strategy == "group_by_length":
        from transformers.trainer_pt_utils import LengthGroupedSampler

        group = workload.batch_size * workload.train.gradient_accumulation_steps
        return iter(LengthGroupedSampler(group, lengths=list(lengths), generator=generator))
    return iter(RandomSampler(range(len(lengths)), generator=generator))


def _batch(batching: Batching, rows: Sequence[Any]) -> LengthBatch:
    """Return the batch of rows of these documents, or of samples with images or recordings."""
    if isinstance(rows[0], Sample):
        return LengthBatch.of_media(rows, batching)
    documents = [length for row in rows for length in row]
    length = sum(documents) if batching.is_joined else max(map(sum, rows))
    return LengthBatch.made(documents, batching.rounded_up(length), batching)


MOST_ORDERS = 16
"""Orders, each of a rank, that are replayed; with more ranks, every n-th stands for the others."""


def replayed_orders(orders: Sequence[Order], wanted: Collection[int] = ()) -> list[Order]:
    """Return the orders whose memory is replayed: those of all ranks, or of every n-th rank and those ``wanted``."""
    ranks, seeds = max(order.rank for order in orders) + 1, len({order.seed for order in orders})
    apart = -(-ranks * seeds // max(MOST_ORDERS, seeds))
    return [order for order in orders if order.rank % apart == 0 or order.rank in wanted]


def slowest_batches(
    orders: Sequence[Order], cost: Callable[[BatchShape], float], *, waits_in_step: bool
) -> tuple[Order, ...]:
    """Return an order for each seed with the batches that decide how long its steps take.

    Ranks wait for the slowest one: with DDP at the end of a step, with FSDP in each micro-batch.

    Args:
        orders: The orders of all ranks.
        cost: How long a step takes whose batches have a shape.
        waits_in_step: Whether they wait in each micro-batch.
    """
    found = []
    for seed in dict.fromkeys(order.seed for order in orders):
        ranks = [order.steps for order in orders if order.seed == seed]
        steps = []
        for of_ranks in zip(*ranks, strict=True):
            if waits_in_step:
                micro = zip(*of_ranks, strict=True)
                steps.append(tuple(max(batches, key=lambda batch: cost(batch.shape)) for batches in micro))
            else:
                steps.append(max(of_ranks, key=lambda step: sum(cost(batch.shape) for batch in step)))
        found.append(Order(seed, tuple(steps)))
    return tuple(found)


def waiting_share(orders: Sequence[Order], slowest: Sequence[Order], cost: Callable[[BatchShape], float]) -> float:
    """Return the share of a step's time in which a rank waits for another, in the mean."""

    def spent(order: Order) -> float:
        return sum(cost(batch.shape) for step in order.steps for batch in step)

    return max(0.0, 1 - fmean(map(spent, orders)) / fmean(map(spent, slowest)))


def first_occurrences(orders: Sequence[Order]) -> float:
    """Return how often a shape occurs for the first time in an epoch, in the mean of the orders.

    What several ranks meet in the same micro-batch counts once, because they meet it side by side.
    """
    found = []
    for seed in dict.fromkeys(order.seed for order in orders):
        ranks = [order.steps for order in orders if order.seed == seed]
        known: list[set[tuple[object, ...]]] = [set() for _ in ranks]
        count = 0
        for of_ranks in zip(*ranks, strict=True):
            for batches in zip(*of_ranks, strict=True):
                shapes = [(*batch.shape[:3], batch.shape.samples) for batch in batches]
                count += any(shape not in before for shape, before in zip(shapes, known, strict=True))
                for shape, before in zip(shapes, known, strict=True):
                    before.add(shape)
        found.append(count)
    return fmean(found)
