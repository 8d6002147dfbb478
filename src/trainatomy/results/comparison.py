"""Several training runs side by side: predicted, measured and published figures of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal

from trainatomy.results.measurement import Measurement
from trainatomy.results.memory import OutOfMemoryPoint
from trainatomy.results.prediction import Plan, Prediction, Scaling, total_rate, trained

RowStatus = Literal["not measured", "completed", "out of memory", "failed"]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, minimum and maximum of one figure over the repeats of a run, and the number of repeats."""

    median: float
    least: float
    most: float
    count: int


@dataclass(frozen=True, slots=True)
class PublishedFigures:
    """Figures that others measured for the same training; ``None`` where they give none.

    ``memory_bytes`` is NVML's or nvidia-smi's figure, ``seconds`` the whole run's time, ``samples_per_second`` that of
    all GPUs.  ``note`` is what to know where a prediction puts the training in another order.
    """

    memory_bytes: int | None
    seconds: float | None = None
    samples_per_second: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """A training of a comparison.

    ``prediction`` is ``None`` where it could not be predicted; ``prediction_error`` says why.  ``measurements`` holds
    one entry for each repeat that completed or ran out of memory, in order; ``errors`` the messages of repeats that
    failed otherwise.
    """

    name: str
    workload: dict[str, object]
    prediction: Prediction | None
    prediction_error: str = ""
    measurements: tuple[Measurement, ...] = ()
    errors: tuple[str, ...] = ()
    published: PublishedFigures | None = None

    @property
    def plan(self) -> Plan:
        """How the training is spread over GPUs."""
        return Plan.of(self.workload)

    @property
    def accumulation_steps(self) -> int:
        """Batches per optimizer step."""
        train = self.workload.get("train") or {}
        assert isinstance(train, Mapping)
        return int(train.get("gradient_accumulation_steps", 1))

    @property
    def completed(self) -> tuple[Measurement, ...]:
        """The repeats that completed."""
        return tuple(each for each in self.measurements if each.status == "completed")

    @property
    def status(self) -> RowStatus:
        """The worst outcome of any repeat; running out of memory is an outcome, not a failure."""
        if self.errors:
            return "failed"
        if not self.measurements:
            return "not measured"
        return "completed" if len(self.completed) == len(self.measurements) else "out of memory"

    @property
    def ran_out(self) -> Measurement | None:
        """The first repeat that ran out of memory."""
        return next((each for each in self.measurements if each.status == "out of memory"), None)

    @property
    def out_of_memory(self) -> OutOfMemoryPoint | None:
        """The allocation that failed in the first repeat that ran out of memory, where known."""
        return self.ran_out.out_of_memory if self.ran_out else None

    @property
    def typical(self) -> Measurement | None:
        """The completed repeat with the median device memory (the lower of two), to show as a whole."""
        ranked = sorted(self.completed, key=lambda each: each.device_bytes or each.peak_reserved_bytes)
        return ranked[(len(ranked) - 1) // 2] if ranked else None

    def spread(self, figure: str) -> Spread | None:
        """Return the spread of a figure over the completed repeats.

        Args:
            figure: The name of a number in ``Measurement``.

        Returns:
            ``None`` unless all completed repeats have the figure.  The median of integers (bytes) is an integer.
        """
        values = [getattr(each, figure) for each in self.completed]
        if not values or None in values:
            return None
        middle = median(values)
        if all(isinstance(value, int) for value in values):
            middle = round(middle)
        return Spread(middle, min(values), max(values), len(values))

    @property
    def total_rate(self) -> Spread | None:
        """The spread of the measured samples per second of all GPUs."""
        found, ranks = self.spread("samples_per_second"), self.plan.data_parallel_size
        return found and Spread(found.median * ranks, found.least * ranks, found.most * ranks, found.count)

    def gap(self, figure: str) -> float | None:
        """Return predicted / measured (median) - 1 of a figure; ``None`` unless both sides have it."""
        measured = self.spread(figure)
        if measured is None or not measured.median or self.prediction is None:
            return None
        predicted: int = getattr(self.prediction.memory, figure)
        return predicted / measured.median - 1


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several training runs, in the order in which they were requested.

    ``source`` is where the published figures come from, and ``remark`` what is known of their setup; ``samples`` is the
    number of samples the published times are for; ``group`` is the name that the runs' records share; ``repeats`` is
    the number of runs requested of each training.  ``is_across_gpus`` is True for one training on GPUs of several
    kinds; ``costs_per_hour`` are prices by the GPU's id, in any currency.
    """

    rows: tuple[ComparisonRow, ...]
    source: str = ""
    remark: str = ""
    samples: int | None = None
    group: str = ""
    repeats: int = 1
    is_across_gpus: bool = False
    costs_per_hour: Mapping[str, float] = field(default_factory=dict)

    @property
    def measured(self) -> bool:
        """True if any training was run."""
        return any(row.status != "not measured" for row in self.rows)

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """The predictions that succeeded, in order."""
        return tuple(row.prediction for row in self.rows if row.prediction is not None)

    @property
    def gpus(self) -> tuple[str, ...]:
        """Product names of the GPUs of the runs, each once."""
        return tuple(dict.fromkeys(each.gpu for row in self.rows for each in row.measurements))

    @property
    def on_several_gpus(self) -> bool:
        """True if any training uses several GPUs."""
        return any(row.plan.world_size > 1 for row in self.rows)

    def cost_per_million_samples(self, row: ComparisonRow) -> float | None:
        """Return the cost of a million samples on all GPUs of a row.

        ``None`` without a price, or where the training does not fit.
        """
        found = row.prediction
        if found is None or not found.fits or (price := self.costs_per_hour.get(found.gpu.id)) is None:
            return None
        rate = total_rate(found)
        return None if rate is None else price * row.plan.world_size / 3600 / rate * 1e6

    def reversals(self) -> tuple[tuple[ComparisonRow, ComparisonRow], ...]:
        """Return the pairs of rows of which the first is predicted to be faster, and was published to be slower."""
        timed = [(row, _predicted_rate(row), row.published and row.published.samples_per_second) for row in self.rows]
        known = [(row, ours, theirs) for row, ours, theirs in timed if ours and theirs]
        return tuple(
            (first, second)
            for first, ours, theirs in known
            for second, other_ours, other_theirs in known
            if ours > other_ours and theirs < other_theirs
        )

    def fastest_first(self) -> tuple[ComparisonRow, ...]:
        """Return the rows that were predicted: those that fit by throughput, then the others by the GPU's memory."""
        return tuple(sorted((row for row in self.rows if row.prediction is not None), key=_slowness))

    def scaling(self) -> tuple[Scaling | None, ...]:
        """Return the predicted throughput of each row; ``None`` for one that does not fit or has no predicted time."""
        found = [_scaling(row) for row in self.rows]
        pairs = zip(self.rows, found, strict=True)
        return tuple(scaling and _with_efficiency(scaling, row, self.rows, found) for row, scaling in pairs)


def _predicted_rate(row: ComparisonRow) -> float | None:
    return total_rate(row.prediction) if row.prediction is not None and row.prediction.fits else None


def _slowness(row: ComparisonRow) -> tuple[bool, float, int]:
    found = row.prediction
    assert found is not None
    rate = total_rate(found) if found.fits else None
    return not found.fits, -(rate or 0.0), -found.gpu.memory_bytes


def _scaling(row: ComparisonRow) -> Scaling | None:
    rate = _predicted_rate(row)
    return None if rate is None else Scaling(row.plan, rate)


def _with_efficiency(
    scaling: Scaling, row: ComparisonRow, rows: Sequence[ComparisonRow], scalings: Sequence[Scaling | None]
) -> Scaling:
    """Return the throughput of a row with its efficiency, if the same is trained on another number of GPUs too."""
    own = trained(row.workload)
    same = [each for other, each in zip(rows, scalings, strict=True) if each and trained(other.workload) == own]
    fewest = min(each.plan.world_size for each in same)
    if all(each.plan.world_size == fewest for each in same):
        return scaling
    base = max(each.samples_per_second_per_gpu for each in same if each.plan.world_size == fewest)
    return replace(scaling, efficiency=scaling.samples_per_second_per_gpu / base)
