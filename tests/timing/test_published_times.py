"""Published step times: the held-out draw, the intervals, and the recorded outcomes."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from math import exp, log, sqrt
from pathlib import Path
from statistics import median
from types import ModuleType

import pytest
import yaml

from trainatomy.catalog.files import read_yaml

FOLDER = Path(__file__).parents[2] / "lab" / "timing"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


published = load("published")
OUTCOMES = published.read_results()


def outcome(group: str, ratio: float) -> object:
    """Return an outcome whose published time is ``ratio`` times the predicted one."""
    return replace(OUTCOMES[0], group=group, published_seconds=ratio, predicted_seconds=1.0)


def test_the_draw_depends_only_on_the_name():
    drawn = [published.is_held_out(f"row {number}") for number in range(1000)]
    assert drawn == [published.is_held_out(f"row {number}") for number in range(1000)]
    assert 0.45 < sum(drawn) / len(drawn) < 0.55


def test_every_group_names_its_source():
    groups = yaml.safe_load((FOLDER / "published.yaml").read_text(encoding="utf-8"))["groups"]
    for name, group in groups.items():
        assert "https://" in group["source"] or name == "notebook"
        assert group["gpu"]
        assert group["rows"]


def test_results_match_the_current_rows():
    rows = {row.name: row for row in published.rows()}
    assert [one.name for one in OUTCOMES] == list(rows)
    for one in OUTCOMES:
        assert one.published_seconds == pytest.approx(rows[one.name].seconds, rel=1e-5)
        assert one.held_out == rows[one.name].held_out
        low, high = (bound / one.predicted_seconds for bound in one.interval_seconds)
        assert [low, high] == pytest.approx(read_yaml("intervals.yaml")["uncalibrated"][one.basis], rel=1e-4)


def test_an_interval_covers_one_more_case():
    """Ten groups, mean 0 and deviation 0.1: t of 9 degrees of freedom, 1.833, plus the scatter of the new case."""
    logs = [0.1 * sign * sqrt(9 / 10) for sign in (1, -1) * 5]
    low, high = published.interval([outcome(f"group {number}", exp(value)) for number, value in enumerate(logs)])
    assert log(high) == pytest.approx(1.833 * 0.1 * sqrt(1.1), rel=0.002)
    assert log(low) == pytest.approx(-log(high))


def test_an_interval_covers_what_was_seen():
    seen = [outcome("far", 3.0), *(outcome(f"group {number}", 1.0) for number in range(60))]
    assert published.interval(seen)[1] == pytest.approx(3.0)


def test_few_groups_widen_an_interval_and_one_is_not_enough():
    few, many = (published.interval([outcome(f"{n}", r) for n in range(k) for r in (0.9, 1.1)]) for k in (3, 30))
    assert few[0] < many[0] < many[1] < few[1]
    with pytest.raises(ValueError, match="one group"):
        published.interval([outcome("a", 1.0), outcome("a", 1.2)])


def test_rows_of_one_group_count_once():
    groups = [outcome(f"group {number}", 1.0) for number in range(30)]
    once = published.interval([outcome("a", 1.2), *groups])
    assert published.interval([outcome("a", 1.2)] * 50 + groups) == pytest.approx(once)


def test_times_from_data_sheets_are_within_the_stated_error():
    named = [one for one in OUTCOMES if one.group in ("notebook", "t5-a100", "t5-3090")]
    assert len(named) == 28
    assert median(abs(one.error) for one in named) <= 0.20
    held_out = [one for one in OUTCOMES if one.held_out]
    assert median(abs(one.error) for one in held_out) <= 0.20


def test_intervals_hold_in_the_held_out_half():
    held_out = [one for one in OUTCOMES if one.held_out]
    assert sum(one.inside for one in held_out) >= 0.85 * len(held_out)


def test_a_published_row_is_predicted_again():
    row = next(one for one in published.rows() if one.name == "encoder-inference-a100: 64 x 128")
    before = next(one for one in OUTCOMES if one.name == row.name)
    now = published.predict(row, published.operations_of(row))
    assert now.gpu_seconds == pytest.approx(before.gpu_seconds, rel=0.02)
