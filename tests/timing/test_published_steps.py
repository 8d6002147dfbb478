"""Whole steps that others published and that nothing is fitted to: the draw, the rows, the page and the intervals."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from trainatomy.catalog.files import read_yaml

sys.path.append(str(Path(__file__).parents[2] / "lab" / "timing"))

import published_steps
from published_steps import ROWS, SOURCES, is_sealed

STEPS = list(published_steps.read().values())
GPU_BOUND = [step for step in STEPS if not step.waits_for_host]


def test_sources_are_sealed_by_a_hash_of_their_names():
    for repository, source in yaml.safe_load(SOURCES.read_text(encoding="utf-8"))["repositories"].items():
        assert not any(is_sealed(repository, path) for path in source.get("open", ()))
        assert all(is_sealed(repository, path) for path in source.get("sealed", ()))
        assert {*source.get("left", {})} <= {"*", *source.get("open", ()), *source.get("sealed", ())}


def test_every_group_is_of_a_listed_source_and_says_what_was_assumed():
    repositories = yaml.safe_load(SOURCES.read_text(encoding="utf-8"))["repositories"]
    for name, group in yaml.safe_load(ROWS.read_text(encoding="utf-8"))["groups"].items():
        repository, _, path = group["source"].partition(":")
        listed = repositories[repository]["sealed" if group.get("sealed") else "open"]
        assert path in listed, name
        assert group["assumed"]
        assert group["year"] >= 2018


def test_predictions_are_of_the_rows():
    rows = {row.name: row for row in published_steps.rows(ROWS)}
    assert [step.name for step in STEPS] == list(rows)
    for step in STEPS:
        assert step.published_seconds == pytest.approx(rows[step.name].seconds, rel=1e-5)
        assert step.gpu == rows[step.name].gpu
        assert step.sealed == published_steps.sealed_groups()[rows[step.name].group]


def test_the_page_is_that_of_the_predictions():
    assert published_steps.PAGE.read_text(encoding="utf-8") == published_steps.page(STEPS)


@pytest.mark.parametrize("sealed", [False, True])
def test_intervals_cover_published_steps(sealed: bool):
    steps = [step for step in GPU_BOUND if step.sealed == sealed]
    assert sum(step.is_inside for step in steps) >= 0.88 * len(steps)


def test_errors_of_cards_are_those_of_their_steps():
    known = read_yaml("checked.yaml")["gpus"]
    for gpu in {step.gpu for step in GPU_BOUND}:
        assert known[gpu]["steps"]["count"] >= sum(step.gpu == gpu for step in GPU_BOUND)


def test_a_published_step_is_predicted_again():
    row = next(
        row for row in published_steps.rows(ROWS) if row.name == "neusight-inference-Tesla_T4: bert_large, 16 x 512"
    )
    before = next(step for step in STEPS if step.name == row.name)
    assert published_steps.predict(row).predicted_seconds == pytest.approx(before.predicted_seconds, rel=0.01)
