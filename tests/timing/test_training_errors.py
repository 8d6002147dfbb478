"""How measured trainings are compared with their predictions."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "lab/timing"


@pytest.fixture
def training_errors(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    return importlib.import_module("training_errors")


def test_a_step_at_a_pace_lies_between_those_that_were_predicted(training_errors: Any) -> None:
    line = {"step_seconds": 10.0, "at_paces": {"0.5": 9.0, "2.0": 18.0}}
    assert [training_errors.at_pace(line, pace) for pace in (0.1, 0.5, 0.75, 1.0, 1.5, 9.0)] == [9, 9, 9.5, 10, 14, 18]


def test_the_gpus_own_time_at_a_pace_is_that_of_a_quiet_host_unless_it_depends_on_it(training_errors: Any) -> None:
    assert training_errors.gpu_at_pace({"gpu_seconds": 9.0}, 2.0) == 9.0
    assert training_errors.gpu_at_pace({"gpu_seconds": 9.0, "gpu_at_paces": {"2.0": 7.0}}, 1.5) == 8.0


def test_a_training_without_timed_steps_is_compared_at_the_median_pace_of_its_visit(
    training_errors: Any, tmp_path: Path
) -> None:
    def lines(names: str, part: str, **more: Any) -> list[dict[str, Any]]:
        return [{"name": name, "part": part, **more} for name in names]

    def paced(names: str, pace: float) -> list[dict[str, Any]]:
        probed = {"probe": "", "before_seconds": [pace], "after_seconds": [], "during_seconds": []}
        return lines(names, "steps", step_seconds=1.0, host_pace={**probed, "reference_seconds": 1.0})

    kernels = [lines(names, "kernels", gpu_seconds=0.5) for names in ("abc", "de")]
    measured = kernels[0] + paced("a", 2.0) + paced("b", 2.0) + kernels[1] + paced("d", 1.0)
    line = {
        "gpu_seconds": 1.0,
        "copied_seconds": 0.0,
        "gpu_at_paces": {"2.0": 0.5},
        "step_seconds": 1.0,
        "at_paces": {"2.0": 2.0},
    }
    predicted = [{"name": name, **line, "bound_by": "host"} for name in "abcde"]
    paths = tmp_path / "measured.jsonl", tmp_path / "predicted.jsonl"
    for path, found in zip(paths, (measured, predicted), strict=True):
        path.write_text("".join(json.dumps(each) + "\n" for each in found), encoding="utf-8")
    errors = {one["name"]: one["gpu_error"] for one in training_errors.compared(*paths, None)}
    assert errors == {"a": 0.0, "b": 0.0, "c": 0.0, "d": 1.0, "e": 1.0}


def test_both_parts_of_a_training_are_joined(training_errors: Any, tmp_path: Path) -> None:
    pace = {"probe": "launches/1", "before_seconds": [1e-4], "after_seconds": [], "during_seconds": []}
    measured = [
        {"call": "a kernel"},
        {"name": "a", "part": "kernels", "gpu_seconds": 0.5},
        {"name": "a", "part": "steps", "step_seconds": 1.0, "host_pace": {**pace, "reference_seconds": 1e-4}},
        {"name": "b", "part": "steps", "error": "out of memory"},
    ]
    predicted = [
        {
            "name": name,
            "gpu_seconds": 0.6,
            "copied_seconds": 0.0,
            "step_seconds": 0.9,
            "at_paces": {"2.0": 1.8},
            "bound_by": "host",
        }
        for name in "ab"
    ]
    paths = tmp_path / "measured.jsonl", tmp_path / "predicted.jsonl"
    for path, found in zip(paths, (measured, predicted), strict=True):
        path.write_text("".join(json.dumps(line) + "\n" for line in found), encoding="utf-8")
    (one,) = training_errors.compared(*paths, None)
    assert one["bound"] == "host"
    assert one["gpu_error"] == pytest.approx(0.2)
    assert one["step_error"] == one["quiet_error"] == pytest.approx(-0.1)


def _rounds(tmp_path: Path, *rounds: tuple[float, float, float]) -> tuple[Path, Path]:
    """Write rounds: a step's seconds, the pace beside it, the share that the hypervisor took.  Predicted are 10 s."""
    measured: list[dict[str, Any]] = [{"name": "a", "part": "kernels", "gpu_seconds": 1.0}]
    for number, (seconds, pace, stolen) in enumerate(rounds, start=1):
        probed = {"probe": "", "before_seconds": [pace], "reference_seconds": 1.0, "stolen_share": stolen}
        measured.append({"name": "a", "part": "steps", "round": number, "step_seconds": seconds, "host_pace": probed})
    predicted = {"gpu_seconds": 1.0, "copied_seconds": 0.0, "step_seconds": 10.0, "at_paces": {"3.0": 30.0}}
    paths = tmp_path / "measured.jsonl", tmp_path / "predicted.jsonl"
    paths[0].write_text("".join(json.dumps(line) + "\n" for line in measured), encoding="utf-8")
    paths[1].write_text(json.dumps({"name": "a", "bound_by": "host", **predicted}) + "\n", encoding="utf-8")
    return paths


