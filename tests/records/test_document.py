"""Records to JSON and back, and the errors for files that are not records."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from trainatomy.errors import TrainatomyError
from trainatomy.records.create import SCHEMA, from_document, to_document
from trainatomy.reporters.json import FORMATS, to_json
from trainatomy.reporters.schema import schema_of
from trainatomy.results.measurement import OtherProcess, Stage
from trainatomy.results.memory import ModuleActivations
from trainatomy.results.record import Record

FILES = sorted((Path(__file__).parent / "data").glob("*.json"))


def test_records_survive_the_round_trip(vanilla: Record, failed: Record) -> None:
    prediction = vanilla.prediction
    assert prediction is not None
    full = replace(
        vanilla.measurement,
        memory=prediction.memory,
        modules=(ModuleActivations("bert.encoder.layer.*", 2**30, 24),),
        stages=(Stage("idle", None, 2**29, 0, 0), Stage("training", 2**33, 2**33, 2**32, 2**32)),
        timed_step_seconds=(0.1, 0.11),
        neighbours=(OtherProcess(4711, "python", None),),
        notes=("größer → kleiner",),
    )
    for record in (vanilla, failed, replace(vanilla, measurement=full), replace(vanilla, prediction=None)):
        assert from_document(to_document(record)) == record


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_files_of_the_first_version_can_be_read(file: Path) -> None:
    record = from_document(file.read_bytes())
    assert record.id == file.stem
    assert record.prediction is not None
    assert record.measurement.peak_allocated_bytes > 2**32


def test_a_document_equals_its_json_report_and_follows_the_schema(vanilla: Record, failed: Record) -> None:
    schema = schema_of(FORMATS["record"])
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    for record in (vanilla, failed):
        document = json.loads(to_document(record))
        assert document == json.loads(json.dumps(to_json(record)))
        assert next(iter(document)) == "schema"
        validator.validate(document)


def test_any_command_line_can_be_written(vanilla: Record) -> None:
    odd = replace(vanilla, command="trainatomy measure caf\udce9.yaml")
    assert from_document(to_document(odd)).command == "trainatomy measure caf?.yaml"


def test_values_without_a_json_type_become_text(vanilla: Record) -> None:
    live = replace(vanilla, measurement=replace(vanilla.measurement, workload={"optimizer": Path("adam"), "n": {1: 2}}))
    assert from_document(to_document(live)).measurement.workload == {"optimizer": "adam", "n": {"1": 2}}


def test_keys_added_by_later_versions_are_ignored(vanilla: Record) -> None:
    content = json.loads(to_document(vanilla))
    content["mood"] = "good"
    content["measurement"]["mood"] = ["good"]
    assert from_document(json.dumps(content).encode()) == vanilla


def _version(number: str) -> Callable[[dict[str, Any]], object]:
    return lambda content: content.update(schema=f"trainatomy/record/{number}")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_version("2"), "a record of version 2, and this trainatomy reads version 1.*pip install --upgrade"),
        (_version("0"), "version '0', which no trainatomy has written"),
        (_version("new"), "version 'new', which no trainatomy has written"),
        (lambda content: content.update(schema="trainatomy/prediction/1"), "not a record: its schema is .*prediction"),
        (lambda content: content.pop("schema"), "not a record: it names no schema"),
        (lambda content: content["measurement"].pop("driver"), "damaged record: measurement.driver: Field required$"),
        (lambda content: content.update(measurement=3, repeat="x"), r"damaged record: repeat: .*\(and 1 more\)"),
    ],
)
def test_another_version_and_damage_are_named(
    spoil: Callable[[dict[str, Any]], object], message: str, vanilla: Record
) -> None:
    content = json.loads(to_document(vanilla))
    spoil(content)
    with pytest.raises(TrainatomyError, match=message):
        from_document(json.dumps(content).encode())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty file"),
        (b'{"schema": "traina', "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 200_000, "not JSON"),
        (b"[1, 2]", "it names no schema"),
    ],
)
def test_a_file_without_a_json_object_is_reported(data: bytes, message: str) -> None:
    with pytest.raises(TrainatomyError, match=message):
        from_document(data)


def test_a_partial_record_is_ignored(vanilla: Record) -> None:
    document = to_document(vanilla)
    for length in range(0, len(document) - 2, 97):
        with pytest.raises(TrainatomyError):
            from_document(document[:length])
    assert json.loads(document)["schema"] == SCHEMA
