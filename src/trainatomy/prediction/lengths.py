"""Predictions of trainings whose samples differ in length: their epochs, and the times of their steps.

Times of steps whose samples differ in length, from the time of a step with batches of each executed shape.

Assemble a ``Prediction`` of a training whose samples differ in length, from steps that were executed once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from statistics import fmean
from typing import TYPE_CHECKING

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.analysis.epochs import Room, replay_order, steps_to_replay, worst_of
from trainatomy.catalog.calibrations import Calibration
from trainatomy.errors import WorkloadError
from trainatomy.prediction.assemble import prediction_of, rank_prediction_of, time_of
from trainatomy.prediction.inputs import context_bytes
from trainatomy.requests.predicting import PredictRequest
from trainatomy.results.lengths import (
    Batching,
    Distribution,
    FullestBatch,
    LengthsPrediction,
    OrderPrediction,
    SampleLengths,
    Unit,
)
from trainatomy.results.prediction import Prediction
from trainatomy.results.time import Bound, Communication, Time
from trainatomy.timing.host_costs import first_call_seconds
from trainatomy.training.lengths import (
    BatchShape,
    Order,
    first_occurrences,
    replayed_orders,
    sample_lengths,
    slowest_batches,
    waiting_share,
)
from trainatomy.training.shape import samples_per_step
from trainatomy.workload.batching import batching_of
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from trainatomy.simulator.lengths import Epochs
    from trainatomy.simulator.simulation import Simulation


class EpochTimes:
    """Times of the steps of simulated epochs.

    Args:
        workload: The training that was simulated.
        epochs: Its steps and orders.
        calibration: See ``PredictRequest``.
        timed: False if no time is wanted; a batch then costs its size, where the costs of two are compared.

    Attributes:
        slowest: The orders of the batches that the ranks wait for.
    """

    def __init__(self, workload: Workload, epochs: Epochs, calibration: Calibration | None, *, timed: bool) -> None:
        self._workload = workload
        self._epochs = epochs
        # Without what the driver takes: the steps share an allocator.
        self._of_shapes: dict[BatchShape, Time] = (
            {
                shape: time_of(workload, replace(epochs.simulation, operations=operations), (), calibration)
                for shape, operations in epochs.operations.items()
            }
            if timed
            else {}
        )
        self.slowest: Sequence[Order] = slowest_batches(
            epochs.orders, self._cost, waits_in_step=_waits_in_step(workload)
        )

    def mean(self) -> Time | None:
        """Return the time of the mean step: means of what is in seconds, and rates that follow from them."""
        if not self._of_shapes:
            return None
        weights, times = self._weights, self._of_shapes

        def mean_of(name: str) -> float:
            return self._mean({shape: float(getattr(one, name)) for shape, one in times.items()})

        longest = times[max(weights, key=lambda shape: times[shape].step_seconds * weights[shape])]
        seconds, flop = mean_of("step_seconds"), mean_of("flop")
        samples = samples_per_step(self._workload) / seconds
        new = first_occurrences(self._epochs.orders)
        step = replace(
            longest,
            step_seconds=seconds,
            samples_per_second=samples,
            tokens_per_second=tokens_per_step(self._epochs) / seconds if _unit(self._epochs) == "tokens" else None,
        )
        return replace(
            step,
            communication=self._mean_communication(step),
            interval_seconds=(
                self._mean({shape: one.interval_seconds[0] for shape, one in times.items()}),
                self._mean({shape: one.interval_seconds[1] for shape, one in times.items()}),
            ),
            bound_by=self._bound_by(),
            gpu_seconds=mean_of("gpu_seconds"),
            host_seconds=mean_of("host_seconds"),
            phases={
                phase: self._mean({shape: one.phases.get(phase, 0.0) for shape, one in times.items()})
                for phase in longest.phases
            },
            flop=round(flop),
            flop_per_second=flop / seconds,
            model_flop_utilisation=self._utilisation({s: one.model_flop_utilisation for s, one in times.items()}),
            attainable_utilisation=self._utilisation({s: one.attainable_utilisation for s, one in times.items()}),
            launches=round(mean_of("launches")),
            first_step_extra_seconds=0.0,
            first_epoch_extra_seconds=self._new_shape_seconds * new / len(self._epochs.orders[0].steps),
            power=None,  # it differs from batch to batch
            general_rule_only=tuple(sorted({name for one in times.values() for name in one.general_rule_only})),
            slow_host=longest.slow_host
            and replace(
                longest.slow_host,
                step_seconds=self._mean({s: one.slow_host.step_seconds for s, one in times.items() if one.slow_host}),
            ),
        )

    def step_seconds(self) -> Distribution | None:
        """Return the distribution over steps; one with several batches takes the mean of steps with each of them."""
        if not self._of_shapes:
            return None
        values = [
            fmean(self._of_shapes[self._epochs.stand_ins[batch.shape]].step_seconds for batch in step)
            for order in self.slowest
            for step in order.steps
        ]
        return Distribution.of(values)

    def waiting_share(self) -> float:
        """Return the share of the time that ranks wait for the longest batch."""
        return waiting_share(self._epochs.orders, self.slowest, self._cost)

    def new_shape_seconds(self) -> float | None:
        """Return what the mean executed shape takes longer at its first occurrence."""
        return self._new_shape_seconds if self._of_shapes else None

    def _cost(self, shape: BatchShape) -> float:
        """Return how long a step with batches of a shape takes; its size where no time is predicted."""
        return self._of_shapes[self._epochs.stand_ins[shape]].step_seconds if self._of_shapes else float(shape.size)

    @cached_property
    def _weights(self) -> Mapping[BatchShape, float]:
        """Count of each executed shape in the slowest orders.

        A shape that was not executed counts for the one that stands for it and the next smaller one, by its distance
        from each: the time of a step is taken to be linear between the two.
        """
        weights: Counter[BatchShape] = Counter()
        stand_ins = self._epochs.stand_ins
        executed = sorted(set(stand_ins.values()))
        counts = Counter(batch.shape for order in self.slowest for step in order.steps for batch in step)
        for shape, count in counts.items():
            longer = stand_ins[shape]
            smaller = (one for one in executed if one.kind == shape.kind and one.size < shape.size)
            shorter = longer if longer == shape else max(smaller, key=lambda one: one.size, default=longer)
            share = 1.0 if longer == shorter else (shape.size - shorter.size) / (longer.size - shorter.size)
            weights[longer] += count * share  # type: ignore[assignment]
            weights[shorter] += count * (1 - share)  # type: ignore[assignment]
        return {shape: weight for shape, weight in weights.items() if weight > 0}

    def _mean(self, values: Mapping[BatchShape, float]) -> float:
        weights = self._weights
        return sum(values[shape] * weight for shape, weight in weights.items()) / sum(weights.values())

    def _bound_by(self) -> Bound:
        """Return what bounds the largest part of the epoch's time."""
        bounds: Counter[Bound] = Counter()
        for shape, weight in self._weights.items():
            one = self._of_shapes[shape]
            bounds[one.bound_by] += weight * one.step_seconds  # type: ignore[assignment]
        return bounds.most_common(1)[0][0]

    def _mean_communication(self, step: Time) -> Communication | None:
        """Return the communication of the mean step, of which ranks wait a share for the longest batch."""
        found = step.communication
        if found is None:
            return None
        of_shapes = {s: one.communication for s, one in self._of_shapes.items() if one.communication is not None}
        exposed = self._mean({shape: one.exposed_seconds for shape, one in of_shapes.items()})
        tokens = step.tokens_per_second
        return replace(
            found,
            seconds=self._mean({shape: one.seconds for shape, one in of_shapes.items()}),
            exposed_seconds=exposed,
            scaling_efficiency=max(1 - exposed / step.step_seconds - self.waiting_share(), 0.0),
            total_samples_per_second=step.samples_per_second * found.data_parallel_size,
            total_tokens_per_second=None if tokens is None else tokens * found.data_parallel_size,
        )

    def _utilisation(self, shares: Mapping[BatchShape, float | None]) -> float | None:
        """Return the share of the peak rate over all steps: each step's counts by its time."""
        weights = self._weights
        known = {shape: share for shape, share in shares.items() if share is not None and shape in weights}
        if len(known) < len(weights):
            return None
        spent = {shape: self._of_shapes[shape].step_seconds * weight for shape, weight in weights.items()}
        return sum(share * spent[shape] for shape, share in known.items()) / sum(spent.values())

    @property
    def _new_shape_seconds(self) -> float:
        return fmean(first_call_seconds(operations.calls) for operations in self._epochs.operations.values())


