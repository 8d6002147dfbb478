"""The benchmark of the search's choices: its cases, the order of its runs, the comparison with what was measured."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import fit_cases
import fit_page
import fit_results
import fit_tasks
import grid
import measure
import pytest
import regret
from fit_cases import GIB, Cases, Setting

from trainatomy.catalog.architectures import architectures
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from fit_tasks import Group

CASES = fit_cases.read()
HELD_OUT = fit_cases.read(fit_cases.HELD_OUT / "cases.yaml")
SMALL = Cases(CASES.cases[:2], tuple(s for s in CASES.grid if s.batch >= 16), 64, (16, 24))
BERT, GPT2 = (case.name for case in SMALL.cases)
SIZES = {(64, False): 26.0, (32, False): 23.0, (16, False): 12.0, (64, True): 15.7, (32, True): 10.0, (16, True): 8.0}
"""Device memory in GiB, by batch and checkpointing."""
SPEEDS = dict(zip(SIZES, (120.0, 110.0, 100.0, 90.0, 85.0, 5.0), strict=True))


def point(case: str, setting: Setting) -> dict[str, Any]:
    """Return a point of a plan, with made-up predictions."""
    key = (setting.batch, setting.checkpointing)
    size = int(SIZES[key] * GIB)
    mapping = next(one.mapping for one in SMALL.cases if one.name == case)
    limits = {
        str(gib): {"fits": size <= gib * GIB, "device_bytes": size, "capacity_bytes": gib * GIB - GIB}
        for gib in SMALL.limits_gib
    }
    return {
        "case": case, "label": setting.label, "batch": setting.batch, "accumulation": setting.accumulation,
        "checkpointing": setting.checkpointing, "workload": setting.apply(mapping), "step_seconds": 64 / SPEEDS[key],
        "samples_per_second": SPEEDS[key], "bound_by": "host" if setting.batch == 16 else "arithmetic",
        "peak_reserved_bytes": size - GIB, "device_bytes": size, "limits": limits,
    }  # fmt: skip


def choice(case: str, gib: int, setting: Setting, **changes: Any) -> dict[str, Any]:
    """Return a choice of the search: a point of the grid."""
    head = {"limit_gib": gib, "capacity_bytes": (gib - 1) * GIB, "fits": True, "seconds_to_answer": 9.0}
    return point(case, setting) | head | changes


def plan_of(*choices: dict[str, Any]) -> fit_tasks.Plan:
    """Return a plan for the two small grids."""
    points = [point(case.name, setting) for case in SMALL.cases for setting in SMALL.grid]
    return {"headroom": 0.05, "points": points, "choices": list(choices)}


def line(kind: str, entry: dict[str, Any], gib: int | None = None, **changes: Any) -> dict[str, Any]:
    """Return a measured line that is as predicted."""
    names = ("case", "label", "samples_per_second", "peak_reserved_bytes", "device_bytes")
    return {"kind": kind, "limit_gib": gib, "status": "completed", "alone": kind != "verdict"} | {
        name: entry[name] for name in names
    } | changes  # fmt: skip


@pytest.mark.parametrize(
    ("case", "cases"),
    [(case, cases) for cases in (CASES, HELD_OUT) for case in cases.cases],
    ids=lambda value: getattr(value, "name", ""),
)
def test_every_setting_of_a_grid_has_the_effective_batch(case: fit_cases.Case, cases: Cases) -> None:
    for setting in cases.grid:
        workload = Workload.from_mapping(setting.apply(case.mapping))
        assert workload.batch_size * workload.train.gradient_accumulation_steps == cases.effective_batch
        assert fit_cases.setting_of(workload.to_mapping(), case.mapping) == setting


def test_no_case_was_measured_before_and_every_model_ships() -> None:
    known = {_settings(row.workload().to_mapping()) for row in grid.rows()}
    shipped = {name for entry in architectures() for name in (entry.hub_id, *entry.also)}
    for case in (*CASES.cases, *HELD_OUT.cases):
        assert case.mapping["model"]["id"] in shipped
        grid_ = HELD_OUT.grid if case in HELD_OUT.cases else CASES.grid
        assert not known & {_settings(setting.apply(case.mapping)) for setting in grid_}


def _settings(mapping: dict[str, Any]) -> str:
    """Return everything but the name, defaults filled in."""
    mapping = {name: value for name, value in mapping.items() if name != "name"}
    return json.dumps(Workload.from_mapping(mapping).model_dump(mode="json"), sort_keys=True)


def test_settings_off_the_grid_are_named_by_what_differs() -> None:
    case = CASES.cases[0]
    mapping = Setting(8, 8, True).apply(case.mapping)
    assert regret.label_of(mapping, case) == "8 × 8, checkpointing"
    mapping["train"]["optim"] = "adamw_torch"
    assert fit_cases.setting_of(mapping, case.mapping) is None
    mapping["allocator"] = "expandable_segments:True"
    changes = "train.optim=adamw_torch; allocator=expandable_segments:True"
    assert regret.label_of(mapping, case) == f"8 × 8, checkpointing; {changes}"


def test_what_may_be_best_is_measured_first_and_the_hopeless_last() -> None:
    plan = plan_of(choice(BERT, 16, Setting(16, 4, False)), choice(BERT, 24, Setting(16, 4, False)))
    plan["points"][2]["device_bytes"] = 100 * GIB  # BERT, 64 × 1: never fits
    groups = fit_tasks.groups(plan, SMALL)
    kinds = [group.tasks[0].kind for group in groups]
    assert kinds == sorted(kinds[:-2], key=["grid", "chosen", "automatic", "verdict"].index) + ["grid"] * 2
    labels = {(task.case, task.label) for group in groups for task in group.tasks if task.kind == "grid"}
    assert (BERT, "64 × 1") not in labels and (GPT2, "64 × 1") in labels
    assert [task.label for group in groups[-2:] for task in group.tasks] == ["16 × 4, checkpointing"] * 2
    assert [(t.limit_gib, t.label) for g in groups for t in g.tasks if t.kind == "chosen"] == [(16, "16 × 4")]


def test_settings_near_a_limit_run_under_it_with_what_it_leaves() -> None:
    groups = fit_tasks.groups(plan_of(), SMALL)
    near = [task for group in groups for task in group.tasks if task.kind == "verdict" and task.case == BERT]
    assert {(task.limit_gib, task.label) for task in near} == {
        (16, "64 × 1, checkpointing"),
        (24, "32 × 2"),
        (24, "64 × 1"),
    }
    assert all(task.capacity_bytes == (task.limit_gib - 1) * GIB for task in near if task.limit_gib)


def test_what_has_a_line_is_not_measured_again(tmp_path: Path) -> None:
    entry = point(BERT, Setting(64, 1, False))
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps(line("grid", entry)) + "\n")
    before, after = (fit_tasks.groups(plan_of(), SMALL, done) for done in ((), measure.keys_done([path])))
    left = {task.key for group in before for task in group.tasks} - {task.key for g in after for task in g.tasks}
    assert left == {("grid", BERT, None, "64 × 1")}


def test_groups_run_alone_or_within_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake_run(group: Group, out: Path, deadline: float) -> None:
        began = time.monotonic()
        time.sleep(0.2)
        if group.tasks[0].case == GPT2 and group.tasks[0].kind == "grid":
            raise RuntimeError("broken")
        for task in group.tasks:
            measure.append(out, measure.line_of(task, group) | {"began": began, "ended": time.monotonic()})

    monkeypatch.setattr(measure, "run_group", fake_run)
    groups = fit_tasks.groups(plan_of(), SMALL)
    options = measure.parse(["--out", str(tmp_path)])
    campaign = measure.Campaign(options, list(groups), 40 * GIB, tmp_path)
    campaign.run()
    lines = [json.loads(text) for text in (tmp_path / "measured.jsonl").read_text().splitlines()]
    assert len(campaign.failed) == sum(g.tasks[0].case == GPT2 and g.tasks[0].kind == "grid" for g in groups)
    assert "broken" in (tmp_path / "failed.jsonl").read_text()
    assert any(_beside(one, lines) for one in lines)
    for one in lines:
        beside = _beside(one, lines)
        assert not (one["alone"] and beside)
        assert all((one["limit_gib"] or 0) + (other["limit_gib"] or 0) <= 40 for other in beside)


def _beside(one: dict[str, Any], lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of other processes that ran at the same time."""
    return [
        other
        for other in lines
        if other["began"] != one["began"] and other["began"] < one["ended"] and other["ended"] > one["began"]
    ]


