"""The benchmark of memory limits: predicted limits, runs with bounded memory, and the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import plan_walls
import processes
import pytest
import verdicts
import walls
from plan_walls import Planned, Search
from test_measure import RESULT
from test_processes import MEMORY
from test_report import MIB


class LinearTraining:
    """Training that takes ``base`` + ``step`` · batch MiB, including 100 MiB of context."""

    def __init__(self, base: int, step: int) -> None:
        self.base, self.step, self.batches = base, step, list[int]()

    def predict(self, workload: Any) -> Any:
        batch = workload.train.per_device_train_batch_size
        self.batches.append(batch)
        size, room = (self.base + self.step * batch) * MIB, workload.gpu.memory_bytes
        components = SimpleNamespace(context=100 * MIB)
        memory = replace(MEMORY, peak_reserved_bytes=size - 100 * MIB, device_bytes=size, components=components)  # type: ignore[arg-type]
        return SimpleNamespace(fits=size <= room, verdict="", memory=memory, out_of_memory=None, without_workspace=0)


@pytest.mark.parametrize(("base", "step"), [(500, 3), (4000, 700), (7000, 1100)])
def test_the_search_finds_the_largest_batch_that_fits(monkeypatch: pytest.MonkeyPatch, base: int, step: int) -> None:
    training = LinearTraining(base, step)
    monkeypatch.setattr(plan_walls.api, "predict", training.predict)
    row = next(row for row in plan_walls.grid.rows() if row.name == "bert-base-fp32")
    search = Search(row, "2.11.0")
    for size in (8, 80):
        at, above, beyond = search.plan(size)
        assert at.batch == (size * 1024 - base) // step
        assert (above.batch, beyond.batch) == (at.batch + 1, at.batch + 2)
        assert (at.predicted["fits"], above.predicted["fits"]) == (True, False)
        assert at.capacity_bytes == (size * 1024 - 100) * MIB
    assert len(training.batches) < 30


def test_no_memory_limit_is_found_where_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_walls.api, "predict", LinearTraining(9000, 1).predict)
    row = next(row for row in plan_walls.grid.rows() if row.name == "bert-base-fp32")
    with pytest.raises(ValueError, match="one sample does not fit 8 GiB"):
        Search(row, "2.11.0").plan(8)


def test_the_plan_has_six_trainings_for_each_size_and_meets_both_verdicts() -> None:
    plan = plan_walls.read()
    for size in (8, 16, 24, 40, 80):
        rows = {each.row for each in plan if each.size_gib == size}
        assert len(rows) >= 6
    assert len({each.name for each in plan}) == len(plan)
    assert all(each.predicted["fits"] for each in plan if each.above == 0)
    assert not any(each.predicted["fits"] for each in plan if each.above == 1)
    assert any(each.predicted["num_alloc_retries"] for each in plan)


def test_the_plan_of_convolutions_waits_with_some_that_fit_without_a_workspace() -> None:
    plan = plan_walls.read(plan_walls.PLAN.with_name("walls-plan-convolutions.json"))
    assert any(each.predicted["fits"] and each.predicted["without_workspace"] for each in plan)
    assert not {each.name for each in plan} & {each.name for each in plan_walls.read()}


def test_the_limit_is_the_capacity_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    granted: list[int] = []
    total = 150_109_945_856
    monkeypatch.setattr(torch.cuda, "_lazy_call", lambda call: call())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=total))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, _: granted.append(int(share * total))
    )
    sizes = [7_785_832_448, 16_375_808_000, 85_095_284_737, total - 1, 1]
    for size in sizes:
        walls.limit(size)
    assert granted == sizes


def outcome(fits: bool, status: str, retries: int = 0, predicted_retries: int = 0) -> verdicts.Wall:
    """Return the outcome of a run with this prediction and status."""
    predicted = {"fits": fits, "verdict": "fits", "reserved": 5, "num_alloc_retries": predicted_retries}
    planned = Planned("row", 8, 3, 0, {}, 10, predicted, False)
    return verdicts.Wall(
        planned, {"status": status, "num_alloc_retries": retries, "peak_reserved_bytes": 5 + (retries > 1)}
    )


def test_verdicts_are_counted_by_size() -> None:
    found = [
        outcome(True, "completed"),
        outcome(True, "completed", 2, 1),
        outcome(False, "out of memory"),
        outcome(True, "out of memory"),
        outcome(False, "completed"),
    ]
    assert verdicts.by_size(found)[2] == "| 8 GiB | 1 | 5 | 2 | 3 | 1 | 1 | 1 of 2 | 1 of 2 |"
    assert "the verdict was right in 3" in verdicts.sentence(found)
    assert "(wrong)" in verdicts.details(found)[-1]


def test_new_predictions_are_compared_with_earlier_ones() -> None:
    found = [outcome(True, "completed"), outcome(False, "completed"), outcome(False, "out of memory")]
    assert verdicts.since(found) == []
    same = {"fits": True, "verdict": "fits", "num_alloc_retries": 0, "without_workspace": 0}
    later = {"fits": True, "verdict": "tight", "num_alloc_retries": 4, "without_workspace": 1}
    again = [same, later, same | {"fits": False}]
    found = [replace(one, again=predicted) for one, predicted in zip(found, again, strict=True)]
    paragraph = verdicts.since(found)[-1]
    assert "right in 3 of 3. Verdicts that changed: row, batch 3, 8 GiB. Two rules changed" in paragraph
    assert [line.split("|")[-2].strip() for line in verdicts.details(found)[2:]] == ["", "tight, 4 retries", ""]
    assert "the verdict was right in 2" in verdicts.sentence(
        found
    )  # the sentence about earlier predictions is unchanged


def test_every_shipped_run_was_predicted_again() -> None:
    found = verdicts.read()
    assert found and all(each.again is not None for each in found)


def test_runs_share_the_gpu_within_its_memory_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    promised: list[int] = []

    def fork(job: Any, result: Path, log: Path, prepare: Any) -> processes.Forked:
        promised.append(sum(planned.size_gib for planned, _ in comparison.running.values()))
        assert not job.alone and job.steps == job.workload["steps"]
        processes.write_result(result, replace(RESULT, status="out of memory" if "4" in result.name else "completed"))
        return processes.Forked(0, _status=0)

    monkeypatch.setattr(processes, "fork", fork)
    plan = [planned for planned in plan_walls.read() if planned.row == "gpt2-bf16"]
    for _ in range(2):
        options = walls.parse(["--out", str(tmp_path), "--jobs", "3"])
        todo = walls.waiting(plan, tmp_path, None)
        comparison = walls.Walls(tmp_path, tmp_path, options.plan, todo, 100 * 2**30, options)
        comparison.run()
    assert len(promised) == len(plan) and max(promised) < 100 - 8
    assert promised[0] == 0 and comparison.failed == []
    (tmp_path / "walls.jsonl").rename(tmp_path / "walls-h200.jsonl")
    found = verdicts.read(tmp_path)
    assert [(outcome.planned.size_gib, outcome.planned.above) for outcome in found[:2]] == [
        (80, 0),
        (16, 0),
    ]  # not two of 80
    assert {outcome.planned.name for outcome in found} == {planned.name for planned in plan}
    assert any(outcome.is_right for outcome in found) and not all(outcome.is_right for outcome in found)
