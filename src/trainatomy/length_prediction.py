"""Assemble a ``Prediction`` of a training whose samples differ in length, from steps that were executed once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.analysis.epochs import replay_order, steps_to_replay, worst_of
from trainatomy.catalog.first_calls import first_call_seconds
from trainatomy.errors import WorkloadError
from trainatomy.prediction import prediction_of, rank_prediction_of, time_of
from trainatomy.prediction_inputs import context_bytes
from trainatomy.results.lengths import Batching, Distribution, LengthsPrediction, OrderPrediction, SampleLengths
from trainatomy.training.lengths import BatchShape, Order, sample_lengths
from trainatomy.training.lengths_of_ranks import first_occurrences, replayed_orders, slowest_batches, waiting_share
from trainatomy.training.throughput import samples_per_step
from trainatomy.workload.batching import batching_of

if TYPE_CHECKING:
    from trainatomy.catalog.calibrations import Calibration
    from trainatomy.results.prediction import Prediction, RankPrediction
    from trainatomy.results.time import Bound, Time
    from trainatomy.simulator.lengths import Epochs
    from trainatomy.simulator.simulate import Simulation
    from trainatomy.workload.schema import Workload

MOST_STEPS = 1_000
"""Steps of all orders together that are replayed in any case; each takes some 30 ms."""
FEWEST_STEPS = 50
"""Steps of each order that are replayed in any case."""

Weights = Mapping[BatchShape, float]
"""How often a step of each executed shape occurs; fractions, where one stands in part for another."""


def prediction_of_lengths(
    workload: Workload,
    epochs: Epochs,
    *,
    calibration: Calibration | None,
    timed: bool,
    timeline: bool,
    started: float,
    tell: Callable[[str], None] = lambda message: None,
    ranks: Sequence[int] = (),
) -> Prediction:
    """Return the prediction for epochs that were simulated: the memory of the worst order, the time of the mean step.

    Args:
        workload: The training that was simulated.
        epochs: Its steps and orders.
        calibration: See ``prediction_of``.
        timed: See ``prediction_of``.
        timeline: Whether to include memory by component over the steps of the worst order.
        started: See ``prediction_of``.
        tell: Is told the progress.
        ranks: Ranks whose memory is wanted beside that of the fullest one.
    """
    replayed, chosen = [], replayed_orders(epochs.orders, ranks)
    for place, order in enumerate(chosen):
        tell(f"replaying orders of the samples: {place + 1} of {len(chosen)}")
        replayed.append(_replayed(workload, epochs, order, len(chosen)))
    worst = worst_of(replayed)
    prediction = _of_worst(workload, epochs, worst, timeline=timeline, started=started)
    times = _times(workload, epochs, calibration) if timed else {}
    slowest = slowest_batches(epochs.orders, _costs(epochs, times), waits_in_step=_waits_in_step(workload))
    mean = _mean_time(workload, epochs, times, slowest) if times else None
    others = [
        _of_rank(workload, epochs, worst_of([one for one in replayed if one.rank == rank]), timeline=timeline)
        for rank in (sorted({0, *ranks} - {worst.rank}) if ranks else ())
    ]
    return replace(
        prediction,
        time=mean,
        other_ranks=tuple(others),
        lengths=_summary(workload, epochs, replayed, worst, times, mean, slowest),
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


def _replayed(workload: Workload, epochs: Epochs, order: Order, count: int) -> OrderPrediction:
    """Replay the steps of an order, one of this many."""
    steps = steps_to_replay(_longest(order), max(FEWEST_STEPS, MOST_STEPS // count))
    shapes = epochs.shapes(order)
    stitched = epochs.stitched([shapes[step] for step in steps])
    gpu = workload.resolve_gpu()
    return replay_order(
        stitched.trace,
        stitched.step_ends,
        AllocatorSettings.parse(workload.allocator, epochs.simulation.torch_version),
        gpu.memory_bytes - context_bytes(workload, epochs.simulation),
        gpu_bytes=gpu.memory_bytes,
        seed=order.seed,
        steps=steps,
        longest=tuple(_longest(order)[step] for step in steps),
        rank=order.rank,
    )


def _longest(order: Order) -> list[int]:
    """Return the tokens of the longest row of each step."""
    return [max(batch.shape.length for batch in step) for step in order.steps]


def _of_worst(
    workload: Workload, epochs: Epochs, worst: OrderPrediction, *, timeline: bool, started: float
) -> Prediction:
    """Return the prediction of the worst order, up to the step at which its peaks are reached."""
    simulation = _up_to_peaks(epochs, worst)
    return prediction_of(workload, simulation, calibration=None, timed=False, timeline=timeline, started=started)


def _of_rank(workload: Workload, epochs: Epochs, worst: OrderPrediction, *, timeline: bool) -> RankPrediction:
    """Return the memory of a rank in the worst of its orders."""
    return rank_prediction_of(workload, _up_to_peaks(epochs, worst), timeline=timeline)


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


def _times(workload: Workload, epochs: Epochs, calibration: Calibration | None) -> dict[BatchShape, Time]:
    """Return the time of a step with batches of each executed shape, without what the driver takes."""
    return {
        shape: time_of(workload, replace(epochs.simulation, operations=operations), (), calibration)
        for shape, operations in epochs.operations.items()
    }


def _costs(epochs: Epochs, times: Mapping[BatchShape, Time]) -> Callable[[BatchShape], float]:
    """Return how long a step with batches of a shape takes; its size where no time is predicted."""
    return lambda shape: times[epochs.stand_ins[shape]].step_seconds if times else float(shape.size)


def _waits_in_step(workload: Workload) -> bool:
    """Return whether ranks wait for each other in every micro-batch: where FSDP gathers weights for it."""
    return bool(workload.train.fsdp) or workload.parallel.strategy == "fsdp2"


def _weights(epochs: Epochs, orders: Sequence[Order]) -> Weights:
    """Return how often each executed shape occurs in the orders.

    A shape that was not executed counts for the one that stands for it and the next smaller one, by its distance from
    each: the time of a step is taken to be linear between the two.
    """
    weights: Counter[BatchShape] = Counter()
    executed = sorted(set(epochs.stand_ins.values()))
    for shape, count in Counter(batch.shape for order in orders for step in order.steps for batch in step).items():
        longer = epochs.stand_ins[shape]
        smaller = (one for one in executed if one.kind == shape.kind and one.size < shape.size)
        shorter = longer if longer == shape else max(smaller, key=lambda one: one.size, default=longer)
        share = 1.0 if longer == shorter else (shape.size - shorter.size) / (longer.size - shorter.size)
        weights[longer] += count * share  # type: ignore[assignment]
        weights[shorter] += count * (1 - share)  # type: ignore[assignment]
    return {shape: weight for shape, weight in weights.items() if weight > 0}


def _mean_time(workload: Workload, epochs: Epochs, times: Mapping[BatchShape, Time], slowest: Sequence[Order]) -> Time:
    """Return the time of the mean step: means of what is in seconds, and rates that follow from them."""
    weights = _weights(epochs, slowest)
    total = sum(weights.values())
    longest = max(weights, key=lambda shape: times[shape].step_seconds * weights[shape])

    def mean(values: Mapping[BatchShape, float]) -> float:
        return sum(values[shape] * weight for shape, weight in weights.items()) / total

    seconds = mean({shape: one.step_seconds for shape, one in times.items()})
    flop = mean({shape: float(one.flop) for shape, one in times.items()})
    bounds: Counter[Bound] = Counter()
    for shape, weight in weights.items():
        bounds[times[shape].bound_by] += weight * times[shape].step_seconds  # type: ignore[assignment]
    phases = {
        phase: mean({shape: one.phases.get(phase, 0.0) for shape, one in times.items()})
        for phase in times[longest].phases
    }
    samples, tokens = samples_per_step(workload) / seconds, _tokens(epochs, "tokens") / seconds
    waiting, new = waiting_share(epochs.orders, slowest, _costs(epochs, times)), first_occurrences(epochs.orders)
    communication = times[longest].communication
    if communication is not None:
        of_shapes = {shape: one.communication for shape, one in times.items() if one.communication is not None}
        exposed = mean({shape: one.exposed_seconds for shape, one in of_shapes.items()})
        communication = replace(
            communication,
            seconds=mean({shape: one.seconds for shape, one in of_shapes.items()}),
            exposed_seconds=exposed,
            scaling_efficiency=max(1 - exposed / seconds - waiting, 0.0),
            total_samples_per_second=samples * communication.data_parallel_size,
            total_tokens_per_second=tokens * communication.data_parallel_size,
        )
    return replace(
        times[longest],
        step_seconds=seconds,
        communication=communication,
        interval_seconds=(
            mean({shape: one.interval_seconds[0] for shape, one in times.items()}),
            mean({shape: one.interval_seconds[1] for shape, one in times.items()}),
        ),
        samples_per_second=samples,
        tokens_per_second=tokens,
        bound_by=bounds.most_common(1)[0][0],
        gpu_seconds=mean({shape: one.gpu_seconds for shape, one in times.items()}),
        host_seconds=mean({shape: one.host_seconds for shape, one in times.items()}),
        phases=phases,
        flop=round(flop),
        flop_per_second=flop / seconds,
        model_flop_utilisation=_utilisation(
            {s: one.model_flop_utilisation for s, one in times.items()}, times, weights
        ),
        attainable_utilisation=_utilisation(
            {s: one.attainable_utilisation for s, one in times.items()}, times, weights
        ),
        launches=round(mean({shape: float(one.launches) for shape, one in times.items()})),
        first_epoch_extra_seconds=_new_shape_seconds(epochs) * new / len(epochs.orders[0].steps),
        power=None,  # it differs from batch to batch
        general_rule_only=tuple(sorted({name for one in times.values() for name in one.general_rule_only})),
    )


def _utilisation(
    shares: Mapping[BatchShape, float | None], times: Mapping[BatchShape, Time], weights: Weights
) -> float | None:
    """Return the share of the peak rate over all steps: each step's counts by its time."""
    known = {shape: share for shape, share in shares.items() if share is not None and shape in weights}
    if len(known) < len(weights):
        return None
    spent = {shape: times[shape].step_seconds * weight for shape, weight in weights.items()}
    return sum(share * spent[shape] for shape, share in known.items()) / sum(spent.values())


