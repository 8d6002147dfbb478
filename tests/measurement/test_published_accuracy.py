"""The published accuracy: other tools, components and the limits of the errors."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import limits
import outcomes
import parts
import pytest
import report
import rivalry
import run_rivals
from outcomes import Outcome, Run
from rivals import About, NoAnswer, Said
from steps import Step
from test_processes import MEMORY
from test_report import line

from trainatomy.catalog.versions import parse_version

SAMPLE_OF_SET, SEED = 1, "published accuracy"
TECHNIQUES = ("8bit", "lora", "checkpoint", "adafactor", "fp16", "accumulat")
ROUNDING = 1e-9
"""Relative tolerance of seconds that are summed in another order."""
SMALL_BYTES = 3 * 2**30
"""Largest peak of rows that are quick to predict."""


# The gate


def test_no_error_has_grown() -> None:
    assert limits.violations(outcomes.read(report.ERRORS), limits.read()) == []


def test_limits_are_no_wider_than_the_published_errors() -> None:
    """Check that no limit is above the shipped errors, which could then grow unnoticed."""
    assert limits.of(outcomes.read(report.ERRORS)) == limits.read()


def one(error: float, **changes: Any) -> Outcome:
    """Return a row whose allocated memory is predicted with this error."""
    return Outcome("x", "tuning", {"allocated": round(10**6 * (1 + error))}, {"allocated": 10**6}, **changes)


def test_a_larger_error_a_missing_limit_and_a_missing_prediction_are_violations(tmp_path: Path) -> None:
    run = Run({}, "", [one(0.001), one(-0.002), one(0.001)])
    limits.write(run, tmp_path / "limits.yaml")
    accepted = limits.read(tmp_path / "limits.yaml")
    assert accepted == {"tuning": {"allocated": {"median": 0.001, "worst": 0.002}}}
    assert limits.violations(run, accepted) == []
    assert limits.violations(replace(run, outcomes=[one(0.001), one(-0.003), one(0.001)]), accepted) == [
        "tuning, allocated: the worst error is 0.300 %, beyond 0.200 %"
    ]
    assert limits.violations(replace(run, outcomes=[one(0.0011)]), accepted) == [
        "tuning, allocated: the median error is 0.110 %, beyond 0.100 %"
    ]
    failed = replace(one(0), predicted={}, problem="SimulationError: nonzero")
    assert limits.violations(Run({}, "", [failed]), accepted) == ["x (tuning): not predicted: SimulationError: nonzero"]
    assert "no limit" in limits.violations(run, {})[0]


def test_an_error_of_time_may_not_grow_either() -> None:
    step = Step(1.0, (0.9, 1.1), "host", 0.1, 0.2, {"quiet": 1.0, "slow": 1.25})
    run = Run({}, "", [one(0, step=step)])
    accepted = limits.of(run)
    assert accepted["tuning"]["step, quiet"] == {"median": 0.0, "worst": 0.0}
    assert accepted["tuning"]["step, slow"] == {"median": 0.2, "worst": 0.2}
    assert limits.violations(run, accepted) == []
    longer = Run({}, "", [one(0, step=replace(step, seconds=1.001))])
    assert [text.split(":")[0] for text in limits.violations(longer, accepted)] == ["tuning, step, quiet"] * 2


def drawn() -> list[dict[str, Any]]:
    """Draw small rows, the same in every run of the tests: some of each set, and one of each technique below."""
    small = [
        each
        for each in report.shipped()
        if each["peak_allocated_bytes"] < SMALL_BYTES
        and "torchvision" not in each["workload"]["model"].get("factory", "")
        and not any(word in each["name"] for word in ("resnet", "rwkv"))  # torchvision; slow
        and outcomes.set_of(each) != "notebook"
    ]
    found = []
    for name in ("tuning", "held out", "unseen", "fresh"):
        rows = [each for each in small if outcomes.set_of(each) == name]
        found += random.Random(f"{SEED} {name}").sample(rows, SAMPLE_OF_SET)
    for words in TECHNIQUES:
        matching = [each for each in small if words in json.dumps(each["workload"]) and each not in found]
        found += random.Random(f"{SEED} {words}").sample(matching, 1) if matching else []
    return found


def _release(software: Mapping[str, str]) -> tuple[int, int]:
    return parse_version(software["transformers"])


@pytest.mark.parametrize("measured", drawn(), ids=lambda each: f"{each['name']} ({outcomes.set_of(each)})")
def test_a_sample_of_rows_is_predicted_as_published(measured: dict[str, Any]) -> None:
    """Predict rows of the records again and compare bytes and seconds with errors.json.

    With other versions of the libraries than the published run had, the errors may not grow; with another release of
    transformers a model may compute something else than what was measured.
    """
    run = outcomes.read(report.ERRORS)
    published = {(row.name, row.set): row for row in run.outcomes}
    before, now = published[measured["name"], outcomes.set_of(measured)], outcomes.outcome(measured)
    assert not now.problem
    if run.predicted_with == outcomes.software():
        assert now.predicted == before.predicted
        assert now.parts == before.parts
        assert (now.step is None) == (before.step is None)
        if now.step is not None and before.step is not None:
            assert now.step.seconds == pytest.approx(before.step.seconds, rel=ROUNDING)
    elif _release(run.predicted_with) == _release(outcomes.software()):
        for figure, error in now.errors().items():
            assert abs(error or 0.0) <= abs(before.errors()[figure] or 0.0) + ROUNDING, figure


# Other tools

ABOUT = About("Tool", ("pytest",), "allocated", "by asking")


def test_other_tools_and_trainatomy_are_compared_on_the_same_rows() -> None:
    rows = [Outcome(name, "tuning", {"allocated": 100 + index}, {"allocated": 100}) for index, name in enumerate("abc")]
    again = Outcome("a", "H100", {"allocated": 1}, {"allocated": 100})
    answers_of_tool = Said(ABOUT, "2026-11-21", {}, 0.1, {"a": 150, "c": 80, "gone": 1}, {"b": "NoAnswer: too new"})
    run = Run({}, "", [*rows, again])
    other, own = rivalry.contenders(run, [answers_of_tool])[3:]
    assert (other.asked, list(other.errors)) == (3, pytest.approx([0.5, -0.2]))
    assert (own.asked, list(own.errors)) == (2, pytest.approx([0, 0.02]))
    assert "| Tool | allocated | 2 of 3 | 35.000 % | 50.000 % | 50.000 % | 1 | -20.000 % |" in rivalry.comparison(
        run, [answers_of_tool]
    )
    assert rivalry.about([answers_of_tool])[1] == "  No answer: 1 × too new."


def test_any_exception_of_another_tool_counts_as_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(row: dict[str, Any]) -> int:
        if row["name"] == "a":
            return 7
        raise NoAnswer("not my kind\nreally")

    module: Any = SimpleNamespace(ABOUT=ABOUT, answer=answer, __name__="rivals.tool")
    options = run_rivals.argparse.Namespace(device=None, jobs=2, row_limit=30, time_limit=30)
    found = run_rivals.ask_all([module], [{"name": "a"}, {"name": "b"}], options)
    answers_of_tool = run_rivals.said(module, {name: answers["rivals.tool"] for name, answers in found.items()})
    assert (answers_of_tool.answers, answers_of_tool.no_answers) == ({"a": 7}, {"b": "NoAnswer: not my kind"})
    run_rivals.write(answers_of_tool, tmp_path / "tool.json")
    assert run_rivals.kept(tmp_path) == [answers_of_tool]


def test_another_tool_that_times_out_gives_no_answer() -> None:
    import time

    module: Any = SimpleNamespace(ABOUT=ABOUT, answer=lambda row: time.sleep(60), __name__="rivals.tool")
    options = run_rivals.argparse.Namespace(device=None, jobs=1, row_limit=0.2, time_limit=30)
    found = run_rivals.ask_all([module], [{"name": "a"}], options)
    assert found["a"]["rivals.tool"]["problem"] == "took more than 0.2 s"


def test_shipped_answers_of_other_tools_are_for_measured_rows() -> None:
    names = {row["name"] for row in run_rivals.rows()}
    for answers_of_tool in run_rivals.kept():
        assert answers_of_tool.answers.keys() | answers_of_tool.no_answers.keys() == names, answers_of_tool.about.tool
        assert answers_of_tool.versions.keys() == set(answers_of_tool.about.packages)
        assert answers_of_tool.about.figure in outcomes.FIGURES


def test_mem_tracker_runs_in_a_loop_with_accumulation() -> None:
    """Run mem_tracker on fake CPU tensors: its peak contains parameters, gradients and states."""
    from rivals import mem_tracker

    config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
    workload = {
        "model": {"class": "BertForSequenceClassification", "config": config | {"vocab_size": 1000}},
        "train": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        "data": {"sequence_length": 16},
    }
    row = line("x", allocated=1) | {"workload": workload, "versions": {"torch": "2.11.0"}}
    parameters = 1000 * 64 + 512 * 64 + 2 * (4 * 64 * 64 + 2 * 64 * 128)
    assert 16 * parameters < mem_tracker.answer(row, "cpu") < 40 * parameters


# Components


def test_components_are_compared_with_the_measured_total() -> None:
    measured = line("x", allocated=1, memory=MEMORY, nvml_used_bytes=1, idle_bytes=0)
    components = replace(MEMORY.components, weights=MEMORY.components.weights + 3)
    predicted = replace(MEMORY, components=components)
    found, same = outcomes.compared(measured, predicted)
    outcome = one(0, parts=found, same_instant=same)
    assert same and outcome.gaps()["weights"] == 3 / MEMORY.components.total_bytes
    assert parts.sentence([outcome]).startswith("In 0 of 1 recorded rows")
    assert f"| weights | 1 | 10.000 % | 10.000 % | +10.000 % | 1 | {outcome.name} |" in parts.by_component([outcome])
    shared = measured | {"nvml_used_bytes": None}
    assert "context" not in outcomes.compared(shared, predicted)[0]
    assert outcomes.compared(line("x", allocated=1), predicted) == ({}, None)


def test_components_are_saved_with_a_run(tmp_path: Path) -> None:
    run = Run({}, "", (one(0, parts={"weights": (1, 2)}, same_instant=False), one(0)))
    outcomes.write(run, tmp_path / "errors.json")
    assert outcomes.read(tmp_path / "errors.json") == run
    assert "parts" not in (tmp_path / "errors.json").read_text().splitlines()[2]
    assert asdict(run.outcomes[1])["parts"] == {}
