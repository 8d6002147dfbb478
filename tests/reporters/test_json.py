"""JSON output: stable keys, sums, the schemas that ship, and the draft of version 2."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from trainatomy.catalog.architectures import architectures
from trainatomy.catalog.gpus import gpus
from trainatomy.cli import main
from trainatomy.reporters.json import (
    architectures_to_json,
    gpus_to_json,
    measurement_to_json,
    to_json,
)
from trainatomy.reporters.sentences import reasons
from trainatomy.reporters.text.prediction import prediction_page
from trainatomy.reporters.text.rendering import render
from trainatomy.results.comparison import Comparison, ComparisonRow, PublishedFigures
from trainatomy.results.fit import Fit, FitAcross, Maximum
from trainatomy.results.measurement import Measurement
from trainatomy.results.memory import STANDARD_COMPONENTS, Components
from trainatomy.results.prediction import Prediction
from trainatomy.workload.schema import Workload

SCHEMAS = Path(__file__).parents[2] / "docs" / "schema"
RECORDS = Path(__file__).parents[1] / "records" / "data"


def strict(schema: Any) -> Any:
    """Return the schema with undescribed keys made errors."""
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
    value = to_json(Comparison(rows, source="a table"))
    assert [row["name"] for row in value["rows"]] == ["b", "a"]
    assert value["published"] == {"source": "a table", "memory_bytes": [2**30, 2**30]}
    check(value, "comparison")
    assert to_json(Comparison(rows[:1]))["published"] is not None
    plain = to_json(Comparison((replace(rows[0], published=None),)))
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
    listed = json.loads(json.dumps(gpus_to_json(gpus())))
    assert {row["id"] for row in listed["rows"]} == {gpu.id for gpu in gpus()}
    assert all(row["sources"] for row in listed["rows"])
    entries = json.loads(json.dumps(architectures_to_json(architectures())))
    assert all(row["source"] for row in entries["rows"])


def test_version_2_keys_memory_by_rank(prediction: Prediction, too_big: Prediction) -> None:
    value = to_json(prediction, version=2)
    assert value["schema"] == "trainatomy/prediction/2-draft"
    assert value["gpu"]["id"] == "v100-16gb" and "card" not in value
    (rank,) = value["ranks"]
    assert (rank["rank"], rank["headroom_bytes"]) == (0, prediction.room_bytes)
    assert sum(rank["memory"]["components"].values()) == rank["memory"]["device_bytes"]
    assert {line["component"] for line in rank["memory"]["lines"]} == {"weights", "inputs_and_workspaces"}
    check(value, "prediction-2")
    second = replace(too_big.ranks[0], rank=1)
    several = to_json(replace(prediction, other_ranks=(second,)), version=2)
    assert [each["verdict"] for each in several["ranks"]] == ["fits", "does not fit"]
    assert (several["fits"], several["verdict"]) == (False, "does not fit")
    check(several, "prediction-2")


def test_version_2_leaves_the_users_own_names_alone(prediction: Prediction) -> None:
    own = replace(prediction, workload={"card": "host"}, versions={"host": "1"})
    own = replace(own, modules=(replace(own.modules[0], module="host"),))
    value = to_json(own, version=2)
    assert (value["workload"], value["versions"]) == ({"card": "host"}, {"host": "1"})
    assert value["ranks"][0]["activations_by_module"][0]["module"] == "host"


def test_there_is_no_version_3(prediction: Prediction, measurement: Measurement) -> None:
    with pytest.raises(ValueError, match="no version 3 of the JSON of a Prediction"):
        to_json(prediction, version=3)
    with pytest.raises(ValueError, match="no version 2 of the JSON of a Measurement"):
        to_json(measurement, version=2)


def test_components_that_only_some_trainings_have_are_flat_and_come_back(prediction: Prediction) -> None:
    components = replace(prediction.memory.components, others={"gathered_weights": 1024})
    more = replace(prediction, memory=replace(prediction.memory, components=components))
    written = to_json(more)["memory"]["components"]
    assert written["gathered_weights"] == more.memory.components["gathered_weights"] == 1024
    assert list(written)[-3:] == ["gathered_weights", "cache", "context"]
    assert sum(written.values()) == components.total_bytes
    assert Components.from_dict(written) == components
    check(to_json(more), "prediction")
    assert "gathered weights" in render(prediction_page(more), 80)


def test_codes_are_written_out_as_sentences(prediction: Prediction) -> None:
    value = to_json(prediction)
    assert [fact["value"] for fact in value["facts"]] == ["3", "default settings", "512 MiB", "16.0 GiB"]
    assert value["facts"][2]["amount"] == 512 * 2**20
    assert value["bytes_per_parameter"]["reasons"][0].startswith("not all gradients exist at the peak")
    for code, part in (
        ("autocast_copies_not_at_peak", "autocast holds 1.00 at the peak"),
        ("frozen_parameters", "only 268,435,456 of 268,435,456 parameters are trained"),
        ("low_precision_parameters", "kept in 16 bits"),
        ("optimizer_states_not_created", "before the optimizer has created its states"),
        ("sharded", "each GPU holds a part"),
    ):
        figures = replace(prediction.bytes_per_parameter, reasons=(code,))
        (reason,) = to_json(replace(prediction, bytes_per_parameter=figures))["bytes_per_parameter"]["reasons"]
        assert part in reason


def test_what_is_trained_in_32_bits_is_not_said_to_be_kept_in_16(prediction: Prediction) -> None:
    """Adapters over frozen weights of 16 bits are in float32, and their gradients and states with them."""
    figures = replace(prediction.bytes_per_parameter, reasons=("low_precision_parameters",))
    (reason,) = reasons(replace(prediction, bytes_per_parameter=figures))
    assert reason == "weights, gradients and optimizer states are kept in 16 bits: 2 bytes each, not 4"
    some = replace(figures, trainable_parameters=figures.parameters // 100)
    (reason,) = reasons(replace(prediction, bytes_per_parameter=some))
    assert reason == "frozen weights are kept in 16 bits: 2 bytes each, not 4"


def test_the_command_prints_the_draft_of_version_2(
    prediction: Prediction, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainatomy.api.predict_training", lambda *_, **__: prediction)
    for version, schema in ((1, "trainatomy/prediction/1"), (2, "trainatomy/prediction/2-draft")):
        assert main(["predict", "--model", "gpt2", "--gpu", "t4", "--json", "--json-version", str(version)]) == 0
        assert json.loads(capsys.readouterr().out)["schema"] == schema


def test_a_search_follows_its_schema(fit: Fit, nothing_fits: Fit, measurement: Measurement) -> None:
    assert fit.best is not None and nothing_fits.shortage is not None
    check(to_json(fit), "fit")
    check(to_json(nothing_fits), "fit")
    rows = (ComparisonRow(fit.best.name, {}, fit.best.prediction, measurements=(measurement,)),)
    largest = Maximum("batch", 8, 110_000_000, 12, 18 * 2**30)
    check(to_json(replace(fit, measured=Comparison(rows), maximum=largest, interrupted=True)), "fit")
    check(to_json(nothing_fits.shortage), "shortage")


def test_a_search_on_several_gpus_of_a_kind_follows_its_schema(spread_fit: Fit) -> None:
    value = to_json(spread_fit)
    check(value, "fit")
    assert [each["plan"]["gpus"] for each in value["by_gpus"]] == [1, 2, 4, 8]
    best = value["best"]
    assert best["samples_per_second"] == 4 * best["time"]["samples_per_second"]
    low, high = best["time"]["samples_per_second_interval"]
    assert low < best["time"]["samples_per_second"] < high
    assert value["settings"]["launch"] == "torchrun --nproc-per-node 4 train.py"


def test_keys_of_a_search_that_are_kept(fit: Fit, nothing_fits: Fit) -> None:
    value = to_json(fit)
    assert value["schema"] == "trainatomy/fit/1"
    best = value["best"]
    assert Workload.from_mapping(best["workload"]).train.per_device_train_batch_size == 8
    assert best["memory"]["device_bytes"] == 12 * 2**30 == sum(best["memory"]["components"].values())
    assert best["time"]["samples_per_second"] == 40
    assert best["time"]["samples_per_second_interval"] == pytest.approx([40 / 1.5, 50])
    assert [each["time"]["samples_per_second"] for each in value["candidates"]] == sorted(
        (each["time"]["samples_per_second"] for each in value["candidates"]), reverse=True
    )
    assert set(value["candidates"][0]["memory"]) == {"peak_allocated_bytes", "peak_reserved_bytes", "device_bytes"}
    assert [each["changes"][1]["option"] for each in value["ties"]] == ["expandable_segments"]
    assert [each["change"]["permission"] for each in value["prices"]] == [
        "",
        "",
        "optimizer",
        "sequence-length",
        "lora",
    ]
    assert value["prices"][2]["change"]["may_change"] == "Optimizer states are rounded to 8 bits."
    assert value["limits"] == {
        "gpu_memory_bytes": 17 * 2**30, "headroom": 0.0588, "usable_bytes": 16 * 2**30, "maximum": None
    }  # fmt: skip
    assert yaml.safe_load(value["settings"]["yaml"])["train"]["per_device_train_batch_size"] == 8
    nothing = to_json(nothing_fits)
    assert (nothing["best"], nothing["settings"], nothing["candidates"]) == (None, None, [])
    assert [each["kind"] for each in nothing["remedies"]] == ["changes training", "same training", "larger GPU"]


def test_notes_of_a_search_are_sentences(fit: Fit) -> None:
    notes = to_json(replace(fit, notes=("few_batch_sizes", "a code of the future")))["notes"]
    assert notes[0].startswith("The effective batch size has few divisors") and notes[1] == "a code of the future"


def test_a_search_on_several_gpus_follows_its_schema(across: FitAcross) -> None:
    value = to_json(across)
    check(value, "fit-across")
    assert [each["best"] is None for each in value["options"]] == [False, False, True]
    assert value["options"][0]["cost_per_million_samples"] == pytest.approx(3.0 / 3600 / 40 * 1e6)
    assert value["options"][2]["missing_bytes"] == 2 * 2**30


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (gpus_to_json(gpus()), "gpus"),
        (architectures_to_json(architectures()), "architectures"),
    ],
)
def test_lists_follow_their_schemas(value: dict[str, Any], name: str) -> None:
    check(value, name)


@pytest.mark.parametrize(("command", "name"), [(["history"], "history"), (["diff", "3da9", "c6fa"], "difference")])
def test_records_follow_their_schemas(command: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--records", str(RECORDS), "--json"]) == 0
    check(json.loads(capsys.readouterr().out), name)


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (["predict", "--json", "missing.yaml"], 2, "WorkloadError"),
        (["fit", "--model", "gpt2", "--gpu", "none", "--json"], 2, "WorkloadError"),
        (["compare", "--json", "--bogus"], 2, "UsageError"),
        (["predict", "--model", "--json"], 2, "UsageError"),
        (["run", "--json", "missing.py"], 2, "WorkloadError"),
        (["show", "--json", "none"], 1, "TrainatomyError"),
        (["gpus", "none", "--json"], 2, "WorkloadError"),
    ],
)
def test_a_command_that_fails_prints_its_error_as_json(
    arguments: list[str], code: int, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    check(found, "error")
    assert found["error"]["exit_code"] == code
    assert found["error"]["kind"] == kind
    assert captured.err.startswith(f"error: {found['error']['message']}")


@pytest.mark.parametrize(
    "arguments", [["predict", "missing.yaml"], ["run", "missing.py", "--json"], ["run", "-m", "missing", "--json"]]
)
def test_stdout_stays_empty_without_json(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) != 0
    assert capsys.readouterr().out == ""