def _tokens(epochs: Epochs, name: str) -> float:
    """Return the mean of a property of batches (``tokens``, ``padded_tokens``) by step."""
    per_step = [sum(getattr(batch, name) for batch in step) for order in epochs.orders for step in order.steps]
    return fmean(per_step)


def _summary(
    workload: Workload,
    epochs: Epochs,
    replayed: Sequence[OrderPrediction],
    worst: OrderPrediction,
    times: Mapping[BatchShape, Time],
    mean: Time | None,
    slowest: Sequence[Order],
) -> LengthsPrediction:
    tokens, padded = _tokens(epochs, "tokens"), _tokens(epochs, "padded_tokens")
    return LengthsPrediction(
        samples=_samples(sample_lengths(workload)),
        batching=_batching(workload),
        sampling=workload.train.train_sampling_strategy,
        steps=len(epochs.orders[0].steps),
        shapes=len(epochs.stand_ins),
        executed_shapes=len(set(epochs.stand_ins.values())),
        orders=tuple(replayed),
        worst_seed=worst.seed,
        peak_allocated_bytes=Distribution.of([float(one.peak_allocated_bytes) for one in replayed]),
        peak_reserved_bytes=Distribution.of([float(one.peak_reserved_bytes) for one in replayed]),
        step_seconds=_step_seconds(epochs, times, slowest) if times else None,
        tokens_per_step=tokens,
        padded_tokens_per_step=padded,
        padding_share=1 - tokens / padded,
        tokens_per_second=None if mean is None else tokens / mean.step_seconds,
        padded_tokens_per_second=None if mean is None else padded / mean.step_seconds,
        new_shape_seconds=_new_shape_seconds(epochs) if times else None,
        new_shapes=first_occurrences(epochs.orders),
        worst_rank=worst.rank,
        waiting_share=waiting_share(epochs.orders, slowest, _costs(epochs, times)),
    )


def _new_shape_seconds(epochs: Epochs) -> float:
    """Return what the mean executed shape takes longer at its first occurrence."""
    return fmean(first_call_seconds(operations.calls) for operations in epochs.operations.values())


def _step_seconds(epochs: Epochs, times: Mapping[BatchShape, Time], slowest: Sequence[Order]) -> Distribution:
    """Return the distribution over steps; one with several batches takes the mean of steps with each of them."""
    values = [
        fmean(times[epochs.stand_ins[batch.shape]].step_seconds for batch in step)
        for order in slowest
        for step in order.steps
    ]
    return Distribution.of(values)


def _samples(lengths: Sequence[int]) -> SampleLengths:
    return SampleLengths(len(lengths), min(lengths), fmean(lengths), max(lengths))


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
