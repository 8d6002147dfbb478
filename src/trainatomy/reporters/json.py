"""What ``--json`` prints (docs/json.md): formats by the names of their schemas, and results written by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from trainatomy.catalog.architectures import ArchitectureEntry
from trainatomy.catalog.gpus import GPU
from trainatomy.catalog.instances import Instance
from trainatomy.records.create import SCHEMA, to_plain
from trainatomy.reporters import doctor_sentences
from trainatomy.reporters.json_format import ABSENT, Derived, Format, view
from trainatomy.reporters.prediction_json import (
    HOST_KEYS,
    PREDICTION,
    PREDICTION_2,
    SaidPrediction,
    WrittenPrediction,
    renamed_v2,
)
from trainatomy.reporters.search_json import FIT, FIT_ACROSS, SHORTAGE, WrittenFit
from trainatomy.reporters.sentences import claim_sentence, padding_advice
from trainatomy.reporters.settings import plan_name
from trainatomy.reporters.subject_sentences import shared_subject
from trainatomy.results.comparison import Comparison, ComparisonRow, RowStatus, Spread
from trainatomy.results.fit import Fit, FitAcross, Shortage
from trainatomy.results.loader import LoaderReport
from trainatomy.results.machine import Cost, Diagnosis, Finding, MachineState
from trainatomy.results.measurement import Measurement, RankMeasurement
from trainatomy.results.memory import TOTALS
from trainatomy.results.operations import Claim, OperationBreakdown, Padding
from trainatomy.results.prediction import Plan, Prediction, Scaling
from trainatomy.results.record import Difference, History, MemoryChange, Record, SpeedChange


@dataclass(frozen=True, slots=True)
class Gaps:
    """Predicted / measured - 1 of each total; null where one of them is not known."""

    peak_allocated_bytes: float | None
    peak_reserved_bytes: float | None
    device_bytes: float | None


@dataclass(frozen=True, slots=True)
class Spreads:
    """Each figure over the completed repeats."""

    peak_allocated_bytes: Spread | None
    peak_reserved_bytes: Spread | None
    device_bytes: Spread | None
    step_seconds: Spread | None
    samples_per_second: Spread | None
    tokens_per_second: Spread | None


@dataclass(frozen=True, slots=True)
class WrittenScaling:
    """Throughput on all GPUs and on each."""

    samples_per_second: float
    samples_per_second_per_gpu: float
    efficiency: float | None


@dataclass(frozen=True, kw_only=True)
class _Row:
    """What a row has besides its prediction; figures of measured comparisons, and costs where prices are known."""

    status: RowStatus = ABSENT
    measured: Spreads = ABSENT
    gap: Gaps = ABSENT
    measurements: tuple[Measurement, ...] = ABSENT
    errors: tuple[str, ...] = ABSENT
    prediction_error: str = ABSENT
    plan: Plan
    scaling: WrittenScaling | None
    cost_per_million_samples: float | None = ABSENT


@dataclass(frozen=True, slots=True)
class Row(_Row, WrittenPrediction):
    """A training that was predicted, and measured in a measured comparison."""


@dataclass(frozen=True)
class _Workload:
    name: str
    workload: dict[str, object]


@dataclass(frozen=True, slots=True)
class UnpredictedRow(_Row, _Workload):
    """A training that could not be predicted."""

    prediction_error: str = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class Published:
    """What others measured for the rows, in the same order.

    `seconds` are for `samples`; `reversed` are pairs of rows that are published in another order.
    """

    source: str
    memory_bytes: tuple[int | None, ...]
    samples: int = ABSENT
    seconds: tuple[float | None, ...] = ABSENT
    reversed: tuple[tuple[str, str], ...] = ABSENT


@dataclass(frozen=True, slots=True)
class WrittenComparison:
    """Training runs in order; `group` and `repeats` of a measured comparison."""

    subject: str
    rows: tuple[Row | UnpredictedRow, ...]
    published: Published | None
    group: str = ABSENT
    repeats: int = ABSENT

    @classmethod
    def of(cls, comparison: Comparison) -> WrittenComparison:
        """Return the form of a comparison."""
        rows = tuple(
            _row(comparison, row, scaling) for row, scaling in zip(comparison.rows, comparison.scaling(), strict=True)
        )
        more: dict[str, Any] = {}
        if comparison.measured:
            more = {"group": comparison.group, "repeats": comparison.repeats}
        return cls(shared_subject(comparison.predictions), rows, _published(comparison), **more)


def _row(comparison: Comparison, row: ComparisonRow, scaling: Scaling | None) -> Row | UnpredictedRow:
    given: dict[str, Any] = {"plan": row.plan, "scaling": scaling and view(WrittenScaling, scaling)}
    if comparison.costs_per_hour:
        given["cost_per_million_samples"] = comparison.cost_per_million_samples(row)
    if comparison.measured:
        given |= {name: getattr(row, name) for name in ("name", "status", "measurements", "errors", "prediction_error")}
        given["measured"] = Spreads(**{each.name: row.spread(each.name) for each in fields(Spreads)})
        given["gap"] = Gaps(**{name: row.gap(name) for name in TOTALS})
    if row.prediction is None:
        return view(UnpredictedRow, row, **given)
    return Row.of(row.prediction, **given)


def _published(comparison: Comparison) -> Published | None:
    known = [row.published for row in comparison.rows if row.published is not None]
    if not known:
        return None
    more: dict[str, Any] = {}
    if comparison.samples is not None:
        pairs = tuple((first.name, second.name) for first, second in comparison.reversals())
        more = {"samples": comparison.samples, "seconds": tuple(each.seconds for each in known), "reversed": pairs}
    return Published(comparison.source, tuple(each.memory_bytes for each in known), **more)


@dataclass(frozen=True, slots=True)
class MeasurementGaps(Gaps):
    """Predicted / measured - 1 of each total, and gaps of components as shares of the measured total."""

    components: dict[str, float] | None
    ranks: dict[str, Gaps] = ABSENT


@dataclass(frozen=True, slots=True)
class AtHostPace:
    """The pace of the host beside the assumed one, and the time per step predicted at it."""

    pace: float
    step_seconds: float | None
    gap: float | None
    quiet_step_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenMeasurement(Measurement):
    """A measured training beside the prediction of the same workload."""

    prediction: WrittenPrediction | None
    gap: MeasurementGaps | None
    at_host_pace: AtHostPace | None


def measurement_to_json(measurement: Measurement, prediction: Prediction | None) -> dict[str, Any]:
    """Return a measurement with the ``prediction`` of the same workload and the ``gap`` of each common figure."""
    compared: dict[str, Any] = dict.fromkeys(("prediction", "gap", "at_host_pace"))
    if prediction is not None:
        compared = {
            "prediction": WrittenPrediction.of(prediction),
            "gap": _gaps(measurement, prediction),
            "at_host_pace": _at_host_pace(measurement, prediction),
        }
    return FORMATS["measurement"].write(view(WrittenMeasurement, measurement, **compared))


def _gaps(measurement: Measurement, prediction: Prediction) -> MeasurementGaps:
    gaps: dict[str, Any] = {name: relative_gap(measurement, prediction, name) for name in TOTALS}
    if measurement.other_ranks:
        gaps["ranks"] = {str(number): rank_gaps(rank, prediction) for number, rank in measurement.ranks.items()}
    return MeasurementGaps(**gaps, components=component_gaps(measurement, prediction))


def _at_host_pace(measurement: Measurement, prediction: Prediction) -> AtHostPace | None:
    """Return the pace of the host beside the assumed one, and the prediction at it; ``None`` if it is not known."""
    time, pace = prediction.time, measurement.host_pace
    relative = None if time is None or pace is None else time.pace_of(pace)
    if time is None or relative is None:
        return None
    predicted, measured = time.step_seconds_at(relative), measurement.step_seconds
    gap = predicted / measured - 1 if predicted is not None and measured else None
    return AtHostPace(relative, predicted, gap, time.step_seconds)


def rank_gaps(rank: RankMeasurement, prediction: Prediction) -> Gaps:
    """Return predicted / measured - 1 of each of ``TOTALS`` in a rank; one without a prediction is like rank 0."""
    memory = prediction.ranks.get(rank.rank, prediction.ranks[prediction.rank]).memory
    measured = {name: getattr(rank, name) if rank.status == "completed" else None for name in TOTALS}
    return Gaps(**{name: getattr(memory, name) / size - 1 if size else None for name, size in measured.items()})


def component_gaps(measurement: Measurement, prediction: Prediction) -> dict[str, float] | None:
    """Return (predicted - measured) / measured total by component; ``None`` without a breakdown of a completed run."""
    if measurement.memory is None or measurement.status != "completed":
        return None
    measured, total = measurement.memory.components.as_dict(), measurement.memory.components.total_bytes
    predicted = prediction.memory.components
    return {name: (predicted[name] - size) / total for name, size in measured.items()}


def relative_gap(measurement: Measurement, prediction: Prediction, name: str) -> float | None:
    """Return predicted / measured - 1 of one of ``TOTALS``; ``None`` if not measured or not completed."""
    measured: int | None = getattr(measurement, name)
    predicted = prediction.memory.totals(measurement.skipped_steps)[name]
    return predicted / measured - 1 if measured and measurement.status == "completed" else None


@dataclass(frozen=True, slots=True)
class WrittenDiagnosis:
    """Findings with their sentences, and all facts that were found."""

    healthy: bool
    findings: tuple[Finding, ...]
    machine: MachineState


@dataclass(frozen=True, slots=True)
class GPURows:
    """GPUs, each with its sources and assumptions by field."""

    rows: tuple[GPU, ...]


@dataclass(frozen=True, slots=True)
class InstanceRows:
    """Machines of clouds, each with its sources."""

    rows: tuple[Instance, ...]


@dataclass(frozen=True, slots=True)
class ArchitectureRows:
    """Architectures."""

    rows: tuple[ArchitectureEntry, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong: the exit code, the kind of error (docs/exit-codes.md), and the message."""

    exit_code: int
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class WrittenError:
    """What a command with `--json` prints when it fails."""

    error: Failure