def test_nothing_starts_that_would_end_too_late(tmp_path: Path) -> None:
    options = measure.parse(["--out", str(tmp_path), "--time-limit", "1"])
    campaign = measure.Campaign(options, fit_tasks.groups(plan_of(), SMALL), 40 * GIB, tmp_path)
    campaign.run()
    assert not campaign.waiting and not (tmp_path / "measured.jsonl").exists()


def compared(lines: list[dict[str, Any]], *choices: dict[str, Any]) -> fit_results.Comparison:
    """Compare lines with the small plan."""
    return fit_results.compare(plan_of(*choices), SMALL, lines)


def all_points() -> list[dict[str, Any]]:
    """Return a line for each point, as predicted."""
    return [line("grid", entry) for entry in plan_of()["points"]]


def test_regret_is_measured_against_what_fits_and_against_what_leaves_headroom() -> None:
    chosen = choice(BERT, 24, Setting(16, 4, False)) | {"label": "16 × 4; allocator=expandable_segments:True"}
    lines = [*all_points(), line("chosen", chosen, 24, samples_per_second=99.0)]
    found = next(one for one in compared(lines, chosen).regrets if (one.case, one.limit_gib) == (BERT, 24))
    assert (found.best, found.best_measured) == ("32 × 2", 110.0)  # 23 of 24 GiB: no headroom left
    assert not found.from_grid
    assert (found.roomy, found.roomy_measured) == ("16 × 4", 100.0)
    assert found.share == pytest.approx(0.9) and found.roomy_share == pytest.approx(0.99)


