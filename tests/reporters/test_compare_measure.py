"""``compare --measure`` on the command line, with a scripted GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from measured import called_here

import trainatomy.api.predicting
import trainatomy.measurement.measure
import trainatomy.runs.single
from trainatomy.cli import main
from trainatomy.errors import DeviceError, MissingLibrary, SimulationError
from trainatomy.measurement.process.pool import Processes
from trainatomy.records.store import Store
from trainatomy.reporters.json import FORMATS
from trainatomy.reporters.schema import schema_of
from trainatomy.results.measurement import Measurement
from trainatomy.results.memory import Instant, OutOfMemoryPoint
from trainatomy.results.prediction import Prediction
from trainatomy.runs.single import Machine

MIB, GIB = 2**20, 2**30
ROWS = "model: {class: GPT2LMHeadModel}\nrows: [{name: a}, {name: b, loop: pytorch}, {name: c, mode: inference}]\n"


@dataclass
class Script:
    """Scripted answers of runs and predictions by name; ``started`` lists all runs in order."""

    started: list[str] = field(default_factory=list)
    runs: dict[str, list[Any]] = field(default_factory=dict)
    predictions: dict[str, Exception] = field(default_factory=dict)
    workloads: list[Any] = field(default_factory=list)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, prediction: Prediction, measurement: Measurement) -> Script:
    script = Script()

    def predict(training: Any, *_: Any) -> Prediction:
        workload = training.what
        if workload.name in script.predictions:
            raise script.predictions[workload.name]
        return replace(prediction, name=workload.name, workload=workload.to_mapping())

    def measure(workload: Any, *_: Any, **options: Any) -> Measurement:
        script.started.append(workload.name)
        script.workloads.append(workload)
        made = replace(
            measurement,
            name=workload.name,
            workload=workload.to_mapping(),
            versions={"torch": metadata.version("torch")},
            samples_per_second=16.0,
        )
        answers = script.runs.get(workload.name)
        answer = answers.pop(0) if answers else {}
        if isinstance(answer, BaseException):
            raise answer
        return replace(made, **answer)

    monkeypatch.setattr(trainatomy.api.predicting, "predict_training", predict)
    monkeypatch.setattr(trainatomy.measurement.measure, "measure", measure)
    monkeypatch.setattr(Processes, "expect", lambda *_: None)
    monkeypatch.setattr(Processes, "call", called_here)
    monkeypatch.setattr(trainatomy.runs.single, "this_machine", lambda: Machine(("NVIDIA H200",), measurement.driver))
    return script


@pytest.fixture
def rows(tmp_path: Path) -> str:
    file = tmp_path / "rows.yaml"
    file.write_text(ROWS)
    return str(file)


@pytest.fixture
def compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs ``compare … --measure`` and returns exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["compare", *arguments, "--measure", "--records", str(tmp_path / "records")])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


Compare = Callable[..., tuple[int, str, str]]


def test_the_notebook_is_measured_with_the_installed_software_and_gpu(script: Script, compare: Compare) -> None:
    code, out, err = compare("notebook")
    assert code == 0
    assert len(script.started) == 9 and len(set(script.started)) == 9
    assert {(each.era, each.gpu) for each in script.workloads} == {(None, "h200")}
    assert "512" in out and "32.0 s" in out  # at 16 samples a second
    beside = out.partition("Compared with published figures")[2]
    assert all(text in beside for text in ("14.6 GiB", "57.8 s", "Hugging Face", "V100 16 GB", "2022-01-11"))
    assert err.count("8.00 GiB, 250 ms per step") == 9


def test_predicted_and_measured_side_by_side(script: Script, compare: Compare, rows: str) -> None:
    script.runs["b"] = [{"device_bytes": 10 * GIB}]
    code, out, _ = compare(rows)
    assert code == 0
    line = next(line for line in out.splitlines() if line.startswith("b"))
    assert line.split() == ["b", "8.00", "GiB", "10.0", "GiB", "-20.00", "%", "250", "ms", "16.0"]


def test_repeats_yield_median_and_spread(script: Script, compare: Compare, rows: str) -> None:
    script.runs["a"] = [{"step_seconds": each} for each in (0.2, 0.5, 0.3)]
    code, out, _ = compare(rows, "--repeat", "3")
    assert code == 0
    assert script.started == ["a", "b", "c"] * 3
    assert "300 ms" in out and "200–500 ms" in out
    code, out, _ = compare(rows, "--repeat", "3", "--json")
    assert len(script.started) == 9
    first = json.loads(out)["rows"][0]
    assert first["measured"]["step_seconds"] == {"median": 0.3, "least": 0.2, "most": 0.5, "count": 3}
    assert len(first["measurements"]) == 3


def test_ctrl_c_keeps_measured_runs_and_explains_how_to_resume(
    script: Script, compare: Compare, rows: str, tmp_path: Path
) -> None:
    script.runs["c"] = [KeyboardInterrupt()]
    code, out, err = compare(rows)
    assert code == 130
    assert "not measured" in out and "8.00 GiB" in out
    assert "2 of 3" in err and str(tmp_path / "records") in err and "same command" in err
    script.started.clear()
    code, out, err = compare(rows)
    assert (code, script.started) == (0, ["c"])
    assert err.count("from its record") == 2


def test_ctrl_c_gives_json_of_what_was_measured(script: Script, compare: Compare, rows: str) -> None:
    script.runs["c"] = [KeyboardInterrupt()]
    code, out, _ = compare(rows, "--json")
    assert code == 130
    assert [len(row["measurements"]) for row in json.loads(out)["rows"]] == [1, 1, 0]


def test_fresh_runs_everything_and_can_be_resumed(script: Script, compare: Compare, rows: str) -> None:
    compare(rows)
    script.started.clear()
    script.runs["b"] = [KeyboardInterrupt()]
    code, _, err = compare(rows, "--fresh")
    assert (code, script.started) == (130, ["a", "b"])
    group = err.partition("--group ")[2].split()[0]
    script.started.clear()
    assert compare(rows, "--group", group)[0] == 0
    assert script.started == ["b", "c"]


def test_out_of_memory_is_a_row_with_live_and_requested_bytes(script: Script, compare: Compare, rows: str) -> None:
    point = OutOfMemoryPoint(Instant(0, "forward", "transformer.h.3", "aten::mm"), 300 * MIB, 5 * GIB, 6 * GIB)
    failed = {"status": "out of memory", "device_bytes": None, "step_seconds": None, "samples_per_second": None}
    script.runs["b"] = [{**failed, "out_of_memory": point}]
    script.runs["c"] = [{**failed, "message": "CUDA out of memory. Tried to allocate 2.00 GiB."}]
    code, out, _ = compare(rows)
    assert code == 0
    text = " ".join(out.split())
    assert "in step 1, forward, in transformer.h.3 (aten::mm): 300 MiB requested with" in text
    assert "5.00 GiB allocated and 6.00 GiB reserved" in text
    assert "Tried to allocate 2.00 GiB" in text


def test_a_failed_run_is_a_row_and_the_others_continue(script: Script, compare: Compare, rows: str) -> None:
    script.runs["a"] = [DeviceError("The worker was killed by signal 9.")]
    script.runs["b"] = [MissingLibrary("pip install bitsandbytes")]
    code, out, _ = compare(rows)
    assert code == DeviceError.exit_code
    assert script.started == ["a", "b", "c"]
    assert "killed by signal 9" in out and "pip install bitsandbytes" in out


def test_unpredictable_workloads_can_be_measured(script: Script, compare: Compare, rows: str) -> None:
    script.predictions["b"] = SimulationError("an operation needs data")
    code, out, _ = compare(rows)
    assert (code, script.started) == (0, ["a", "b", "c"])
    assert "an operation needs data" in out


def test_json_follows_its_schema(script: Script, compare: Compare, rows: str) -> None:
    script.predictions["b"] = SimulationError("an operation needs data")
    script.runs["c"] = [DeviceError("died")]
    code, out, _ = compare(rows, "--json")
    value = json.loads(out)
    jsonschema.Draft202012Validator(schema_of(FORMATS["comparison"])).validate(value)
    assert code == 7
    first, second, third = value["rows"]
    assert first["schema"] == "trainatomy/prediction/1" and first["fits"] is True
    assert first["gap"]["device_bytes"] == 0 and first["status"] == "completed"
    assert second["prediction_error"] == "an operation needs data" and "memory" not in second
    assert third["errors"] == ["died"] and third["status"] == "failed"
    assert value["group"].startswith("rows-")


def test_every_run_leaves_a_record_with_its_prediction(
    script: Script, compare: Compare, rows: str, tmp_path: Path
) -> None:
    compare(rows, "--group", "mine")
    store = Store(tmp_path / "records")
    records = [store.read(each.id) for each in store.list()]
    assert {(record.group, record.measurement.name) for record in records} == {("mine", name) for name in "abc"}
    assert all(record.prediction and record.prediction.name == record.measurement.name for record in records)


def test_charts_are_written_next_to_the_records(script: Script, compare: Compare, rows: str, tmp_path: Path) -> None:
    compare(rows, "--group", "mine", "--plot", str(tmp_path / "own.png"))
    folder = tmp_path / "records" / "mine"
    assert (folder / "comparison.svg").read_text("utf-8").startswith("<?xml")
    for file in (folder / "comparison.png", tmp_path / "own.png"):
        assert file.read_bytes().startswith(b"\x89PNG")


def test_a_sweep_is_measured_too(script: Script, compare: Compare, rows: str) -> None:
    code, out, _ = compare(rows, "--sweep", "data.sequence_length=64,128", "--json")
    assert code == 0
    assert [row["name"] for row in json.loads(out)["rows"]][:2] == [
        "a, data.sequence_length=64",
        "a, data.sequence_length=128",
    ]
    assert [each.data.sequence_length for each in script.workloads] == [64, 128] * 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--era", "2022"], "2022"),
        (["--sweep", "nonsense=1"], "nonsense"),
        (["--plot", "chart.gif"], ".svg"),
        (["--plot", "no-such-folder/chart.svg"], "no-such-folder"),
        (["--repeat", "0"], "repeat"),
    ],
)
def test_mistakes_are_reported_before_anything_runs(
    script: Script, compare: Compare, arguments: list[str], text: str
) -> None:
    code, out, err = compare("notebook", *arguments)
    assert (code, out, script.started) == (2, "", [])
    assert text in err


def test_without_a_gpu(
    script: Script, compare: Compare, rows: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def none() -> Machine:
        raise DeviceError("No NVIDIA driver is installed")

    monkeypatch.setattr(trainatomy.runs.single, "this_machine", none)
    code, out, err = compare(rows)
    assert (code, out, script.started) == (7, "", [])
    assert "No NVIDIA driver" in err
    assert not (tmp_path / "records").exists()


def test_an_unwritable_record_folder_is_refused_at_once(
    script: Script, compare: Compare, rows: str, tmp_path: Path
) -> None:
    (tmp_path / "records").write_text("a file")
    code, _, err = compare(rows)
    assert (code, script.started) == (1, [])
    assert "records" in err


@pytest.mark.parametrize("option", [["--repeat", "3"], ["--fresh"], ["--group", "x"], ["--time-limit", "5"]])
def test_options_of_measuring_need_it(option: list[str], rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", rows, *option]) == 2
    assert "--measure" in capsys.readouterr().err


def test_predictions_are_swept_and_drawn(
    script: Script, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chart = tmp_path / "chart.svg"
    options = ["--sweep", "per_device_train_batch_size=1,2", "--sweep", "bf16=true,false", "--plot", str(chart)]
    assert main(["compare", rows, *options, "--json"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)["rows"]]
    assert len(names) == 12 and names[1] == "a, per_device_train_batch_size=1, bf16=false"
    assert "<svg" in chart.read_text("utf-8")
    assert main(["compare", "notebook", "--sweep", "per_device_train_batch_size=1,2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["published"] is None


def test_the_fp16_table_has_its_published_figures_and_a_remark(
    script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "notebook-fp16"]) == 0
    out = capsys.readouterr().out
    assert all(figure in out for figure in ("4247", "4163", "10037", "8061", "NCCL"))
    assert main(["compare", "notebook-fp16", "--gpu", "h200"]) == 0
    assert "4247" not in capsys.readouterr().out