def _fit(fit: Fit) -> WrittenFit:
    return WrittenFit.of(fit, measured=to_json(fit.measured) if fit.measured else None)


def _record(record: Record) -> Record:
    """Return a record with sentences where files have codes."""
    return replace(record, prediction=record.prediction and SaidPrediction.of(record.prediction))


_MEASUREMENT = "trainatomy/measurement/1"
_PREDICTED, _MEASURED = Derived(first={"schema": PREDICTION.name}), Derived(first={"schema": _MEASUREMENT})
_CHANGE, _RATIO = MemoryChange.change.fget, SpeedChange.ratio.fget  # type: ignore[attr-defined]
_FINDING = {
    "found": doctor_sentences.found_sentence,
    "means": doctor_sentences.meaning_sentence,
    "fix": doctor_sentences.fix_sentence,
}
FORMATS = {
    "prediction": PREDICTION,
    "prediction-2": PREDICTION_2,
    "comparison": Format(
        "trainatomy/comparison/1",
        "A comparison",
        WrittenComparison,
        WrittenComparison.of,
        {Row: _PREDICTED, Measurement: _MEASURED, Plan: Derived(first={"name": plan_name})},
    ),
    "measurement": Format(
        _MEASUREMENT, "A measurement", WrittenMeasurement, keys={WrittenPrediction: _PREDICTED, **HOST_KEYS}
    ),
    "record": Format(SCHEMA, "A record", Record, _record),
    "loader": Format("trainatomy/loader/1", "A timed loader", LoaderReport),
    "history": Format("trainatomy/history/1", "Measured runs", History),
    "difference": Format(
        "trainatomy/difference/1",
        "The difference between two measured runs",
        Difference,
        keys={MemoryChange: Derived(last={"change": _CHANGE}), SpeedChange: Derived(last={"ratio": _RATIO})},
    ),
    "operations": Format(
        "trainatomy/operations/1",
        "The operations of a step",
        OperationBreakdown,
        keys={Claim: Derived(last={"sentence": claim_sentence}), Padding: Derived(last={"how": padding_advice})},
    ),
    "diagnosis": Format(
        "trainatomy/diagnosis/1",
        "What is wrong with a machine",
        WrittenDiagnosis,
        partial(view, WrittenDiagnosis),
        {Cost: Derived(last={"sentence": doctor_sentences.cost_sentence}), Finding: Derived(last=_FINDING)},
    ),
    "gpus": Format("trainatomy/cards/1", "GPUs", GPURows),
    "instances": Format("trainatomy/instances/1", "Machines of clouds", InstanceRows),
    "architectures": Format("trainatomy/architectures/1", "Architectures", ArchitectureRows),
    "error": Format("trainatomy/error/1", "An error", WrittenError),
    "fit": replace(FIT, view=_fit),
    "fit-across": FIT_ACROSS,
    "shortage": SHORTAGE,
}
"""Formats by the names of their schemas (docs/schema)."""
_OF_RESULTS: dict[type, str] = {
    Prediction: "prediction",
    Comparison: "comparison",
    Fit: "fit",
    FitAcross: "fit-across",
    Shortage: "shortage",
    Diagnosis: "diagnosis",
    OperationBreakdown: "operations",
    Record: "record",
    LoaderReport: "loader",
    History: "history",
    Difference: "difference",
}
Result = (
    Prediction
    | Measurement
    | Comparison
    | Fit
    | FitAcross
    | Shortage
    | Diagnosis
    | OperationBreakdown
    | Record
    | LoaderReport
    | History
    | Difference
)


