"""Result values as JSON objects: what ``--json`` prints (docs/json.md), with the name and version of their schema.

A diagnosis as a JSON object: what ``trainatomy doctor --json`` prints.

The draft of version 2 of a prediction's JSON: memory by rank, and the names that its keys will have.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from trainatomy.catalog.architectures import ArchitectureEntry
from trainatomy.catalog.gpus import GPU
from trainatomy.records.create import SCHEMA, to_plain
from trainatomy.reporters.doctor_sentences import cost_sentence, fix_sentence, found_sentence, meaning_sentence
from trainatomy.reporters.search_json import fit_across_to_json, plan_to_json, search_to_json, shortage_to_json
from trainatomy.reporters.sentences import claim_sentence, fact_source, fact_value, padding_advice, reasons
from trainatomy.reporters.subject_sentences import shared_subject, subject_line
from trainatomy.results.comparison import Comparison, ComparisonRow
from trainatomy.results.fit import Fit, FitAcross, Shortage
from trainatomy.results.lengths import LengthsPrediction
from trainatomy.results.loader import LoaderReport
from trainatomy.results.machine import Diagnosis, Finding
from trainatomy.results.measurement import Measurement, RankMeasurement
from trainatomy.results.memory import TOTALS, Verdict
from trainatomy.results.operations import OperationBreakdown, Padding
from trainatomy.results.prediction import (
    BytesPerParameter,
    Fact,
    GPUSummary,
    Prediction,
    RankPrediction,
    Scaling,
    Subject,
)
from trainatomy.results.record import Difference, History, Record
from trainatomy.results.script import ScriptRun
from trainatomy.results.tasks import Checkpoint, Evaluation, Generation, RestoredCheckpoint
from trainatomy.results.time import Time

PREDICTION = "trainatomy/prediction/1"
COMPARISON = "trainatomy/comparison/1"
MEASUREMENT = "trainatomy/measurement/1"
RECORD = SCHEMA
HISTORY = "trainatomy/history/1"
DIFFERENCE = "trainatomy/difference/1"
OPERATIONS = "trainatomy/operations/1"
GPUS = "trainatomy/cards/1"
LOADER = "trainatomy/loader/1"
ARCHITECTURES = "trainatomy/architectures/1"
ERROR = "trainatomy/error/1"

SPREADS = (*TOTALS, "step_seconds", "samples_per_second", "tokens_per_second")
"""The figures whose spread over the repeats a measured comparison gives."""


def to_json(
    value: Prediction | Measurement | Comparison | Fit | FitAcross | Shortage | Diagnosis, *, version: int = 1
) -> dict[str, Any]:
    """Return a result as an object of plain JSON types.

    Args:
        value: A prediction, a measurement, a comparison of several training runs, the outcome of a search, or a
            diagnosis of a machine.
        version: Version of the form.  Version 2 is a draft for predictions, whose keys may still change.

    Raises:
        ValueError: There is no such version for this kind of value.
    """
    if version == 2 and isinstance(value, Prediction):
        return {"schema": PREDICTION_2, **renamed_v2(to_plain(PredictionV2.of(value)))}
    if version != 1:
        raise ValueError(f"there is no version {version} of the JSON of a {type(value).__name__}")
    if isinstance(value, Diagnosis):
        return diagnosis_to_json(value)
    if isinstance(value, Comparison):
        return comparison_to_json(value)
    if isinstance(value, Fit):
        return fit_to_json(value)
    if isinstance(value, FitAcross):
        return fit_across_to_json(value)
    if isinstance(value, Shortage):
        return shortage_to_json(value)
    if isinstance(value, Prediction):
        return {"schema": PREDICTION, **_predicted(value), "duration": to_plain(value.duration)}
    return {"schema": MEASUREMENT, **to_plain(value)}


def comparison_to_json(comparison: Comparison) -> dict[str, Any]:
    """Return the rows in order, each a prediction, with measured figures in a measured comparison.

    ``published`` holds what others measured for the rows, in the same order, or null; ``seconds`` are for ``samples``.
    """
    known = [row.published for row in comparison.rows if row.published is not None]
    published: dict[str, Any] = {
        "source": comparison.source,
        "memory_bytes": [figures.memory_bytes for figures in known],
    }
    if comparison.samples is not None:
        published |= {"samples": comparison.samples, "seconds": [figures.seconds for figures in known]}
        published["reversed"] = [[row.name for row in pair] for pair in comparison.reversals()]
    rows = [
        {**_row(row, measured=comparison.measured), "plan": plan_to_json(row.plan), "scaling": _scaling(scaling)}
        for row, scaling in zip(comparison.rows, comparison.scaling(), strict=True)
    ]
    if comparison.costs_per_hour:
        for row, made in zip(comparison.rows, rows, strict=True):
            made["cost_per_million_samples"] = comparison.cost_per_million_samples(row)
    value = {
        "schema": COMPARISON,
        "subject": shared_subject(comparison.predictions),
        "rows": rows,
        "published": published if known else None,
    }
    return {**value, "group": comparison.group, "repeats": comparison.repeats} if comparison.measured else value


def _row(row: ComparisonRow, *, measured: bool) -> dict[str, Any]:
    """Return a prediction (or name and workload without one), and the measured figures in a measured comparison."""
    made = to_json(row.prediction) if row.prediction else {"name": row.name, "workload": to_plain(row.workload)}
    if not measured:
        return made if row.prediction else {**made, "prediction_error": row.prediction_error}
    return {
        **made,
        "name": row.name,
        "status": row.status,
        "measured": {name: to_plain(row.spread(name)) for name in SPREADS},
        "gap": {name: row.gap(name) for name in TOTALS},
        "measurements": [to_json(each) for each in row.measurements],
        "errors": list(row.errors),
        "prediction_error": row.prediction_error,
    }


def _scaling(scaling: Scaling | None) -> dict[str, Any] | None:
    """Return the throughput on all GPUs and on each."""
    if scaling is None:
        return None
    return {
        "samples_per_second": scaling.samples_per_second,
        "samples_per_second_per_gpu": scaling.samples_per_second_per_gpu,
        "efficiency": scaling.efficiency,
    }


def measurement_to_json(measurement: Measurement, prediction: Prediction | None) -> dict[str, Any]:
    """Return a measurement with the ``prediction`` of the same workload and the ``gap`` of each common figure."""
    gap: dict[str, Any] | None = None
    if prediction is not None:
        gap = {name: relative_gap(measurement, prediction, name) for name in TOTALS}
        gap["components"] = component_gaps(measurement, prediction)
        if measurement.other_ranks:
            gap["ranks"] = {str(number): rank_gaps(rank, prediction) for number, rank in measurement.ranks.items()}
    at_pace = None if prediction is None else _at_host_pace(measurement, prediction)
    return {
        **to_json(measurement),
        "prediction": prediction and to_json(prediction),
        "gap": gap,
        "at_host_pace": at_pace,
    }


def _at_host_pace(measurement: Measurement, prediction: Prediction) -> dict[str, float | None] | None:
    """Return the pace of the host beside the assumed one, and the prediction at it; ``None`` if it is not known."""
    time, pace = prediction.time, measurement.host_pace
    relative = None if time is None or pace is None else time.pace_of(pace)
    if time is None or relative is None:
        return None
    predicted, measured = time.step_seconds_at(relative), measurement.step_seconds
    gap = predicted / measured - 1 if predicted is not None and measured else None
    quiet = time.step_seconds
    return {"pace": relative, "step_seconds": predicted, "gap": gap, "quiet_step_seconds": quiet}


def rank_gaps(rank: RankMeasurement, prediction: Prediction) -> dict[str, float | None]:
    """Return predicted / measured - 1 of each of ``TOTALS`` in a rank; one without a prediction is like rank 0."""
    memory = prediction.ranks.get(rank.rank, prediction.ranks[prediction.rank]).memory
    measured = {name: getattr(rank, name) if rank.status == "completed" else None for name in TOTALS}
    return {name: getattr(memory, name) / size - 1 if size else None for name, size in measured.items()}


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


def record_to_json(record: Record) -> dict[str, Any]:
    """Return a record with the keys of its file; values that files keep as codes are sentences here."""
    prediction = record.prediction and _predicted(record.prediction)
    return {"schema": RECORD, **to_plain(record), "prediction": prediction}


def loader_to_json(report: LoaderReport) -> dict[str, Any]:
    """Return a timed DataLoader: ``timings`` by settings, ``best`` a place among them."""
    return {"schema": LOADER, **to_plain(report)}


def history_to_json(history: History) -> dict[str, Any]:
    """Return the rows under ``records``, oldest first, and unreadable files under ``skipped``."""
    return {"schema": HISTORY, **to_plain(history)}


def difference_to_json(difference: Difference) -> dict[str, Any]:
    """Return a difference, with the change or ratio of each figure beside its values."""
    shifts = ("components", "lines", "figures", "nvml")
    changes = {
        name: [{**to_plain(each), "change": each.change} for each in getattr(difference, name)] for name in shifts
    }
    paces = [{**to_plain(each), "ratio": each.ratio} for each in difference.paces]
    return {"schema": DIFFERENCE, **to_plain(difference), **changes, "paces": paces}


def operations_to_json(breakdown: OperationBreakdown) -> dict[str, Any]:
    """Return an operation breakdown, with sentences for claims and paddings."""
    plain = to_plain(breakdown)
    claims = [{**to_plain(claim), "sentence": claim_sentence(claim)} for claim in breakdown.claims]
    paddings = [{**to_plain(padding), "how": padding_advice(padding)} for padding in breakdown.paddings]
    return {"schema": OPERATIONS, **plain, "claims": claims, "paddings": paddings}


def fit_to_json(fit: Fit) -> dict[str, Any]:
    """Return the outcome of a search; its measured runs are a comparison."""
    return search_to_json(fit, measured=comparison_to_json(fit.measured) if fit.measured else None)


def gpus_to_json(gpus: Sequence[GPU]) -> dict[str, Any]:
    """Return GPUs under ``rows``, each with its sources and assumptions by field."""
    return {"schema": GPUS, "rows": [to_plain(gpu) for gpu in gpus]}


def architectures_to_json(entries: Sequence[ArchitectureEntry]) -> dict[str, Any]:
    """Return architectures under ``rows``."""
    return {"schema": ARCHITECTURES, "rows": [to_plain(entry) for entry in entries]}


def error_to_json(exit_code: int, kind: str, message: str) -> dict[str, Any]:
    """Return what went wrong: the exit code, the kind of error (docs/exit-codes.md), and the message."""
    return {"schema": ERROR, "error": {"exit_code": exit_code, "kind": kind, "message": message}}


def _predicted(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as plain JSON types, with the sentences that version 1 gives as text."""
    facts = [{**to_plain(fact), "value": fact_value(fact), "source": fact_source(fact)} for fact in prediction.facts]
    figures = {**to_plain(prediction.bytes_per_parameter), "reasons": reasons(prediction)}
    subject = _subject(prediction)
    return {**to_plain(prediction), "bytes_per_parameter": figures, "facts": facts, "subject": subject}


