"""Times of steps whose samples differ in length, from the time of a step with batches of each executed shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING

from trainatomy.prediction import time_of
from trainatomy.results.lengths import Distribution
from trainatomy.training.lengths import BatchShape, Order
from trainatomy.training.lengths_of_ranks import first_occurrences, slowest_batches, waiting_share
from trainatomy.training.throughput import samples_per_step

if TYPE_CHECKING:
    from trainatomy.catalog.calibrations import Calibration
    from trainatomy.results.time import Bound, Communication, Time
    from trainatomy.simulator.lengths import Epochs
    from trainatomy.workload.schema import Workload


class EpochTimes:
    """Times of the steps of simulated epochs.

    Args:
        workload: The training that was simulated.
        epochs: Its steps and orders.
        calibration: See ``prediction_of``.
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
        longest = times[max(weights, key=lambda shape: times[shape].step_seconds * weights[shape])]
        seconds = self._mean({shape: one.step_seconds for shape, one in times.items()})
        flop = self._mean({shape: float(one.flop) for shape, one in times.items()})
        samples = samples_per_step(self._workload) / seconds
        new = first_occurrences(self._epochs.orders)
        step = replace(
            longest,
            step_seconds=seconds,
            samples_per_second=samples,
            tokens_per_second=tokens_per_step(self._epochs) / seconds,
        )
        return replace(
            step,
            communication=self._mean_communication(step),
            interval_seconds=(
                self._mean({shape: one.interval_seconds[0] for shape, one in times.items()}),
                self._mean({shape: one.interval_seconds[1] for shape, one in times.items()}),
            ),
            bound_by=self._bound_by(),
            gpu_seconds=self._mean({shape: one.gpu_seconds for shape, one in times.items()}),
            host_seconds=self._mean({shape: one.host_seconds for shape, one in times.items()}),
            phases={
                phase: self._mean({shape: one.phases.get(phase, 0.0) for shape, one in times.items()})
                for phase in longest.phases
            },
            flop=round(flop),
            flop_per_second=flop / seconds,
            model_flop_utilisation=self._utilisation({s: one.model_flop_utilisation for s, one in times.items()}),
            attainable_utilisation=self._utilisation({s: one.attainable_utilisation for s, one in times.items()}),
            launches=round(self._mean({shape: float(one.launches) for shape, one in times.items()})),
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
        from trainatomy.timing.first_calls import first_call_seconds

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
