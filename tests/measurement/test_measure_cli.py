"""``trainatomy measure`` with a scripted GPU: output, records and exit codes."""

from __future__ import annotations

import dataclasses
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from measured import FULL, GIB, called_here
from rich.console import Console

import trainatomy.api.measuring
import trainatomy.api.predicting
from trainatomy.cli import main
from trainatomy.cli import progress as measuring
from trainatomy.errors import DeviceError, SimulationError
from trainatomy.measurement.measure import Runs
from trainatomy.measurement.process.job import Progress
from trainatomy.measurement.process.pool import Processes
from trainatomy.reporters.json import measurement_to_json
from trainatomy.reporters.text.measurement import measurement_page, rate
from trainatomy.reporters.text.rendering import render
from trainatomy.results.measurement import Measurement
from trainatomy.results.memory import Instant, OutOfMemoryPoint
from trainatomy.runs import single

WORKLOAD = "model: {class: GPT2LMHeadModel, config: {n_layer: 1, n_embd: 8, n_head: 2}}\ndata: {sequence_length: 8}\n"


@pytest.fixture
def measure_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Return a dict with the arguments of the ``measure`` call; ``answer`` is the result of that call."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINATOMY_RECORDS", str(tmp_path / "records"))
    monkeypatch.setattr(single, "this_machine", lambda: single.Machine(("NVIDIA H200",), "580"))
    Path("w.yaml").write_text(WORKLOAD)
    call: dict[str, Any] = {"answer": FULL}

    def measure(workload: Any, runs: Runs, progress: Any, meanwhile: Any, processes: Processes) -> Measurement:
        call.update(dataclasses.asdict(runs), workload=workload)
        progress(Progress("control", "training", 1, 9, GIB))
        meanwhile()
        answer: Measurement = call["answer"]
        return answer

    monkeypatch.setattr(trainatomy.api.measuring, "measure_run", measure)
    monkeypatch.setattr(Processes, "call", called_here)
    return call


def records() -> list[Any]:
    return [json.loads(path.read_text()) for path in Path("records").glob("*.json")]


def test_the_measured_breakdown_is_shown_with_the_prediction_and_saved(
    measure_call: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["measure", "w.yaml", "--time-limit", "9"]) == 0
    captured = capsys.readouterr()
    assert (measure_call["time_limit"], measure_call["components"], measure_call["workload"].gpu) == (9.0, True, "h200")
    assert "completed: tiny" in captured.out.splitlines()[0]
    assert "16-bit copies kept by autocast" in captured.out
    assert "control run: training (1.00 GiB on the GPU)" in captured.err
    (record,) = records()
    assert record["measurement"]["memory"]["components"]["weights"] == GIB
    assert record["prediction"]["card"]["id"] == "h200"
    assert record["command"].startswith("trainatomy")


def test_json_contains_the_difference_of_each_component(
    measure_call: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["measure", "w.yaml", "--json", "--gpu", "t4", "--no-components"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (measure_call["components"], measure_call["workload"].gpu) == (False, "t4")
    predicted = found["prediction"]["memory"]["components"]["weights"]
    assert found["gap"]["components"]["weights"] == pytest.approx((predicted - GIB) / (8 * GIB))


def test_out_of_memory_is_a_result(measure_call: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    point = OutOfMemoryPoint(Instant(1, "backward", "", ""), 2 * GIB, 7 * GIB, 8 * GIB)
    measure_call["answer"] = replace(FULL, status="out of memory", out_of_memory=point, message="CUDA out of memory.")
    assert main(["measure", "w.yaml"]) == 0
    text = capsys.readouterr().out
    assert "2.00 GiB requested with 7.00 GiB" in text
    assert "At the failure, in step 2, backward" in text


def test_unpredictable_rows_are_measured(
    measure_call: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise SimulationError("aten::nonzero")

    monkeypatch.setattr(trainatomy.api.predicting, "predict_training", refuse)
    assert main(["measure", "w.yaml"]) == 0
    assert "no prediction beside: aten::nonzero" in capsys.readouterr().err
    assert records()[0]["prediction"] is None


@pytest.mark.parametrize(
    ("answer", "arguments", "code", "text"),
    [
        (
            replace(FULL, memory=None, notes=("the recorded run failed",)),
            [],
            7,
            "memory breakdown: the recorded run",
        ),
        (replace(FULL, notes=("No space left",)), ["--trace", "x"], 1, "was not written to x: No space left"),
        (replace(FULL, memory=None), ["--no-components"], 0, ""),
        (replace(FULL, tape_file="x"), ["--trace", "x"], 0, ""),
    ],
)
def test_missing_parts_are_reported_after_the_result(
    measure_call: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    answer: Measurement,
    arguments: list[str],
    code: int,
    text: str,
) -> None:
    measure_call["answer"] = answer
    assert main(["measure", "w.yaml", *arguments]) == code
    captured = capsys.readouterr()
    assert "completed: tiny" in captured.out and text in captured.err
    assert len(records()) == 1


def test_an_unwritable_record_folder_is_reported_first(
    measure_call: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").write_text("")
    assert main(["measure", "w.yaml", "--records", "file/records"]) == 1
    assert "workload" not in measure_call and "file" in capsys.readouterr().err


def test_a_disk_that_is_full_at_the_end_loses_nothing(
    measure_call: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainatomy.errors import TrainatomyError
    from trainatomy.records.store import Store

    def full(*_: object) -> NoReturn:
        raise TrainatomyError("No space left on device")

    monkeypatch.setattr(Store, "write", full)
    assert main(["measure", "w.yaml"]) == 1
    captured = capsys.readouterr()
    assert "completed: tiny" in captured.out and "No space left" in captured.err


def test_without_a_gpu_nothing_is_predicted(
    measure_call: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none() -> NoReturn:
        raise DeviceError("no GPU here")

    monkeypatch.setattr(single, "this_machine", none)
    monkeypatch.setattr(trainatomy.api.predicting, "predict_training", lambda *_, **__: pytest.fail("predicted"))
    assert main(["measure", "w.yaml"]) == 7
    assert main(["measure", "w.yaml", "--era", "2022"]) == 2
    assert "no GPU here" in capsys.readouterr().err


@pytest.mark.parametrize("width", [80, 120])
def test_the_page_fits_its_width_and_is_complete(width: int) -> None:
    text = render(measurement_page(FULL, None), width)
    assert max(map(len, text.splitlines())) <= width
    for part in (
        "At the peak, in step 2, backward",
        "8,589,934,592",
        "idle",
        "250 ms per step (median of 3 steps, from 240 ms to 270 ms)",
        "16.0 samples/s, 8,192 tokens/s",
        "255 ms per step while allocations were recorded (+2.0 %)",
        "layer.*.mlp",
        "4711  python",
        "(name not visible)  not reported",
        "another process uses the card",
    ):
        assert part in text, part


def test_rates_have_three_digits() -> None:
    assert [rate(value) for value in (0.4219, 16.04, 123.4, 8192.4)] == ["0.42", "16.0", "123.4", "8,192"]


def test_no_component_differences_without_a_memory_breakdown() -> None:
    assert measurement_to_json(FULL, None)["gap"] is None


def test_on_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    paper = io.StringIO()
    monkeypatch.setattr(
        measuring, "error_paper", lambda: Console(file=paper, force_terminal=True, width=100, legacy_windows=False)
    )
    with measuring.follow_measurement() as tell:
        tell(Progress("control", "model loaded"))
        tell(Progress("control", "training", 3, 10, GIB))
    assert "control run: training" in paper.getvalue() and "3/10" in paper.getvalue()
