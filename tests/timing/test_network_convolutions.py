"""Which convolutions of networks are measured for a calibration, and that no drawn training is among them."""

from __future__ import annotations

import importlib
import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "benchmarks" / "timing"
FORWARD = "aten::convolution(bf16[6,3,32,32],bf16[16,3,3,3],bf16[16])->bf16[6,16,16,16];stride=[2, 2];padding=[1, 1]"
BACKWARD = (
    "aten::convolution_backward(bf16[6,16,16,16],bf16[6,3,32,32],bf16[16,3,3,3])->bf16[16,3,3,3],bf16[16]"
    ";bias_sizes=[16];stride=[2, 2];padding=[1, 1];output_mask=[False, True, True]"
)
DEEP = "aten::convolution(f32[6,32,50],f32[32,8,5])->f32[6,32,50];padding=[2];groups=4"
UPWARDS = "aten::convolution(f32[6,8,5],f32[8,4,3])->f32[6,4,10];stride=[2];transposed=True;output_padding=[1]"


@pytest.fixture
def networks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    return importlib.import_module("network_convolutions")


def test_no_training_that_is_or_will_be_drawn_is_among_them(networks: Any) -> None:
    drawing = importlib.import_module("drawn_trainings")
    rows = yaml.safe_load((FOLDER / "trainings.yaml").read_text(encoding="utf-8"))["rows"]
    drawn = {name: row for name, row in rows.items() if name.endswith("-drawn") or "-drawn-" in name}
    sets = drawing.sets()
    for seed, family in product(range(61, 91), ("usual", "all others")):
        drawn |= drawing.drawn(seed, 40, sets[family])
    chosen = networks.candidates()
    taken = {_in_any_precision(row) for row in drawn.values()}
    assert len(chosen) > 1000 < len(drawn)
    assert not [name for name, row in chosen.items() if _in_any_precision(row) in taken]


def _in_any_precision(row: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in row.items() if name != "precision"}, sort_keys=True)


def test_both_directions_of_a_convolution_are_one_case(networks: Any) -> None:
    lines = [
        {"call": call, "share": share} for call, share in ((FORWARD, 0.1), (DEEP, 0.2), (BACKWARD, 0.3), (UPWARDS, 1))
    ]
    stem, deep = (case.make.args for case in networks.cases(lines))
    assert stem[0]._asdict() | {"bias": True, "stem": True} == stem[0]._asdict()
    assert (stem[0].image, stem[0].stride, stem[0].padding) == ((6, 3, 32, 32), (2, 2), (1, 1))
    assert (deep[0].groups, deep[0].padding, deep[0].bias, deep[0].stem) == (4, (2,), False, False)
    assert [str(one[1]) for one in (stem, deep)] == ["torch.bfloat16", "torch.float32"]