def tokens_per_step(epochs: Epochs, *, padded: bool = False) -> float:
    """Return the mean number of tokens of a step, without those of padding unless ``padded``."""
    return fmean(
        sum(batch.padded_tokens if padded else batch.tokens for batch in step)
        for order in epochs.orders
        for step in order.steps
    )


def _waits_in_step(workload: Workload) -> bool:
    """Return whether ranks wait for each other in every micro-batch: where FSDP gathers weights for it."""
    return bool(workload.train.fsdp) or workload.parallel.strategy == "fsdp2"


MOST_STEPS = 1_000
"""Steps of all orders together that are replayed in any case; each takes some 30 ms."""
FEWEST_STEPS = 50
"""Steps of each order that are replayed in any case."""


def prediction_of_lengths(
    workload: Workload,
    epochs: Epochs,
    request: PredictRequest,
    started: float,
    tell: Callable[[str], None] = lambda message: None,
) -> Prediction:
    """Return the prediction for epochs that were simulated: the memory of the worst order, the time of the mean step.

    Args:
        workload: The training that was simulated.
        epochs: Its steps and orders.
        request: What is to be predicted, and how; the timeline is that of the worst order, and ranks are those whose
            memory is wanted beside that of the fullest one.
        started: See ``prediction_of``.
        tell: Is told the progress.
    """
    ranks = request.ranks
    replayed, chosen = list[OrderPrediction](), replayed_orders(epochs.orders, ranks)
    for place, order in enumerate(chosen):
        tell(f"replaying orders of the samples: {place + 1} of {len(chosen)}")
        replayed.append(_replayed(workload, epochs, order, replayed, len(chosen)))
    worst = worst_of(replayed)
    of_memory = replace(request, timed=False, host_paces=(), layouts=True)
    prediction = prediction_of(workload, _up_to_peaks(epochs, worst), of_memory, started)
    times = EpochTimes(workload, epochs, request.calibration, timed=request.timed)
    mean = times.mean()
    others = [
        rank_prediction_of(
            workload,
            _up_to_peaks(epochs, worst_of([one for one in replayed if one.rank == rank])),
            request,
        )
        for rank in (sorted({0, *ranks} - {worst.rank}) if ranks else ())
    ]
    return replace(
        prediction,
        time=mean,
        other_ranks=tuple(others),
        lengths=_summary(workload, epochs, replayed, worst, times, mean),
        notes=(*_notes(epochs), *_rank_notes(epochs.orders, chosen), *prediction.notes),
        seconds_taken=time.perf_counter() - started,
    )


