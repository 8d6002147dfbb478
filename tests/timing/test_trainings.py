"""The trainings for the accuracy of time: they are workloads, and each has a prediction of what is written."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainatomy.catalog.gpus import find_gpu
from trainatomy.timing.chips import chip_of
from trainatomy.workload.schema import Workload

FOLDER = Path(__file__).parents[2] / "benchmarks" / "timing"
REFUSED = frozenset({"fnet-fp16-drawn-51", "bigbird-pegasus-bf16-drawn-61", "fnet-fp16-drawn-62"})
"""Trainings that were drawn and that a GPU refuses."""
LAST_SEEDS = {"latest_calls.yaml": "-50", "sound_calls.yaml": "-52", "uncovered_calls.yaml": "-58"}
"""Files of trainings whose calls became points after a seed was drawn; those of all others after seed 44."""
LATEST_SEEDS = tuple(f"-{seed}" for seed in range(32, 64))
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


def test_no_recurrent_network_that_may_be_drawn_is_among_those_recorded_between(trainings: Any) -> None:
    drawing, timelines = map(importlib.import_module, ("drawn_trainings", "recurrent_timelines"))
    usual = {name: row["batch"] for family in drawing.sets()["usual"].values() for name, row in family.items()}
    factors = drawing.FACTORS + drawing.LATER_FACTORS
    cases = list(timelines.between())
    assert len(cases) == 3 * len(timelines.DRAWN) * len(timelines.BETWEEN)
    for case in cases:
        batch = usual[timelines.DRAWN[case["kind"], case["sizes"][1]]]
        assert case["shape"][0] not in {round(batch * factor) for factor in factors}


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
        ("-61", _of_all_kinds(drawing, sets, 61, usual=36, wide=5, networks=0, others=34, quantised="quantised last")),
        ("-62", _of_all_kinds(drawing, sets, 62, usual=36, wide=5, networks=0, others=34, quantised="quantised last")),
        ("-63", _of_all_kinds(drawing, sets, 63, usual=36, wide=5, networks=0, others=34, quantised="quantised last")),
    ):
        before = [row for name, row in rows.items() if not name.endswith(LATEST_SEEDS) or name[-3:] < seed]
        for name, of_file in calls.items():
            before += of_file if seed > LAST_SEEDS.get(name, "-44") else []
        drawn |= {name: row for name, row in latest.items() if row not in before and name not in REFUSED}
    assert {name: row for name, row in rows.items() if name.endswith("-drawn") or "-drawn-" in name} == drawn


def test_later_draws_have_other_batches(trainings: Any) -> None:
    drawing = importlib.import_module("drawn_trainings")
    candidates = {"one": {"model": {"of": "model", "batch": 100}}}
    batches = {seed: next(iter(drawing.drawn(seed, 1, candidates).values()))["batch"] for seed in range(30, 90)}
    assert {batch for seed, batch in batches.items() if seed <= 60} == {50, 75, 100, 125, 150}
    assert {batch for seed, batch in batches.items() if seed > 60} == {60, 90, 110, 140, 175}


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
