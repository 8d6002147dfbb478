"""The report of the accuracy benchmark with made-up predictions, and the shipped page."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import bounds
import busy
import outcomes
import page
import pytest
import report
import step_tables
import steps
import tables
from grid import rows
from outcomes import Outcome, Run
from steps import Step
from techniques import PLAIN, techniques
from test_measure import RESULT

from trainatomy.errors import SimulationError
from trainatomy.results.measurement import HostPace
from trainatomy.results.time import PacedStep, Time

if TYPE_CHECKING:
    from trainatomy.workload.schema import Workload

MIB = 2**20
CARD = "NVIDIA H200"
TIME = Time(0.1, (0.08, 0.15), 80, None, "host", 0.05, 0.09, {}, 1, 10, None, None, 3, "data sheet", "a host", ())


def line(name: str, *, allocated: int, held_out: bool = True, **changes: Any) -> dict[str, Any]:
    """Return a measured line with this peak in MiB."""
    workload = {"model": {"class": "BertModel"}}
    measured = replace(RESULT, name=name, workload=workload, peak_allocated_bytes=allocated * MIB, **changes)
    return asdict(measured) | {"family": "bert", "held_out": held_out, "alone": False}


@pytest.fixture
def predicted_workloads(monkeypatch: pytest.MonkeyPatch) -> list[Workload]:
    """Replace ``predict`` by one that returns 100 MiB, and return the list of predicted workloads."""
    found: list[Workload] = []

    def predict(workload: Workload) -> Any:
        found.append(workload)
        if workload.name == "impossible":
            raise SimulationError("aten.nonzero needs data\nin encoder")
        memory = SimpleNamespace(peak_allocated_bytes=100 * MIB, peak_reserved_bytes=20, device_bytes=70 * MIB)
        return SimpleNamespace(memory=memory, seconds_taken=0.1, time=TIME)

    monkeypatch.setattr(outcomes.api, "predict", predict)
    return found


def test_a_prediction_uses_the_measured_gpu_and_software(predicted_workloads: list[Workload]) -> None:
    found = outcomes.outcome(line("x", allocated=80), "h100")
    assert (predicted_workloads[0].gpu, predicted_workloads[0].software.torch) == ("h100", "2.11.0")
    assert found.error("allocated") == pytest.approx(0.25)
    assert found.error("reserved") == 0


def test_the_process_figure_excludes_the_nvml_gap_on_a_shared_gpu(predicted_workloads: list[Workload]) -> None:
    shortfall = outcomes.cards()[CARD]["process_shortfall_bytes"]
    shared = line("x", allocated=80, process_bytes=70 * MIB - shortfall, nvml_used_bytes=None, idle_bytes=None)
    assert outcomes.outcome(shared).error("device") == 0
    alone = line("x", allocated=80, device_bytes=70 * MIB, process_bytes=1, nvml_used_bytes=2, idle_bytes=1)
    assert outcomes.outcome(alone).error("device") == 0
    assert outcomes.outcome(shared | {"gpu": "another"}, "h100").error("device") is None


def test_a_row_that_cannot_be_predicted_stays_in_the_report(predicted_workloads: list[Workload]) -> None:
    found = outcomes.outcome(line("impossible", allocated=80))
    assert found.problem == "SimulationError: aten.nonzero needs data"
    assert "SimulationError" in tables.details([found])[-1]
    assert tables.summary([found])[2:] == []


def test_the_summary_counts_exact_and_too_low(predicted_workloads: list[Workload]) -> None:
    found = [outcomes.outcome(line(str(size), allocated=size)) for size in (100, 80, 200)]
    assert tables.summary(found)[2] == "| allocated | 3 | 25.000 % | 50.000 % | 50.000 % | 1 | -50.000 % | 1 |"


def test_held_out_and_tuned_rows_are_apart(predicted_workloads: list[Workload]) -> None:
    lines = [
        line("a", allocated=100),
        line("b", allocated=100, held_out=False),
        line("c", allocated=90, held_out=False),
    ]
    text = page.page(Run({}, "", [outcomes.outcome(each) for each in lines]), lines)
    assert "## Held out: 1 rows" in text
    assert "## Tuned on: 2 rows" in text
    assert "3 rows on NVIDIA H200, driver 580, 2026-11-21." in text
    assert "| Bert | 1 | 0.000 % | 0.000 % | 0.000 % | 0 | 0.000 % |" in text


def test_running_out_of_memory_is_shown(predicted_workloads: list[Workload]) -> None:
    assert outcomes.outcome(line("x", allocated=80, status="out of memory")).problem == "out of memory"


def test_a_saved_run_can_be_read_back(tmp_path: Path) -> None:
    step = Step(0.1, (0.08, 0.15), "host", 0.09, 0.05, {"a": 0.11})
    one = Outcome("x", "tuning", {"allocated": 1, "device": None}, {"allocated": 2, "device": 3}, step=step)
    run = Run({"torch": "2"}, "0", (one,))
    outcomes.write(run, tmp_path / "errors.json")
    assert outcomes.read(tmp_path / "errors.json") == run


def test_a_step_is_compared_with_each_measurement_session(predicted_workloads: list[Workload]) -> None:
    alone = line("x", allocated=80, step_seconds=0.125) | {
        "alone": True,
        "occasion": "slow",
        "steps_again": {"quick": 0.1},
    }
    step = outcomes.outcome(alone).step
    assert step is not None
    assert list(step.measured) == ["quick", "slow"]
    assert (step.error("quick"), step.error("slow"), step.error("never")) == (0, pytest.approx(-0.2), None)
    assert (step.holds("quick"), step.holds("slow")) == (True, True)
    assert not replace(step, measured={"quick": 0.16}).holds("quick")


def test_times_measured_on_a_shared_gpu_do_not_count(predicted_workloads: list[Workload]) -> None:
    step = outcomes.outcome(line("x", allocated=80, step_seconds=0.1)).step
    assert step is not None and step.measured == {}
    ran_out = line("x", allocated=80, step_seconds=0.1, status="out of memory") | {"alone": True}
    assert steps.measured(ran_out) == {}


def test_times_of_other_sessions_belong_to_the_same_row_and_gpu(tmp_path: Path) -> None:
    entries = [("b", "x", False, 1.0, CARD), ("b", "x", True, 2.0, CARD), ("b", "x", False, 3.0, "another")]
    keys = ("occasion", "row", "tiny", "step_seconds", "gpu")
    file = tmp_path / "steps.jsonl"
    file.write_text("".join(json.dumps(dict(zip(keys, entry, strict=True))) + "\n" for entry in entries))
    lines = [line(name, allocated=1, gpu=CARD) for name in "xy"]
    one, other = steps.with_other_occasions(lines, lambda _: "held out", [file])
    assert one["steps_again"] == {"b": 1.0}
    assert "steps_again" not in other
    assert "on_several_occasions" not in one  # a single row has no line for the fastest sessions


def test_the_fastest_of_several_sessions_is_a_separate_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "MANY", 1)
    again = {"occasion": "b", "row": "x", "tiny": False, "step_seconds": 1.0, "gpu": CARD}
    file = tmp_path / "steps.jsonl"
    file.write_text(json.dumps(again) + "\n")
    both = {"gpu": CARD, "alone": True, "step_seconds": 2.0, "occasion": "a"}
    lines = [line(name, allocated=1) | both for name in "xy"]
    one, other = (steps.measured(each) for each in steps.with_other_occasions(lines, lambda _: "held out", [file]))
    assert one == {"b": 1.0, "a": 2.0, steps.QUICKEST: 1.0}
    assert other == {"a": 2.0, steps.QUICKEST: 2.0}


def timed_row(name: str, predicted: float, measured: float, bound: str = "host") -> Outcome:
    """Return a held-out row measured in one session, with an interval of ±10 %."""
    step = Step(predicted, (0.9 * predicted, 1.1 * predicted), bound, 0.1, 0.2, {"a": measured})
    return Outcome(name, "held out", {}, {}, step=step)


def test_order_is_checked_for_pairs_that_differ() -> None:
    pairs = [(1.0, 1.0), (1.2, 1.05), (1.1, 2.0), (3.0, 3.0)]  # 1.0 and 1.05 are too close; 1.2 > 1.1 is wrong
    found = [row.step for row in (timed_row("x", *pair) for pair in pairs) if row.step]
    assert steps.order(found, "a") == (4, 5)
    assert steps.order([replace(step, seconds=1.0) for step in found], "a") == (0, 5)


def test_whole_steps_are_compared_by_what_bounds_them_and_at_the_recorded_pace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(busy, "busy", lambda run: [])
    slow = timed_row("x", 1.0, 1.5)
    assert slow.step is not None
    paced = replace(slow, step=replace(slow.step, pace=1.45, paced_seconds=1.44, paced_occasion="a"))
    members = [paced, timed_row("y", 2.5, 2.0), timed_row("z", 4.0, 4.4, "arithmetic")]
    text = bounds.section(Run({}, "", members), step_tables.timed(members))
    assert [row for row in text if row.startswith("| Held")] == [
        "| Held out | GPU-bound steps | 1 | 9.1 % | 9.1 % | 9.1 % |",
        "| Held out | CPU-bound steps | 2 | 29.2 % | 33.3 % | 33.3 % |",
        "| Held out | CPU-bound steps, at the recorded pace | 1 | 4.0 % | 4.0 % | 4.0 % |",
    ]


def test_a_row_with_a_recorded_pace_is_predicted_at_it() -> None:
    time = replace(TIME, at_paces=(PacedStep(2.0, 0.19),), probe_seconds={"launches/1": 2e-4})
    pace = asdict(HostPace("launches/1", during_seconds=(3e-4, 2.9e-4, 9e-4)))
    row = line("x", allocated=1) | {"alone": True, "step_seconds": 0.15, "occasion": "a", "host_pace": pace}
    found = steps.step_of(time, row)
    assert found is not None
    assert (found.pace, found.paced_seconds) == (pytest.approx(1.5), pytest.approx(0.145))
    assert found.error_at_pace() == pytest.approx(0.145 / 0.15 - 1)
    without = steps.step_of(time, row | {"host_pace": None})
    assert without is not None and without.error_at_pace() is None


def test_times_are_listed_by_set_session_bound_family_and_row() -> None:
    members = [timed_row("x", 1.0, 1.0), timed_row("y", 2.5, 2.0), timed_row("z", 4.0, 4.4, "arithmetic")]
    run = Run({}, "", [*members, Outcome("w", "held out", {}, {})])
    text = "\n".join(step_tables.section(run, [line(name, allocated=1) for name in "wxyz"]))
    assert "| Held out | a | 3 | 9.1 % | 25.0 % | 25.0 % | 2 of 3 | 3 of 3 | 2 of 3 |" in text
    assert "| Held out | a | CPU | 2 | 12.5 % | 25.0 % | 25.0 % | 1 of 2 | 1 of 1 | 1 of 2 |" in text
    assert "| Bert | a | 3 |" in text
    assert "1 have no predicted time" in text
    rows = step_tables.details(run)[2:]
    assert (
        rows[1]
        == "| y | held out | a | CPU | 2000.0 | 2500.0 | +25.0 % | 2250.0 – 2750.0 **(outside)** | 100.0 | 200.0 |"
    )
    assert step_tables.section(Run({}, "", []), []) == []


def test_measurement_sessions_with_common_rows_are_compared() -> None:
    row = timed_row("x", 1.0, 2.0)
    assert row.step is not None
    both = replace(row, step=replace(row.step, measured={"a": 2.0, "b": 3.0}))
    assert step_tables.again(Run({}, "", [both, row]))[0].startswith("The same 1 rows took 1.50 times as long")


def test_the_predicted_bound_is_compared_with_the_gpu_busy_time(tmp_path: Path) -> None:
    def profiled(name: str, busy_share: float) -> dict[str, Any]:
        return {"row": name, "tiny": False, "kernels": 0, "kernel_seconds": busy_share, "step_seconds": 1.0}

    file = tmp_path / "kernels.jsonl"
    shares = {"x": 0.5, "y": 0.8, "z": 0.95}
    file.write_text("".join(json.dumps(profiled(*one)) + "\n" for one in shares.items()))
    bounds = {"x": "host", "y": "host", "z": "arithmetic", "unknown": "host"}
    rows = [replace(timed_row(name, 1.0, 1.0, bound), set="tuning") for name, bound in bounds.items()]
    found = busy.busy(Run({}, "", rows), file)
    assert [(one.name, one.share, round(one.error, 3)) for one in found] == [
        ("x", 0.5, -0.6), ("y", 0.8, -0.75), ("z", 0.95, -0.789)
    ]  # fmt: skip
    table = "\n".join(busy._bounds(found))
    assert "| up to 70% | 1 | 1 | 0 |" in table and "| between | 1 | 1 | 0 |" in table
    assert "| 85% and more | 1 | 0 | 1 |" in table


def test_the_bound_of_a_step_is_right_where_it_is_clear() -> None:
    found = busy.busy(outcomes.read(report.ERRORS))
    assert len(found) > 30
    for one in found:
        if one.share <= busy.HARDLY or one.share >= busy.MOSTLY:
            assert (one.bound_by == "host") == (one.share <= busy.HARDLY), one
    assert sorted(abs(one.error) for one in found)[len(found) // 2] < 0.03


def test_every_shipped_measurement_session_is_described() -> None:
    known = steps.occasions()
    found = {occasion for each in report.shipped() for occasion in steps.measured(each)}
    assert found <= {*known, steps.QUICKEST}
    assert all(one.keys() == {"title", "how", "host"} for one in known.values())


def test_changes_between_runs_are_described() -> None:
    one = Outcome("x", "tuning", {"allocated": 100}, {"allocated": 100})
    runs = [Run({}, "", [each]) for each in (one, replace(one, predicted={"allocated": 101}))]
    assert outcomes.changes(*runs) == ["x allocated: +0.0000 % -> +1.0000 %"]
    assert outcomes.changes(runs[0], runs[0]) == []
    timed = [Run({}, "", [timed_row("x", seconds, 1.0)]) for seconds in (1.0, 1.5)]
    assert outcomes.changes(*timed) == ["x step, a: +0.0000 % -> +50.0000 %"]


def test_techniques_of_a_row() -> None:
    found = {row.name: techniques(row.mapping) for row in rows()}
    assert found["bert-base-fp32"] == [PLAIN]
    assert found["bert-large-everything"] == [
        "fp16 autocast",
        "gradient accumulation",
        "gradient checkpointing",
        "Adafactor",
    ]
    assert found["bert-large-inference-bf16"] == ["inference", "16-bit weights"]


def test_the_shipped_page_comes_from_the_shipped_records() -> None:
    lines, run = report.shipped(), outcomes.read(report.ERRORS)
    assert run.records_digest == outcomes.digest(lines), "run `make accuracy`"
    assert [(one.name, one.measured) for one in run.outcomes] == [
        (each["name"], outcomes.measured(each)) for each in lines
    ]
    assert report.PAGE.read_text("utf-8") == page.page(run, lines), "run `make accuracy`"
    readme = report.README.read_text("utf-8")
    assert page.README_MARKS[0] in readme
    assert readme == page.in_readme(readme, run), "run `make accuracy`"


def test_shipped_rows_are_rows_of_the_grid_and_were_held_out_as_it_says() -> None:
    grid_rows = {row.name: row for row in rows()}
    for each in report.shipped():
        if outcomes.set_of(each) != "notebook":
            assert each["held_out"] == grid_rows[each["name"]].held_out, each["name"]


def test_the_nvml_gap_of_a_process_matches_the_records() -> None:
    both = [each for each in report.shipped() if outcomes.has_card(each) and each["process_bytes"] is not None]
    shortfalls = {(each["gpu"], each["device_bytes"] - each["process_bytes"]) for each in both}
    assert shortfalls == {(gpu, known["process_shortfall_bytes"]) for gpu, known in outcomes.cards().items()}