def to_json(value: Result, *, version: int = 1) -> dict[str, Any]:
    """Return a result as an object of plain JSON types.

    Args:
        value: A prediction, a measurement, a comparison of several training runs, the outcome of a search, a diagnosis
            of a machine, an operation breakdown, a timed loader, or a record, records of a folder, or two compared.
        version: Version of the form.  Version 2 is a draft for predictions, whose keys may still change.

    Raises:
        ValueError: There is no such version for this kind of value.
    """
    if version == 2 and isinstance(value, Prediction):
        written: dict[str, Any] = renamed_v2(PREDICTION_2.write(value))
        return written
    if version != 1:
        raise ValueError(f"there is no version {version} of the JSON of a {type(value).__name__}")
    if isinstance(value, Measurement):
        return {"schema": _MEASUREMENT, **to_plain(value)}
    return FORMATS[_OF_RESULTS[type(value)]].write(value)


def cost_to_json(prediction: Prediction, cost_per_hour: float | None) -> dict[str, Any]:
    """Return the key ``cost`` of a prediction at the price of all its GPUs, where that and its duration are known."""
    duration = prediction.duration
    return {} if duration is None or cost_per_hour is None else {"cost": to_plain(duration.cost(cost_per_hour))}


def gpus_to_json(gpus: Sequence[GPU]) -> dict[str, Any]:
    """Return GPUs under ``rows``, each with its sources and assumptions by field."""
    return FORMATS["gpus"].write(GPURows(tuple(gpus)))


def instances_to_json(machines: Sequence[Instance]) -> dict[str, Any]:
    """Return machines of clouds under ``rows``, each with its sources."""
    return FORMATS["instances"].write(InstanceRows(tuple(machines)))


def architectures_to_json(entries: Sequence[ArchitectureEntry]) -> dict[str, Any]:
    """Return architectures under ``rows``."""
    return FORMATS["architectures"].write(ArchitectureRows(tuple(entries)))


def error_to_json(exit_code: int, kind: str, message: str) -> dict[str, Any]:
    """Return what went wrong: the exit code, the kind of error (docs/exit-codes.md), and the message."""
    return FORMATS["error"].write(WrittenError(Failure(exit_code, kind, message)))
