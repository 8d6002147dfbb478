"""``--calibration``: times are predicted from a file of ``trainatomy calibrate``, or an error explains why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trainatomy
from trainatomy.catalog.calibrations import SCHEMA
from trainatomy.cli import main
from trainatomy.errors import WorkloadError

TINY = ["--model-class", "GPT2LMHeadModel", "--config", "n_layer=1", "--sequence-length", "32", "--gpu", "h200"]
PRODUCT = "aten::mm(bf16[4096,4096],bf16[4096,4096])->bf16[4096,4096]"


@pytest.fixture
def calibration(tmp_path: Path) -> Callable[..., str]:
    """Write a calibration of such a GPU in which each matrix product takes one second."""

    def make(gpu: str = "NVIDIA H200", capability: tuple[int, int] = (9, 0), **changes: Any) -> str:
        points = [{"call": PRODUCT, "us": 1e6, "kernels": 1}] * 3
        environment = {"gpu": gpu, "capability": capability, "date": "2026-11-20"}
        content = {"schema": SCHEMA, "environment": environment, "sections": {"kernels": {"points": points}}}
        file = tmp_path / "calibration.json"
        file.write_text(json.dumps(content | changes))
        return str(file)

    return make


@pytest.fixture
def rows(tmp_path: Path) -> str:
    file = tmp_path / "rows.yaml"
    model = "{class: GPT2LMHeadModel, config: {n_layer: 1}}"
    file.write_text(
        f"model: {model}\ndata: {{sequence_length: 32}}\nrows: [{{name: a}}, {{name: b, mode: inference}}]\n"
    )
    return str(file)


def of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_predict_uses_the_calibration(calibration: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    shipped = of(["predict", *TINY], capsys)["time"]
    slow = of(["predict", *TINY, "--calibration", calibration()], capsys)["time"]
    assert slow["priced_by"] == "calibration of NVIDIA H200, 2026-11-20"
    assert slow["gpu_seconds"] > 100 * shipped["gpu_seconds"]
    far = of(["predict", *TINY, "--calibration", calibration("NVIDIA H100 80GB HBM3")], capsys)["time"]
    assert "NVIDIA H100 80GB HBM3" in far["priced_by"] and "extrapolated to the data sheet of H200" in far["priced_by"]
    width = [high / low for low, high in (each["interval_seconds"] for each in (far, slow))]
    assert width[0] > width[1]


def test_operations_use_the_calibration(calibration: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    shipped = of(["ops", *TINY], capsys)
    slow = of(["ops", *TINY, "--calibration", calibration()], capsys)
    assert slow["seconds"] > 100 * shipped["seconds"]
    assert any("calibration of NVIDIA H200, 2026-11-20" in note for note in slow["notes"])


def test_every_row_of_a_comparison_uses_the_calibration(
    calibration: Callable[..., str], rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = of(["compare", rows, "--calibration", calibration()], capsys)["rows"]
    assert {row["time"]["priced_by"] for row in found} == {"calibration of NVIDIA H200, 2026-11-20"}
    assert main(["compare", rows, "--calibration", calibration()]) == 0
    page = capsys.readouterr().out
    assert "step" in page and "Kernel times from: calibration of NVIDIA H200, 2026-11-20." in " ".join(page.split())


@pytest.mark.parametrize("command", ["predict", "ops", "compare"])
def test_an_unusable_calibration_is_refused(
    command: str, calibration: Callable[..., str], rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error_of(file: str) -> str:
        arguments = [rows, "--gpu", "h200"] if command == "compare" else TINY
        assert main([command, *arguments, "--calibration", file]) == WorkloadError.exit_code
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err

    assert "No such file" in error_of(str(tmp_path / "none.json"))
    assert "directory" in error_of(str(tmp_path))
    assert "not a file that `trainatomy calibrate` wrote" in error_of(rows)
    assert "trainatomy/calibration/7" in error_of(calibration(schema="trainatomy/calibration/7"))
    text = error_of(calibration("NVIDIA A100-SXM4-80GB", (8, 0)))
    assert "NVIDIA A100-SXM4-80GB (compute capability 8.0)" in text and "H200" in text and "gpu a100-80gb" in text


def test_a_calibration_is_refused_for_the_software_of_2022(
    calibration: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "notebook", "--calibration", calibration()]) == WorkloadError.exit_code
    assert "does not apply to those of 2022" in capsys.readouterr().err


def test_a_calibration_path_and_its_loaded_value_are_equivalent_in_python(calibration: Callable[..., str]) -> None:
    from trainatomy.catalog.calibrations import load

    file = calibration()
    small = trainatomy.notebook()[0].model_copy(update={"gpu": "t4"})
    for value in (file, Path(file), load(Path(file))):
        with pytest.raises(WorkloadError, match=r"NVIDIA H200.*for T4"):
            trainatomy.predict(small, calibration=value)
