"""Several trainings side by side: what was predicted, measured and published of each."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Literal

from trainatomy.results.measurement import Measurement
from trainatomy.results.memory import OutOfMemoryPoint
from trainatomy.results.prediction import Prediction

RowStatus = Literal["not measured", "completed", "out of memory", "failed"]


@dataclass(frozen=True, slots=True)
class Spread:
    """One figure over the repeats of a run: its median, its least and its largest value, and how many there were."""

    median: float
    least: float
    most: float
    count: int


@dataclass(frozen=True, slots=True)
class PublishedFigures:
    """What others measured of the same training: bytes (NVML's or nvidia-smi's), seconds in all, samples per second.

    ``None``: they do not say.
    """

    memory_bytes: int
    seconds: float | None = None
    samples_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One training.  ``prediction``: ``None`` where it could not be predicted, which ``prediction_error`` explains.

    ``measurements``: one for each repeat that ended, completed or out of memory, in order; ``errors``: what the
    repeats said that failed otherwise.
    """

    name: str
    workload: dict[str, object]
    prediction: Prediction | None
    prediction_error: str = ""
    measurements: tuple[Measurement, ...] = ()
    errors: tuple[str, ...] = ()
    published: PublishedFigures | None = None

    @property
    def completed(self) -> tuple[Measurement, ...]:
        """The repeats that came to their end."""
        return tuple(each for each in self.measurements if each.status == "completed")

    @property
    def status(self) -> RowStatus:
        """The worst that happened in any repeat; running out of memory is an outcome, not a failure."""
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
        """Where it ran out of memory, if it did and is known."""
        return self.ran_out.out_of_memory if self.ran_out else None

    @property
    def typical(self) -> Measurement | None:
        """The completed repeat whose device memory is the median (the lower of two), to show as a whole."""
        ranked = sorted(self.completed, key=lambda each: each.device_bytes or each.peak_reserved_bytes)
        return ranked[(len(ranked) - 1) // 2] if ranked else None

    def spread(self, figure: str) -> Spread | None:
        """``figure``: a number of ``Measurement`` by its name; ``None`` unless all completed repeats have it.

        Medians of whole numbers are whole: bytes.
        """
        values = [getattr(each, figure) for each in self.completed]
        if not values or None in values:
            return None
        middle = median(values)
        if all(isinstance(value, int) for value in values):
            middle = round(middle)
        return Spread(middle, min(values), max(values), len(values))

    def gap(self, figure: str) -> float | None:
        """predicted / measured (median) - 1 of a figure that both have (``device_bytes``); ``None`` unless both do."""
        measured = self.spread(figure)
        if measured is None or not measured.median or self.prediction is None:
            return None
        predicted: int = getattr(self.prediction.memory, figure)
        return predicted / measured.median - 1


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rows in the order in which they were asked for.

    ``source`` of the published figures and a ``remark`` on what is known of their setting; ``samples``: of how many
    samples the source gives the time, so that ours can be given of as many; ``group``: the name under which records of
    the runs are kept; ``repeats``: how often each training was to be run.
    """

    rows: tuple[ComparisonRow, ...]
    source: str = ""
    remark: str = ""
    samples: int | None = None
    group: str = ""
    repeats: int = 1

    @property
    def measured(self) -> bool:
        """Whether anything was run."""
        return any(row.status != "not measured" for row in self.rows)

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """Those that could be made, in order."""
        return tuple(row.prediction for row in self.rows if row.prediction is not None)

    @property
    def gpus(self) -> tuple[str, ...]:
        """What the runs were measured on: product names, each once."""
        return tuple(dict.fromkeys(each.gpu for row in self.rows for each in row.measurements))
