"""What ``--json`` prints: the stable keys, the sums, and the schema that ships."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from trainatomy.catalog.architectures import architectures
from trainatomy.catalog.gpus import gpus
from trainatomy.reporters.json import (
    architectures_to_json,
    cards_to_json,
    comparison_to_json,
    measurement_to_json,
    to_json,
)
from trainatomy.results.comparison import Comparison, ComparisonRow, PublishedFigures
from trainatomy.results.measurement import Measurement
from trainatomy.results.memory import STANDARD_COMPONENTS
from trainatomy.results.prediction import Prediction

SCHEMAS = Path(__file__).parents[2] / "docs" / "schema"


def strict(schema: Any) -> Any:
    """The same schema, but a key that it does not describe is an error."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    return {"additionalProperties": False, **made} if "properties" in made and made.get("type") == "object" else made


def check(value: dict[str, Any], name: str) -> None:
    schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(strict(schema)).validate(json.loads(json.dumps(value)))


@pytest.mark.parametrize("which", ["prediction", "too_big", "timeline"])
def test_a_prediction_follows_its_schema(which: str, request: pytest.FixtureRequest) -> None:
    check(to_json(request.getfixturevalue(which)), "prediction")


def test_the_schema_refuses_what_is_wrong(prediction: Prediction) -> None:
    good = to_json(prediction)
    for spoil in (
        lambda value: value["memory"].pop("device_bytes"),
        lambda value: value["memory"]["components"].update(weights=1.5),
        lambda value: value.update(verdict="perhaps"),
        lambda value: value.update(surprise=1),
    ):
        bad = copy.deepcopy(good)
        spoil(bad)
        with pytest.raises(jsonschema.ValidationError):
            check(bad, "prediction")


def test_stable_keys(prediction: Prediction) -> None:
    value = to_json(prediction)
    assert value["schema"] == "trainatomy/prediction/1"
    assert value["fits"] is True
    memory = value["memory"]
    assert {"peak_allocated_bytes", "peak_reserved_bytes", "device_bytes"} <= memory.keys()
    assert list(memory["components"]) == list(STANDARD_COMPONENTS)
    assert sum(memory["components"].values()) == memory["device_bytes"]


def test_a_comparison_keeps_the_order(named: Callable[[str, int], Prediction]) -> None:
    rows = tuple(ComparisonRow(name, {}, named(name, 0), published=PublishedFigures(2**30)) for name in "ba")
    value = comparison_to_json(Comparison(rows, source="a table"))
    assert [row["name"] for row in value["rows"]] == ["b", "a"]
    assert value["published"] == {"source": "a table", "memory_bytes": [2**30, 2**30]}
    check(value, "comparison")
    assert comparison_to_json(Comparison(rows[:1]))["published"] is not None
    plain = comparison_to_json(Comparison((replace(rows[0], published=None),)))
    assert plain["published"] is None
    check(plain, "comparison")


def test_a_measurement_has_the_gap(measurement: Measurement, prediction: Prediction) -> None:
    value = measurement_to_json(measurement, prediction)
    assert value["gap"]["peak_allocated_bytes"] == pytest.approx(1 / 1.01 - 1)
    assert value["gap"]["device_bytes"] == 0
    check(value, "measurement")
    check(measurement_to_json(measurement, None), "measurement")


def test_no_gap_where_nothing_could_be_measured(measurement: Measurement, prediction: Prediction) -> None:
    out_of_memory = replace(measurement, status="out of memory", device_bytes=None)
    value = measurement_to_json(out_of_memory, prediction)
    assert set(value["gap"].values()) == {None}
    check(value, "measurement")


def test_catalogues_can_be_written() -> None:
    listed = json.loads(json.dumps(cards_to_json(gpus())))
    assert {row["id"] for row in listed["rows"]} == {gpu.id for gpu in gpus()}
    assert all(row["sources"] for row in listed["rows"])
    entries = json.loads(json.dumps(architectures_to_json(architectures())))
    assert all(row["source"] for row in entries["rows"])
