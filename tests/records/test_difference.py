"""The difference of two records: as values, as a sentence and as a page."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import trainatomy
from trainatomy.records.reading import difference
from trainatomy.records.store import Store
from trainatomy.reporters.json import to_json
from trainatomy.reporters.text.history import answer, difference_page, history_page
from trainatomy.reporters.text.rendering import render
from trainatomy.results.measurement import Measurement
from trainatomy.results.memory import Line, Memory
from trainatomy.results.record import History, Record, SetupChange, Skipped

GIB = 2**30


def measured(record: Record, **changes: object) -> Record:
    return replace(record, measurement=replace(record.measurement, **changes))  # type: ignore[arg-type]


def with_breakdown(record: Record, *lines: Line, activations: int) -> Record:
    """Return the record with these measured activations and lines."""
    assert record.prediction is not None
    memory: Memory = record.prediction.memory
    breakdown = replace(memory, components=replace(memory.components, activations=activations), lines=lines)
    return measured(record, memory=breakdown)


def test_changed_settings_are_listed_by_key(vanilla: Record, checkpointed: Record) -> None:
    assert difference(vanilla, checkpointed).changes == (
        SetupChange("workload", "train.per_device_train_batch_size", 4, 1),
        SetupChange("workload", "train.gradient_accumulation_steps", 1, 4),
        SetupChange("workload", "train.gradient_checkpointing", False, True),
    )


def test_changed_machine_and_versions_are_listed(vanilla: Record) -> None:
    versions = {**vanilla.measurement.versions, "torch": "2.13.0", "peft": "0.21.0"}
    other = measured(vanilla, gpu="NVIDIA H100", driver="600.1", versions=versions, name="another")
    assert difference(vanilla, other).changes == (
        SetupChange("gpu", "gpu", "NVIDIA H200", "NVIDIA H100"),
        SetupChange("driver", "driver", "580.159.04", "600.1"),
        SetupChange("versions", "torch", "2.11.0", "2.13.0"),
        SetupChange("versions", "peft", None, "0.21.0"),
    )


def test_a_section_that_one_side_does_not_have(vanilla: Record) -> None:
    workload = vanilla.measurement.workload
    lora = {**workload, "model": {**workload["model"], "lora": {"r": 4}}}  # type: ignore[dict-item]
    changes = {
        change.name: (change.before, change.after)
        for change in difference(vanilla, measured(vanilla, workload=lora)).changes
    }
    assert changes["model.lora.r"] == (None, 4)
    assert all(name.startswith("model.lora.") for name in changes)


def test_workloads_that_this_version_cannot_read_are_compared_as_written(vanilla: Record) -> None:
    workload = {**vanilla.measurement.workload, "planet": "mars"}
    found = difference(vanilla, measured(vanilla, workload=workload))
    assert found.changes == (SetupChange("workload", "planet", None, "mars"),)


def test_the_breakdown_has_one_source(vanilla: Record, checkpointed: Record) -> None:
    predicted = difference(vanilla, checkpointed)
    assert predicted.source == "predicted"
    assert vanilla.prediction is not None and checkpointed.prediction is not None
    total = sum(shift.change or 0 for shift in predicted.components)
    assert total == checkpointed.prediction.memory.device_bytes - vanilla.prediction.memory.device_bytes
    one, two = with_breakdown(vanilla, activations=5 * GIB), with_breakdown(checkpointed, activations=2 * GIB)
    both = difference(one, two)
    assert both.source == "measured"
    assert {shift.component: shift.change for shift in both.components}["activations"] == -3 * GIB
    assert difference(one, checkpointed).source == "predicted"
    neither = difference(replace(vanilla, prediction=None), two)
    assert (neither.source, neither.components, neither.lines, neither.peaks) == (None, (), (), ())


def test_lines_that_differ_largest_first(vanilla: Record) -> None:
    first = with_breakdown(
        vanilla, Line("weights", "parameters", 7, 1), Line("activations", "a", 10, 1), Line("activations", "b", 5, 1),
        Line("activations", "same", 3, 1), activations=GIB)  # fmt: skip
    second = with_breakdown(
        vanilla, Line("activations", "a", 12, 1), Line("activations", "same", 3, 1), Line("weights", "copies", 1, 1),
        Line("weights", "copies", 1, 1), activations=GIB)  # fmt: skip
    lines = [(line.component, line.name, line.before, line.after) for line in difference(first, second).lines]
    assert lines == [
        ("weights", "parameters", 7, 0),
        ("weights", "copies", 0, 2),
        ("activations", "b", 5, 0),
        ("activations", "a", 10, 12),
    ]


def test_figures_that_one_side_does_not_have(vanilla: Record, failed: Record) -> None:
    found = difference(vanilla, failed)
    assert {shift.name: shift.change for shift in found.figures}["device_bytes"] is None
    assert {pace.name: pace.ratio for pace in found.paces}["step_seconds"] is None


def test_the_answer(vanilla: Record, checkpointed: Record, fp16: Record, failed: Record) -> None:
    assert answer(difference(vanilla, fp16)) == (
        "B uses 1.01 GiB less; predicted changes: activations -1.09 GiB, weights +568 MiB, "
        "cache and fragmentation -472 MiB; 2.5 times the samples per second; the only change: train.fp16: false → true."
    )
    assert answer(difference(fp16, vanilla)).startswith(
        "B uses 1.01 GiB more; predicted changes: activations +1.09 GiB"
    )
    assert answer(difference(vanilla, checkpointed)).endswith(
        "57 % fewer samples per second; changed: train.per_device_train_batch_size: 4 → 1, "
        "train.gradient_accumulation_steps: 1 → 4, train.gradient_checkpointing: false → true."
    )
    assert answer(difference(vanilla, vanilla)) == (
        "B uses as much memory as A; the same samples per second; "
        "nothing in the records differs: equal runs vary this much."
    )
    assert answer(difference(vanilla, failed)).startswith(
        "B ran out of memory; the only change: GPU: NVIDIA H200 → NVIDIA Ge"
    )
    assert answer(difference(failed, vanilla)).startswith("A ran out of memory")
    assert answer(difference(failed, failed)).startswith("Both ran out of memory; nothing")


def test_the_answer_names_its_source_and_all_differences(vanilla: Record, fp16: Record) -> None:
    one = with_breakdown(vanilla, activations=5 * GIB)
    two = measured(with_breakdown(fp16, activations=2 * GIB), gpu="NVIDIA H100", versions={"torch": "2.13.0"})
    sentence = answer(difference(one, two))
    assert ": activations -3.00 GiB, weights" in sentence
    assert sentence.endswith("changed: train.fp16: false → true; also different: GPU, library versions.")


def test_the_answer_with_little_information(vanilla: Record) -> None:
    bare = measured(replace(vanilla, prediction=None), device_bytes=None, samples_per_second=None)
    slower = measured(bare, peak_reserved_bytes=bare.measurement.peak_reserved_bytes + GIB, step_seconds=0.2)
    assert answer(difference(bare, slower)).startswith("B reserves 1.00 GiB more; 85 % more time per step; nothing")
    assert answer(difference(bare, measured(bare, step_seconds=None))).startswith(
        "B reserves as much memory as A; nothing"
    )


@pytest.mark.parametrize("width", [60, 80, 120])
def test_pages_keep_to_their_width(
    width: int, vanilla: Record, checkpointed: Record, failed: Record, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = Store(tmp_path_factory.mktemp("runs"))
    for record in (vanilla, checkpointed, replace(failed, group="sweep", repeat=1)):
        store.write(record)
    drawings = (
        history_page(store.history()),
        difference_page(difference(vanilla, checkpointed)),
        difference_page(difference(vanilla, failed)),
    )
    for drawing in drawings:
        drawn = render(drawing, width)
        assert max(map(len, drawn.splitlines())) <= width
        assert "…" not in drawn
        assert "3da90a10" in drawn


def test_a_page_of_a_difference(vanilla: Record, checkpointed: Record) -> None:
    drawn = render(difference_page(difference(vanilla, checkpointed)), 100)
    for line in (
        "Predicted GPU memory at the peak (not both records have a measured breakdown)",
        "  activations                   3.03 GiB   1.0 KiB  -3.03 GiB",
        "  total                         8.36 GiB  6.05 GiB  -2.31 GiB",
        "  device memory                 8.36 GiB  6.05 GiB  -2.31 GiB  -27.6 %",
        "  time per step                 108 ms  254 ms   2.35",
        "  train.gradient_checkpointing       false  true",
    ):
        assert line in drawn.splitlines()
    assert "The peak of A is in step 2, backward" in drawn


def test_columns_with_one_common_value_are_left_out(
    vanilla: Record, fp16: Record, failed: Record, tmp_path: object
) -> None:
    store = Store(str(tmp_path))
    store.write(vanilla)
    store.write(fp16)
    drawn = render(history_page(store.history()), 80)
    said = " ".join(drawn.split())  # where lines are broken depends on the folder's name
    assert said.startswith("2 records in ") and ", H200, completed" in said
    assert "status" not in drawn
    first = next(index for index, line in enumerate(drawn.splitlines()) if line.startswith("3da90a10"))
    assert drawn.splitlines()[first + 1].startswith("c6fa0a12")
    assert "3da90a10  2026-11-21 10:30  notebook-vanilla  8.36 GiB  +0.00 %  108 ms     37.0" in drawn
    store.write(failed)
    mixed = render(history_page(store.history()), 100)
    assert "RTX 2060, out of memory" in mixed and "status" not in mixed
    broad = render(history_page(store.history()), 120)
    assert "status" in broad and "out of memory" in broad and "RTX 2060" in broad


def test_skipped_files_and_empty_histories_are_reported() -> None:
    empty = render(history_page(History("runs", (), ())))
    assert empty == "No matching records in runs; `trainatomy measure` writes them.\n"
    page = render(history_page(History("runs", (), (Skipped("runs/a.json", "empty file"),))))
    assert "Not read: 1 file in the folder" in page and "runs/a.json: empty file" in page


def test_json_adds_the_changes(vanilla: Record, fp16: Record) -> None:
    value = json.loads(json.dumps(to_json(difference(vanilla, fp16))))
    assert value["schema"] == "trainatomy/difference/1"
    assert value["changes"] == [{"about": "workload", "name": "train.fp16", "before": False, "after": True}]
    device = next(each for each in value["figures"] if each["name"] == "device_bytes")
    assert device["change"] == device["after"] - device["before"] == -1086324736
    assert value["paces"][0]["ratio"] == pytest.approx(0.3939, abs=1e-3)
    assert sum(each["change"] for each in value["components"]) == device["change"]


def test_in_python(vanilla: Record, fp16: Record, tmp_path: object) -> None:
    store = Store(str(tmp_path))
    store.write(vanilla)
    store.write(fp16)
    assert [row.name for row in trainatomy.history(str(tmp_path), where=("train.fp16=true",)).records] == [
        fp16.measurement.name
    ]
    assert trainatomy.read_record("last", str(tmp_path)) == fp16
    found = trainatomy.diff("last~1", fp16, str(tmp_path))
    assert (found.before.name, found.after.name) == ("notebook-vanilla", "notebook-fp16")
    assert isinstance(trainatomy.read_record(f"{tmp_path}/{vanilla.id}.json").measurement, Measurement)