def test_a_choice_on_the_grid_counts_as_it_ran_with_the_grid() -> None:
    chosen = choice(BERT, 24, Setting(16, 4, False))
    lines = [*all_points(), line("chosen", chosen, 24, samples_per_second=80.0)]
    found = next(one for one in compared(lines, chosen).regrets if (one.case, one.limit_gib) == (BERT, 24))
    assert found.from_grid and found.roomy_share == pytest.approx(1.0)


def test_contenders_measured_again_replace_the_first_session() -> None:
    chosen = choice(BERT, 24, Setting(16, 4, False))
    other = choice(BERT, 16, Setting(32, 2, True))
    contender = point(BERT, Setting(16, 4, False))
    again = [
        line("grid", contender, samples_per_second=70.0),
        line("chosen", chosen, 24, samples_per_second=60.0),
        line("chosen", other, 16, samples_per_second=61.0),
    ]
    found = fit_results.compare(plan_of(chosen, other), SMALL, all_points(), again)
    at_16, at_24 = found.regrets[:2]
    assert (at_24.from_grid, at_24.measured, at_24.limited_measured) == (True, 70.0, 60.0)
    assert (at_24.roomy, at_24.roomy_measured, at_24.roomy_again) == ("64 × 1, checkpointing", 90.0, False)
    assert at_24.share == pytest.approx(70 / 110) and at_24.limited_share == pytest.approx(60 / 90)
    assert at_24.foreseen_share == 1.0  # within the first session
    assert (at_16.from_grid, at_16.measured) == (False, 61.0)  # a point, but no contender: as it ran under its limit
    text = fit_page.page([found], SMALL)
    assert f"| {BERT} | 24 | 16 × 4 | 100 | 70.0 | 32 × 2 | 110† | 63.6% | 77.8%† |" in text
    assert "1 of 2 below 97%" not in text and "2 of 2 below 97%" in text


