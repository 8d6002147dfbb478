"""The trainings for the accuracy of time: they are workloads, and each has a prediction of what is written."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainatomy.catalog.gpus import find_gpu
from trainatomy.timing.chips import chip_of
from trainatomy.workload.schema import Workload

FOLDER = Path(__file__).parents[2] / "benchmarks" / "timing"
REFUSED = frozenset({"fnet-fp16-drawn-51"})
"""Trainings that were drawn and that a GPU refuses."""
LAST_SEEDS = {"latest_calls.yaml": "-50", "sound_calls.yaml": "-52", "uncovered_calls.yaml": "-58"}
"""Files of trainings whose calls became points after a seed was drawn; those of all others after seed 44."""
LATEST_SEEDS = tuple(f"-{seed}" for seed in range(32, 61))
"""Draws of which rows that earlier draws have are left out."""


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    return importlib.import_module("trainings")


def test_every_training_is_predicted_as_it_is_written(trainings: Any) -> None:
    predicted = {
        line["name"]: line["workload"] for line in trainings.lines(FOLDER / "predictions/trainings-h200.jsonl")
    }
    rows = trainings.rows()
    assert len(rows) >= 60
    for row in rows:
        assert isinstance(row.workload(FOLDER), Workload)
        assert predicted[row.name] == dict(row.mapping), row.name


def test_a_step_at_a_pace_lies_between_those_that_were_predicted(trainings: Any) -> None:
    line = {"step_seconds": 10.0, "at_paces": {"0.5": 9.0, "2.0": 18.0}}
    assert [trainings.at_pace(line, pace) for pace in (0.1, 0.5, 0.75, 1.0, 1.5, 9.0)] == [9, 9, 9.5, 10, 14, 18]


def test_the_gpus_own_time_at_a_pace_is_that_of_a_quiet_host_unless_it_depends_on_it(trainings: Any) -> None:
    assert trainings.gpu_at_pace({"gpu_seconds": 9.0}, 2.0) == 9.0
    assert trainings.gpu_at_pace({"gpu_seconds": 9.0, "gpu_at_paces": {"2.0": 7.0}}, 1.5) == 8.0


def test_a_training_without_timed_steps_is_compared_at_the_median_pace_of_its_visit(
    trainings: Any, tmp_path: Path
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
    errors = {one["name"]: one["gpu_error"] for one in trainings.compared(*paths, None)}
    assert errors == {"a": 0.0, "b": 0.0, "c": 0.0, "d": 1.0, "e": 1.0}


def test_both_parts_of_a_training_are_joined(trainings: Any, tmp_path: Path) -> None:
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
    (one,) = trainings.compared(*paths, None)
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


def test_the_error_of_a_step_is_the_median_of_its_rounds(trainings: Any, tmp_path: Path) -> None:
    (one,) = trainings.compared(*_rounds(tmp_path, (40.0, 2.0, 0.0), (16.0, 2.0, 0.0), (10.0, 1.0, 0.0)), None)
    assert one["round_errors"] == pytest.approx([-0.5, 0.25, 0.0])
    assert one["step_error"] == pytest.approx(0.0)
    assert (one["step"], one["pace"]) == (10.0, 1.0)


def test_a_round_of_which_the_hypervisor_took_much_does_not_count(trainings: Any, tmp_path: Path) -> None:
    (one,) = trainings.compared(*_rounds(tmp_path, (40.0, 2.0, 0.05), (16.0, 2.0, 0.01)), None)
    assert one["round_errors"] == pytest.approx([0.25])


def test_rounds_count_if_the_hypervisor_took_much_of_all(trainings: Any, tmp_path: Path) -> None:
    (one,) = trainings.compared(*_rounds(tmp_path, (40.0, 2.0, 0.05), (16.0, 2.0, 0.1)), None)
    assert one["round_errors"] == pytest.approx([-0.5, 0.25])
    assert one["step_error"] == pytest.approx(-0.125)


def test_copies_of_pageable_batches_are_not_the_gpus_own_time(trainings: Any) -> None:
    kernels = {"Memcpy HtoD (Pageable -> Device)": 3e5, "Memcpy DtoD (Device -> Device)": 1e5, "gemm": 6e5}
    assert trainings.own_seconds({"gpu_seconds": 1.0, "by_kernel": kernels}) == pytest.approx((0.7, 0.3))


def test_drawn_trainings_are_those_of_the_seed(trainings: Any) -> None:
    drawing = importlib.import_module("drawn_trainings")
    sets = drawing.sets()
    drawn: dict[str, Any] = {}
    for seed, count, of in (
        (25, 32, "usual"),
        (24, 32, "usual"),
        (26, 8, "usual"),
        (26, 26, "never timed"),
        (27, 32, "further"),
        (28, 26, "others"),
        (29, 36, "usual and latest"),
        (30, 46, "usual and coming"),
        (31, 44, "usual and remaining"),
    ):
        drawn |= drawing.drawn(seed, count, sets[of])
    drawn |= drawing.wide(31, 4)
    rows = yaml.safe_load(trainings.TRAININGS.read_text(encoding="utf-8"))["rows"]
    calls = {path.name: list(yaml.safe_load(path.read_text())["rows"].values()) for path in FOLDER.glob("*_calls.yaml")}
    for seed, latest in (
        ("-32", drawing.drawn(32, 45, sets["usual and remaining"]) | drawing.wide(32, 4)),
        ("-33", _of_all_kinds(drawing, sets, 33, usual=26, wide=5, networks=8, others=16)),
        ("-34", drawing.drawn(34, 8, sets["all others"])),
        ("-35", _of_all_kinds(drawing, sets, 35, usual=36, wide=4, networks=6, others=20)),
        ("-36", _of_all_kinds(drawing, sets, 36, usual=33, wide=5, networks=6, others=26)),
        ("-37", drawing.drawn(37, 10, sets["usual"]) | drawing.drawn(37, 8, sets["all others"]) | drawing.wide(37, 3)),
        ("-38", _of_all_kinds(drawing, sets, 38, usual=34, wide=5, networks=0, others=30)),
        ("-39", _of_all_kinds(drawing, sets, 39, usual=30, wide=4, networks=0, others=18)),
        ("-40", _of_all_kinds(drawing, sets, 40, usual=34, wide=5, networks=0, others=30)),
        ("-41", drawing.drawn(41, 10, sets["usual"])),
        ("-42", _of_all_kinds(drawing, sets, 42, usual=34, wide=5, networks=0, others=30)),
        ("-43", drawing.drawn(43, 10, sets["usual"])),
        ("-44", _of_all_kinds(drawing, sets, 44, usual=36, wide=5, networks=0, others=34)),
        ("-45", _of_all_kinds(drawing, sets, 45, usual=36, wide=5, networks=0, others=34)),
        ("-46", drawing.drawn(46, 12, sets["usual"])),
        ("-47", _of_all_kinds(drawing, sets, 47, usual=36, wide=5, networks=0, others=34)),
        ("-48", drawing.drawn(48, 24, sets["usual"])),
        ("-49", _of_all_kinds(drawing, sets, 49, usual=36, wide=5, networks=0, others=34, quantised="quantised later")),
        ("-50", drawing.drawn(50, 27, sets["usual"])),
        ("-51", _of_all_kinds(drawing, sets, 51, usual=36, wide=5, networks=0, others=34, quantised="quantised later")),
        ("-52", drawing.drawn(52, 35, sets["usual"])),
        ("-53", _of_all_kinds(drawing, sets, 53, usual=36, wide=5, networks=0, others=34, quantised="quantised later")),
        ("-54", drawing.drawn(54, 30, sets["usual"])),
        ("-55", _of_all_kinds(drawing, sets, 55, usual=36, wide=5, networks=0, others=34, quantised="quantised later")),
        ("-56", drawing.drawn(56, 24, sets["usual"])),
        ("-57", _of_all_kinds(drawing, sets, 57, usual=36, wide=5, networks=0, others=34, quantised="quantised last")),
        ("-58", drawing.drawn(58, 40, sets["usual"])),
        ("-59", _of_all_kinds(drawing, sets, 59, usual=36, wide=5, networks=0, others=34, quantised="quantised last")),
        ("-60", drawing.drawn(60, 40, sets["usual"]) | drawing.drawn(60, 8, sets["all others"])),
    ):
        before = [row for name, row in rows.items() if not name.endswith(LATEST_SEEDS) or name[-3:] < seed]
        for name, of_file in calls.items():
            before += of_file if seed > LAST_SEEDS.get(name, "-44") else []
        drawn |= {name: row for name, row in latest.items() if row not in before and name not in REFUSED}
    assert {name: row for name, row in rows.items() if name.endswith("-drawn") or "-drawn-" in name} == drawn


def _of_all_kinds(
    drawing: Any,
    sets: Any,
    seed: int,
    *,
    usual: int,
    wide: int,
    networks: int,
    others: int,
    quantised: str = "quantised",
) -> dict[str, Any]:
    found: dict[str, Any] = drawing.drawn(seed, usual, sets["usual"]) | drawing.wide(seed, wide)
    found |= drawing.networks(seed, networks) | drawing.drawn(seed, others, sets["all others"])
    return found | drawing.drawn(seed, 3, sets[quantised])


def test_groups_that_are_convolved_one_after_the_other_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    fell_back = importlib.import_module("drawn_kernels").fell_back
    call = "aten::convolution(f16[2,640,20,20],f16[640,20,3,3])->f16[2,640,20,20];stride=[1, 1];groups=32"
    chip = chip_of(find_gpu("h200"), None)
    assert fell_back({"call": call, "kernels": 128}, chip)
    assert not fell_back({"call": call, "kernels": 5}, chip)


def test_groups_that_take_turns_as_expected_are_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    fell_back = importlib.import_module("drawn_kernels").fell_back
    call = "aten::convolution(bf16[4,768,247],bf16[768,48,128],bf16[768])->bf16[4,768,248];padding=[64];groups=16"
    chip = chip_of(find_gpu("h200"), None)
    assert not fell_back({"call": call, "kernels": 65, "us": 31955.2}, chip)
    assert fell_back({"call": call, "kernels": 65, "us": 1600.0}, chip)


def test_a_slow_host_bounds_steps_that_the_gpu_bounds_beside_a_quiet_one(trainings: Any) -> None:
    line = {"step_seconds": 10.0, "copied_seconds": 0.0, "at_paces": {"1.5": 10.0, "2.0": 13.0, "3.0": 19.5}}
    assert [trainings.bound_at(line, pace) for pace in (1.0, 1.3, 2.0, 2.6)] == ["GPU", "GPU", "host", "host"]


@pytest.mark.parametrize(("copied", "bound"), [(1.0, "GPU"), (7.0, "host")])
def test_copies_of_batches_are_work_of_the_host(trainings: Any, copied: float, bound: str) -> None:
    """All but the copies takes the GPU's time, and they grow with the pace to the power of 0.46."""
    paces = {str(pace): 10.0 - copied + copied * pace**0.46 for pace in (1.5, 2.0, 3.0)}
    line = {"step_seconds": 10.0, "copied_seconds": copied, "at_paces": paces}
    assert trainings.bound_at(line, 2.0) == bound