def with_lengths(workload: Workload, prediction: Prediction) -> Prediction:
    """Return a prediction with what ``data.lengths`` says of packs, or of batches that are padded to the maximum."""
    data, step_time = workload.data, prediction.time
    lengths = sample_lengths(workload)
    assert data.sequence_length is not None
    batch = samples_per_step(workload)
    padded = batch * data.sequence_length
    packs = sum(lengths) // data.sequence_length
    real = padded if data.packing else batch * fmean(lengths)
    steps = (packs if data.packing else len(lengths)) // (batch * workload.parallel.data_parallel_size)
    if steps == 0:
        count = f"{packs} packs" if data.packing else f"{len(lengths)} samples"
        needed = batch * workload.parallel.data_parallel_size
        raise WorkloadError(f"data.lengths: {count} do not fill one step of {needed}", key="data.lengths")
    rates = (None, None) if step_time is None else (real / step_time.step_seconds, padded / step_time.step_seconds)
    found = LengthsPrediction(
        samples=_samples(lengths),
        batching=_batching(workload),
        sampling=workload.train.train_sampling_strategy,
        steps=steps,
        shapes=1,
        executed_shapes=1,
        orders=(),
        worst_seed=None,
        peak_allocated_bytes=None,
        peak_reserved_bytes=None,
        step_seconds=None,
        tokens_per_step=real,
        padded_tokens_per_step=padded,
        padding_share=1 - real / padded,
        tokens_per_second=rates[0],
        padded_tokens_per_second=rates[1],
    )
    return replace(
        prediction,
        lengths=found,
        time=None if step_time is None else replace(step_time, tokens_per_second=rates[0]),
    )