def _subject(prediction: Prediction) -> dict[str, Any] | None:
    """Return what was predicted, with the line that pages show."""
    if prediction.subject is None:
        return None
    return {"line": subject_line(prediction), **to_plain(prediction.subject)}


DIAGNOSIS = "trainatomy/diagnosis/1"


def diagnosis_to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return findings, each with its sentences, and all facts that were found."""
    return {
        "schema": DIAGNOSIS,
        "healthy": diagnosis.healthy,
        "findings": [_finding(finding) for finding in diagnosis.findings],
        "machine": to_plain(diagnosis.machine),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        **to_plain(finding),
        "costs": [{**to_plain(cost), "sentence": cost_sentence(cost)} for cost in finding.costs],
        "found": found_sentence(finding),
        "means": meaning_sentence(finding),
        "fix": fix_sentence(finding),
    }


PREDICTION_2 = "trainatomy/prediction/2-draft"

_SEVERITY: tuple[Verdict, ...] = ("fits", "tight", "does not fit")


@dataclass(frozen=True, slots=True)
class PredictionV2:
    """A predicted training, with its memory by rank.

    A training fits if all ranks do; `verdict` is the worst one of any rank.  Components of memory may be more than
    the eight standard ones.  Facts with an `amount` have an empty `value`; `reasons` are codes.
    """

    name: str
    workload: dict[str, object]
    card: GPUSummary
    fits: bool
    verdict: Verdict
    ranks: tuple[RankPrediction, ...]
    bytes_per_parameter: BytesPerParameter
    facts: tuple[Fact, ...]
    notes: tuple[str, ...]
    time: Time | None
    seconds_taken: float
    versions: dict[str, str]
    without_workspace: int
    trials: int
    evaluation: Evaluation | None = None
    generation: Generation | None = None
    checkpoint: Checkpoint | None = None
    restored: tuple[RestoredCheckpoint, ...] = ()
    lengths: LengthsPrediction | None = None
    script: ScriptRun | None = None
    subject: Subject | None = None
    leading_notes: tuple[str, ...] = ()
    paddings: tuple[Padding, ...] = ()

    @classmethod
    def of(cls, prediction: Prediction) -> PredictionV2:
        """Return the form of version 2 of a prediction."""
        ranks = tuple(prediction.ranks.values())
        made: dict[str, Any] = {"ranks": ranks, "fits": all(each.fits for each in ranks)}
        made["verdict"] = max((each.verdict for each in ranks), key=_SEVERITY.index)
        kept = {each.name: getattr(prediction, each.name) for each in fields(cls) if each.name not in made}
        return cls(**kept, **made)


_NAMES_V2 = {
    "card": "gpu",
    "functionality": "inputs_and_workspaces",
    "general_rule_only": "operators_by_traffic_only",
    "host": "cpu",
    "host_seconds": "cpu_seconds",
    "modules": "activations_by_module",
    "num_alloc_retries": "allocator_retries",
    "priced_by": "kernel_times_from",
    "room_bytes": "headroom_bytes",
    "slow_host": "slow_cpu",
    "trials": "convolutions_with_trials",
    "without_workspace": "convolutions_without_workspace",
}
"""Keys of version 1 that have another name in version 2."""


def renamed_v2(value: Any, key: str = "") -> Any:
    """Return a JSON value or a JSON Schema of version 1 with the names of version 2."""
    if isinstance(value, dict):
        if key in ("workload", "versions"):
            return value
        return {_NAMES_V2.get(name, name): renamed_v2(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [renamed_v2(item, key) for item in value]
    if key in ("component", "bound_by", "required", "enum"):
        return _NAMES_V2.get(value, value)
    if key == "description":
        return re.sub(r"`(\w+)`|\b\w+_\w+\b", _renamed_word, value)
    return value


def _renamed_word(match: re.Match[str]) -> str:
    word = match[0].strip("`")
    return match[0].replace(word, _NAMES_V2.get(word, word))