def test_the_error_of_a_step_is_the_median_of_its_rounds(training_errors: Any, tmp_path: Path) -> None:
    (one,) = training_errors.compared(*_rounds(tmp_path, (40.0, 2.0, 0.0), (16.0, 2.0, 0.0), (10.0, 1.0, 0.0)), None)
    assert one["round_errors"] == pytest.approx([-0.5, 0.25, 0.0])
    assert one["step_error"] == pytest.approx(0.0)
    assert (one["step"], one["pace"]) == (10.0, 1.0)


def test_a_round_of_which_the_hypervisor_took_much_does_not_count(training_errors: Any, tmp_path: Path) -> None:
    (one,) = training_errors.compared(*_rounds(tmp_path, (40.0, 2.0, 0.05), (16.0, 2.0, 0.01)), None)
    assert one["round_errors"] == pytest.approx([0.25])


def test_rounds_count_if_the_hypervisor_took_much_of_all(training_errors: Any, tmp_path: Path) -> None:
    (one,) = training_errors.compared(*_rounds(tmp_path, (40.0, 2.0, 0.05), (16.0, 2.0, 0.1)), None)
    assert one["round_errors"] == pytest.approx([-0.5, 0.25])
    assert one["step_error"] == pytest.approx(-0.125)


def test_copies_of_pageable_batches_are_not_the_gpus_own_time(training_errors: Any) -> None:
    kernels = {"Memcpy HtoD (Pageable -> Device)": 3e5, "Memcpy DtoD (Device -> Device)": 1e5, "gemm": 6e5}
    assert training_errors.own_seconds({"gpu_seconds": 1.0, "by_kernel": kernels}) == pytest.approx((0.7, 0.3))


def test_a_slow_host_bounds_steps_that_the_gpu_bounds_beside_a_quiet_one(training_errors: Any) -> None:
    line = {"step_seconds": 10.0, "copied_seconds": 0.0, "at_paces": {"1.5": 10.0, "2.0": 13.0, "3.0": 19.5}}
    assert [training_errors.bound_at(line, pace) for pace in (1.0, 1.3, 2.0, 2.6)] == ["GPU", "GPU", "host", "host"]


@pytest.mark.parametrize(("copied", "bound"), [(1.0, "GPU"), (7.0, "host")])
def test_copies_of_batches_are_work_of_the_host(training_errors: Any, copied: float, bound: str) -> None:
    """All but the copies takes the GPU's time, and they grow with the pace to the power of 0.46."""
    paces = {str(pace): 10.0 - copied + copied * pace**0.46 for pace in (1.5, 2.0, 3.0)}
    line = {"step_seconds": 10.0, "copied_seconds": copied, "at_paces": paces}
    assert training_errors.bound_at(line, 2.0) == bound
