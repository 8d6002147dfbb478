"""Values as JSON objects: what ``--json`` prints (docs/json.md), each with the name and version of its schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from trainatomy.results.bill import Measurement, Prediction

PREDICTION = "trainatomy/prediction/1"
COMPARISON = "trainatomy/comparison/1"
MEASUREMENT = "trainatomy/measurement/1"

COMPARED = ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes")
"""The figures that a measurement and a prediction have in common."""


def to_json(value: Prediction | Measurement) -> dict[str, Any]:
    """A prediction or a measurement as an object of plain JSON types; the keys are those of the dataclass."""
    schema = PREDICTION if isinstance(value, Prediction) else MEASUREMENT
    return {"schema": schema, **_plain(asdict(value))}


def comparison_to_json(predictions: Sequence[Prediction], published: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Several predictions under ``rows``, in order; ``published`` holds what a source says of the same rows, where there is one."""
    rows = [to_json(prediction) for prediction in predictions]
    return {"schema": COMPARISON, "rows": rows, **({"published": list(published)} if published else {})}


def measurement_to_json(measurement: Measurement, prediction: Prediction | None) -> dict[str, Any]:
    """A measurement with the ``prediction`` of the same workload and the relative ``gap`` (predicted / measured - 1) of each figure."""
    gap = None if prediction is None else {name: relative_gap(measurement, prediction, name) for name in COMPARED}
    return {**to_json(measurement), "prediction": prediction and to_json(prediction), "gap": gap}


def relative_gap(measurement: Measurement, prediction: Prediction, name: str) -> float | None:
    """predicted / measured - 1 of one of ``COMPARED``; None where it could not be measured or the run did not complete."""
    measured: int | None = getattr(measurement, name)
    predicted: int = getattr(prediction.memory, name)
    return predicted / measured - 1 if measured and measurement.status == "completed" else None


def _plain(value: Any) -> Any:
    """Tuples as lists; everything else as it is, and text for what JSON cannot hold (a path in a workload)."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