def _replayed(
    workload: Workload, epochs: Epochs, order: Order, before: Sequence[OrderPrediction], count: int
) -> OrderPrediction:
    """Replay the steps of an order, one of this many, after those before it."""
    steps = steps_to_replay(_longest(order), max(FEWEST_STEPS, MOST_STEPS // count))
    shapes = epochs.shapes(order)
    stitched = epochs.stitched([shapes[step] for step in steps])
    gpu_bytes, outside = workload.resolve_gpu().memory_bytes, context_bytes(workload, epochs.simulation)
    least = max([gpu_bytes, *(one.peak_reserved_bytes + outside for one in before if not one.fits)])
    settings = AllocatorSettings.parse(workload.allocator, epochs.simulation.torch_version)
    return replay_order(
        stitched.trace,
        stitched.step_ends,
        Room(settings, outside, gpu_bytes, least),
        seed=order.seed,
        steps=steps,
        longest=tuple(_longest(order)[step] for step in steps),
        rank=order.rank,
    )


def _longest(order: Order) -> list[int]:
    """Return the tokens of the longest row of each step; with images, the size of the largest batch."""

    def length(shape: BatchShape) -> int:
        return shape.size if shape.samples else shape.length

    return [max(length(batch.shape) for batch in step) for step in order.steps]


def _up_to_peaks(epochs: Epochs, worst: OrderPrediction) -> Simulation:
    """Return a simulation of an order, up to the step at which its peaks are reached."""
    order = next(each for each in epochs.orders if (each.seed, each.rank) == (worst.seed, worst.rank))
    peaks = (worst.allocated_bytes, worst.reserved_bytes)
    last = (
        len(worst.steps)
        if not worst.fits or worst.num_alloc_retries
        else max(series.index(max(series)) + 1 for series in peaks)
    )
    shapes = epochs.shapes(order)
    steps = worst.steps[: max(last, epochs.begun)]
    trace = epochs.stitched([shapes[step] for step in steps], detailed=True).trace
    trace.rank = worst.rank
    return replace(epochs.simulation, trace=trace, steps=epochs.executed_steps)


def _summary(
    workload: Workload,
    epochs: Epochs,
    replayed: Sequence[OrderPrediction],
    worst: OrderPrediction,
    times: EpochTimes,
    mean: Time | None,
) -> LengthsPrediction:
    tokens, padded = tokens_per_step(epochs), tokens_per_step(epochs, padded=True)
    return LengthsPrediction(
        samples=_samples(epochs.lengths, _unit(epochs)),
        batching=_batching(workload),
        sampling=workload.train.train_sampling_strategy,
        steps=len(epochs.orders[0].steps),
        shapes=len(epochs.stand_ins),
        executed_shapes=len(set(epochs.stand_ins.values())),
        orders=tuple(replayed),
        worst_seed=worst.seed,
        peak_allocated_bytes=Distribution.of([float(one.peak_allocated_bytes) for one in replayed]),
        peak_reserved_bytes=Distribution.of([float(one.peak_reserved_bytes) for one in replayed]),
        step_seconds=times.step_seconds(),
        tokens_per_step=tokens,
        padded_tokens_per_step=padded,
        padding_share=1 - tokens / padded,
        tokens_per_second=None if mean is None else tokens / mean.step_seconds,
        padded_tokens_per_second=None if mean is None else padded / mean.step_seconds,
        new_shape_seconds=times.new_shape_seconds(),
        new_shapes=first_occurrences(epochs.orders),
        worst_rank=worst.rank,
        fullest=_fullest(epochs, worst),
        waiting_share=times.waiting_share(),
    )


def _fullest(epochs: Epochs, worst: OrderPrediction) -> FullestBatch:
    """Return the fullest batch of an order that was replayed."""
    order = next(each for each in epochs.orders if (each.seed, each.rank) == (worst.seed, worst.rank))
    batches = ((number, batch) for number, step in enumerate(order.steps) for batch in step)
    number, batch = max(batches, key=lambda each: each[1].shape.size)
    samples = tuple(sorted(batch.lengths, reverse=True))
    images = sorted((sample.image for sample in batch.media if sample.image), key=prod, reverse=True)
    rows = batch.sequences * batch.shape.rows
    return FullestBatch(number, rows, batch.shape.length, samples, tuple(images), batch.side)


def _unit(epochs: Epochs) -> Unit:
    batch = epochs.orders[0].steps[0][0]
    if batch.side is not None:
        return "pixels"
    return "tokens" if not batch.media or batch.media[0].image else "audio samples"


def _samples(lengths: Sequence[int], unit: Unit = "tokens") -> SampleLengths:
    return SampleLengths(len(lengths), min(lengths), fmean(lengths), max(lengths), unit)


def _batching(workload: Workload) -> Batching:
    if workload.data.packing:
        return "packed"
    if batching_of(workload).is_joined:
        return "joined"
    return "padded to the maximum" if workload.data.padding == "max_length" else "padded"


def _rank_notes(orders: Sequence[Order], chosen: Sequence[Order]) -> tuple[str, ...]:
    """Return notes on what is assumed of several ranks."""
    ranks, replayed = max(order.rank for order in orders) + 1, len({order.rank for order in chosen})
    if ranks == 1:
        return ()
    assumed = (
        "data.lengths: each rank is taken to hold the shards of rank 0, and to let go of DDP's first buckets when the "
        "second step replaces them"
    )
    if replayed == ranks:
        return (assumed,)
    few = f"data.lengths: memory is that of {replayed} of {ranks} ranks, whose batches stand for those of the others"
    return (assumed, few)


def _notes(epochs: Epochs) -> tuple[str, ...]:
    """Return notes about what was not executed."""
    every, executed = len(epochs.stand_ins), len(set(epochs.stand_ins.values()))
    if every == executed:
        return ()
    if epochs.orders[0].steps[0][0].media:
        return (
            f"data.lengths: {executed} of {every} kinds of batches were executed, among them all that no other is as "
            "large as in every respect, so that the peak is that of the largest batch; each other is replaced by the "
            f"next larger one, which makes reserved memory less exact (data.lengths.shapes: {every} executes all)",
        )
    widest = max(one.length - shape.length for shape, one in epochs.stand_ins.items())
    if any(shape.tokens for shape in epochs.stand_ins):
        most = max(one.tokens - shape.tokens for shape, one in epochs.stand_ins.items())
        return (
            f"data.lengths: {executed} of {every} combinations of padded length and tokens were executed; one that is "
            f"at most {widest} tokens longer, with at most {most} more tokens in the batch, stands for each of the "
            f"others (data.lengths.shapes: {every} executes all)",
        )
    return (
        f"data.lengths: {executed} of {every} padded lengths were executed; the next longer one, by at most {widest} "
        f"tokens, stands for each of the others; reserved memory may be 20 % off (without data.lengths.shapes all are "
        "executed)",
    )