@pytest.mark.parametrize(("visible", "expected"), [("1", "second"), ("GPU-abc", "by uuid GPU-abc"), (None, "first")])
def test_memory_is_read_of_the_gpu_that_cuda_uses(
    visible: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = SimpleNamespace(gpus=("first", "second"), device=lambda uuid: f"by uuid {uuid}")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert measure.visible_gpu(driver) == expected


def test_measuring_the_ties_finds_what_is_faster_than_the_choice() -> None:
    checkpointing = Setting(64, 1, True)
    chosen = choice(BERT, 24, Setting(16, 4, False), ties=[checkpointing.label, "32 × 2"])  # 32 × 2: no headroom
    again = [
        line("grid", point(BERT, Setting(16, 4, False)), samples_per_second=70.0),
        line("chosen", chosen, 24, samples_per_second=60.0),
    ]
    first_only = fit_results.compare(plan_of(chosen), SMALL, all_points(), again).regrets[1]
    assert first_only.tied_share == first_only.roomy_share == pytest.approx(70 / 90)  # the tie ran in another session
    again.append(line("grid", point(BERT, checkpointing), samples_per_second=88.0))
    found = fit_results.compare(plan_of(chosen), SMALL, all_points(), again).regrets[1]
    assert found.roomy_share == pytest.approx(70 / 88) and found.tied_share == 1.0


def test_unseen_trainings_have_a_section_of_their_own() -> None:
    found = compared(all_points(), choice(BERT, 16, Setting(16, 4, False)))
    assert "had not seen\n" not in fit_page.page([found], SMALL)
    text = fit_page.page([found], SMALL, (found, SMALL))
    assert text.count("## Training runs that the search had not seen") == 1
    assert text.index("## Summary") < text.index("had not seen") < text.index("## Throughput of the choices")


def test_every_recorded_contender_reached_85_percent_of_the_best() -> None:
    plan = fit_tasks.read_plan()
    first, again = (
        [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
        for path in (regret.LINES, regret.AGAIN)
    )
    points = {(one["case"], one["label"]): one for one in first if one["kind"] == "grid"}
    best = {(one.case, one.limit_gib): one.best_measured for one in fit_results.compare(plan, CASES, first).regrets}
    promising = {
        key
        for key, one in points.items()
        for gib in CASES.limits_gib
        if one["device_bytes"] <= gib * GIB and one["samples_per_second"] >= 0.85 * (best[key[0], gib] or 0)
    }
    assert promising == {(one["case"], one["label"]) for one in again if one["kind"] == "grid"}
    assert len(promising) == 38


def test_the_point_that_the_grid_foresees_is_compared_with_the_fastest() -> None:
    lines = all_points()
    next(one for one in lines if (one["case"], one["label"]) == (BERT, "16 × 4"))["samples_per_second"] = 68.0
    found = next(one for one in compared(lines).regrets if (one.case, one.limit_gib) == (BERT, 24))
    assert (found.foreseen, found.roomy) == ("16 × 4", "64 × 1, checkpointing")
    assert found.foreseen_share == pytest.approx(68 / 90)


def test_two_plans_are_reported_one_after_the_other() -> None:
    plan = plan_of(choice(BERT, 16, Setting(16, 4, False)))
    both = [fit_results.compare(each, SMALL, all_points()) for each in (plan, plan | {"calibrated": True})]
    text = fit_page.page(both, SMALL)
    assert text.count("| training | GiB | chosen |") == 2
    assert text.index("shipped data") < text.index("calibration of the machine")


def test_a_run_under_the_limit_decides_what_fits() -> None:
    near = point(BERT, Setting(32, 2, False))
    lines = [*all_points(), line("verdict", near, 24, status="out of memory", samples_per_second=None)]
    found = compared(lines)
    regret_at_24 = next(one for one in found.regrets if (one.case, one.limit_gib) == (BERT, 24))
    assert regret_at_24.best == "16 × 4" and regret_at_24.share is None
    assert [(one.label, one.is_right) for one in found.verdicts] == [("32 × 2", False)]


def test_the_same_choice_counts_as_run_under_the_larger_limit() -> None:
    choices = [choice(BERT, gib, Setting(16, 4, False)) for gib in (16, 24)]
    found = compared([*all_points(), line("chosen", choices[0], 16)], *choices)
    at_24 = next(one for one in found.regrets if (one.case, one.limit_gib) == (BERT, 24))
    assert (at_24.status, at_24.run_at_gib, at_24.measured) == ("completed", 16, 100.0)


def test_a_choice_that_runs_out_of_memory_is_reported() -> None:
    chosen = choice(BERT, 16, Setting(16, 4, False))
    lines = [*all_points(), line("chosen", chosen, 16, status="out of memory", samples_per_second=None)]
    found = compared(lines, chosen)
    assert "ran out of memory: 1 of 1" in fit_page.summary([found])
    assert f"| {BERT} | 16 | 16 × 4 | fits | out of memory |" in fit_page.page([found], SMALL)


def test_ratios_of_step_times_are_compared_within_a_case() -> None:
    lines = all_points()
    slower = next(one for one in lines if (one["case"], one["label"]) == (BERT, "64 × 1"))
    slower["samples_per_second"] /= 1.1
    found = compared(lines).ratios
    of_gpu = [one for one in found if one.bound == "gpu"]
    assert {one.bound for one in found} == {"gpu", "mixed", "host"} and len(found) == 2 * 15
    assert fit_results.within(of_gpu, 1.0) == pytest.approx(1.1) and fit_results.within(of_gpu, 0.5) == 1.0


def test_the_automatic_batch_is_reported_beside_the_choice() -> None:
    chosen = choice(BERT, 16, Setting(16, 4, False))
    automatic = {
        "kind": "automatic", "case": BERT, "limit_gib": 16, "label": "64 × 1", "tried": [64, 57, 17], "batch": 17,
        "effective_batch": 17, "seconds_to_answer": 4.0, "samples_per_second": 101.0,
    }  # fmt: skip
    found = compared([*all_points(), line("chosen", chosen, 16), automatic], chosen)
    assert "| 3: 64 to 17 | 17 | 4.0 | 101 | 16 × 4 | 9.0 | 100 |" in fit_page.page([found], SMALL)
