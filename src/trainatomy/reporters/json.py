"""Values as JSON objects: what ``--json`` prints (docs/json.md), each with the name and version of its schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainatomy.catalog.architectures import ArchitectureEntry
from trainatomy.catalog.gpus import GPU
from trainatomy.records.document import SCHEMA, to_plain
from trainatomy.reporters.sentences import fact_source, fact_value, reasons
from trainatomy.results.comparison import Comparison, ComparisonRow
from trainatomy.results.difference import Difference
from trainatomy.results.measurement import Measurement
from trainatomy.results.prediction import Prediction
from trainatomy.results.record import History, Record

PREDICTION = "trainatomy/prediction/1"
COMPARISON = "trainatomy/comparison/1"
MEASUREMENT = "trainatomy/measurement/1"
RECORD = SCHEMA
HISTORY = "trainatomy/history/1"
DIFFERENCE = "trainatomy/difference/1"
CARDS = "trainatomy/cards/1"
ARCHITECTURES = "trainatomy/architectures/1"

COMPARED = ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes")
"""The figures that a measurement and a prediction have in common."""

SPREADS = (*COMPARED, "step_seconds", "samples_per_second", "tokens_per_second")
"""The figures of which a measured comparison gives median, least and most over the repeats."""


def to_json(value: Prediction | Measurement | Comparison) -> dict[str, Any]:
    """A prediction or a measurement as an object of plain JSON types, the keys those of the dataclass; a comparison as
    ``comparison_to_json`` has it."""
    if isinstance(value, Comparison):
        return comparison_to_json(value)
    if isinstance(value, Prediction):
        return {"schema": PREDICTION, **_predicted(value)}
    return {"schema": MEASUREMENT, **to_plain(value)}


def comparison_to_json(comparison: Comparison) -> dict[str, Any]:
    """Rows in order under ``rows``: each its prediction; in a measured comparison with what was measured beside it.

    Under ``published`` what others measured of the rows, in the same order, or null.
    """
    known = [row.published for row in comparison.rows if row.published is not None]
    published = {"source": comparison.source, "memory_bytes": [figures.memory_bytes for figures in known]}
    rows = [_row(row, measured=comparison.measured) for row in comparison.rows]
    value = {"schema": COMPARISON, "rows": rows, "published": published if known else None}
    return {**value, "group": comparison.group, "repeats": comparison.repeats} if comparison.measured else value


def _row(row: ComparisonRow, *, measured: bool) -> dict[str, Any]:
    """A prediction, and in a measured comparison more keys; without a prediction those and what was asked for."""
    made = to_json(row.prediction) if row.prediction else {"name": row.name, "workload": to_plain(row.workload)}
    if not measured:
        return made
    return {
        **made,
        "name": row.name,
        "status": row.status,
        "measured": {name: to_plain(row.spread(name)) for name in SPREADS},
        "gap": {name: row.gap(name) for name in COMPARED},
        "measurements": [to_json(each) for each in row.measurements],
        "errors": list(row.errors),
        "prediction_error": row.prediction_error,
    }


def measurement_to_json(measurement: Measurement, prediction: Prediction | None) -> dict[str, Any]:
    """A measurement with the ``prediction`` of the same workload and the ``gap`` of each figure that both have."""
    gap: dict[str, Any] | None = None
    if prediction is not None:
        gap = {name: relative_gap(measurement, prediction, name) for name in COMPARED}
        gap["components"] = component_gaps(measurement, prediction)
    return {**to_json(measurement), "prediction": prediction and to_json(prediction), "gap": gap}


def component_gaps(measurement: Measurement, prediction: Prediction) -> dict[str, float] | None:
    """(predicted - measured) / measured device memory of each component; None where there is no bill of a peak."""
    if measurement.memory is None or measurement.status != "completed":
        return None
    measured, total = measurement.memory.components.as_dict(), measurement.memory.components.total_bytes
    predicted = prediction.memory.components.as_dict()
    return {name: (predicted[name] - size) / total for name, size in measured.items()}


def relative_gap(measurement: Measurement, prediction: Prediction, name: str) -> float | None:
    """predicted / measured - 1 of one of ``COMPARED``; None where it was not measured or the run did not complete."""
    measured: int | None = getattr(measurement, name)
    predicted: int = getattr(prediction.memory, name)
    return predicted / measured - 1 if measured and measurement.status == "completed" else None


def record_to_json(record: Record) -> dict[str, Any]:
    """A record as its file has it."""
    prediction = record.prediction and _predicted(record.prediction)
    return {"schema": RECORD, **to_plain(record), "prediction": prediction}


def history_to_json(history: History) -> dict[str, Any]:
    """Rows under ``records``, oldest first, and what could not be read under ``skipped``."""
    return {"schema": HISTORY, **to_plain(history)}


def difference_to_json(difference: Difference) -> dict[str, Any]:
    """What changed between two records, with the change of each figure beside its values."""
    shifts = ("components", "lines", "figures", "nvml")
    changes = {
        name: [{**to_plain(each), "change": each.change} for each in getattr(difference, name)] for name in shifts
    }
    paces = [{**to_plain(each), "ratio": each.ratio} for each in difference.paces]
    return {"schema": DIFFERENCE, **to_plain(difference), **changes, "paces": paces}


def cards_to_json(cards: Sequence[GPU]) -> dict[str, Any]:
    """Cards under ``rows``, each with its sources and assumptions by field."""
    return {"schema": CARDS, "rows": [to_plain(gpu) for gpu in cards]}


def architectures_to_json(entries: Sequence[ArchitectureEntry]) -> dict[str, Any]:
    """Architectures under ``rows``."""
    return {"schema": ARCHITECTURES, "rows": [to_plain(entry) for entry in entries]}


def _predicted(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as plain JSON types, with the sentences that version 1 gives as text."""
    facts = [{**to_plain(fact), "value": fact_value(fact), "source": fact_source(fact)} for fact in prediction.facts]
    figures = {**to_plain(prediction.bytes_per_parameter), "reasons": reasons(prediction)}
    return {**to_plain(prediction), "bytes_per_parameter": figures, "facts": facts}
