"""Forks, fresh processes and the order of the grid's runs, with workers that only write a result."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import grid
import measure_grid
import processes
import pytest
from measured import RESULT
from processes import read_result, write_result

from trainatomy.measurement.process.job import Job
from trainatomy.results.memory import Components, Instant, Memory

if TYPE_CHECKING:
    from pathlib import Path

    from trainatomy.results.measurement import Measurement

MEMORY = Memory(
    peak_allocated_bytes=11,
    peak_reserved_bytes=20,
    device_bytes=30,
    peak_requested_bytes=9,
    model_bytes=5,
    components=Components(5, 2, 2, 1, 1, 0, 9, 10),
    lines=(),
    peak=Instant(1, "backward", "", "aten::mm"),
    num_alloc_retries=0,
)
NAMES = ("bert-base-fp16", "bert-base-mlm", "gpt2-eager", "bert-large-fp32")


def wait(process: processes.Process) -> int:
    """Wait for the exit code and return it."""
    until = time.monotonic() + 20
    while (status := process.status()) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    return status


def test_a_fork_writes_its_result_and_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(job: Job, result: Path) -> None:
        print("from the child")
        assert processes.NVML_CHECK not in os.environ
        write_result(result, replace(RESULT, name=str(job.workload["name"])))

    monkeypatch.setattr(processes, "execute", execute)
    monkeypatch.setenv(processes.NVML_CHECK, "1")
    assert wait(processes.fork(Job({"name": "child"}), tmp_path / "result.json", tmp_path / "log")) == 0
    assert read_result(tmp_path / "result.json").name == "child"
    assert (tmp_path / "log").read_text() == "from the child\n"


def test_a_fork_that_raises_ends_with_1_and_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "execute", lambda *_: 1 / 0)
    assert wait(processes.fork(Job({}), tmp_path / "result.json", tmp_path / "log")) == 1
    assert "ZeroDivisionError" in (tmp_path / "log").read_text()


def test_a_fork_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "execute", lambda *_: time.sleep(60))
    forked = processes.fork(Job({}), tmp_path / "result.json", tmp_path / "log")
    forked.kill()
    assert forked.status() == -9


@pytest.mark.parametrize(
    ("workload", "may"),
    [
        ({}, True),
        ({"train": {"optim": "adamw_torch_fused"}}, True),
        ({"train": {"optim": "paged_adamw_32bit"}}, False),
        ({"train": {"optim": "lion_8bit"}}, False),
        ({"allocator": "expandable_segments:True"}, False),
    ],
)
def test_jobs_that_a_fork_cannot_measure_are_not_forked(workload: dict[str, object], may: bool) -> None:
    assert processes.can_fork(Job(workload)) is may


class GridRuns:
    """Runs the grid with workers that answer at once; ``started`` lists (name, ran alone), ``jobs`` all jobs."""

    def __init__(self, folder: Path, answers: dict[str, list[Measurement | None]]) -> None:
        self.folder = folder
        self.answers = answers
        self.started: list[tuple[str, bool]] = []
        self.jobs: list[Job] = []

    def fork(self, job: Job, result: Path, log: Path) -> processes.Forked:
        name = str(job.workload["name"])
        self.started.append((name, job.alone))
        self.jobs.append(job)
        log.write_text("last words")
        if answer := self.answers.get(name, [RESULT]).pop(0):
            write_result(result, replace(answer, name=name))
        return processes.Forked(0, _status=0)

    def run(self, *arguments: str, record: bool = False) -> measure_grid.Campaign:
        arguments = arguments if record else (*arguments, "--no-record")
        options = measure_grid.parse(["--out", str(self.folder), "--names", ",".join(NAMES), "--jobs", "2", *arguments])
        beside, alone = (deque(row for row in options.rows if row.alone is want) for want in (False, True))
        grid_run = measure_grid.Campaign(options, True, beside, alone)
        grid_run.run()
        return grid_run

    def lines(self, name: str) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


@pytest.fixture
def grid_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GridRuns:
    made = GridRuns(tmp_path, {})
    monkeypatch.setattr(processes, "fork", made.fork)
    return made


def test_exclusive_rows_run_last_and_results_contain_the_draw(grid_runs: GridRuns) -> None:
    grid_runs.run()
    assert grid_runs.started == [(name, name == "bert-large-fp32") for name in NAMES]
    lines = grid_runs.lines("measured.jsonl")
    assert {str(line["name"]): line["held_out"] for line in lines} == {name: grid.is_held_out(name) for name in NAMES}
    assert all(line["workload"] == dict(row(str(line["name"])).mapping) for line in lines)


def row(name: str) -> grid.Row:
    """Return the row of the grid with this name."""
    return next(row for row in grid.rows() if row.name == name)


def test_measured_rows_are_not_measured_again(grid_runs: GridRuns) -> None:
    grid_runs.run("--only", "heldout")
    grid_runs.run()
    assert sorted(name for name, _ in grid_runs.started) == sorted(NAMES)


@pytest.mark.parametrize("change", [{"status": "out of memory"}, {"num_alloc_retries": 2}])
def test_out_of_memory_on_a_shared_gpu_is_retried_alone(grid_runs: GridRuns, change: dict[str, object]) -> None:
    grid_runs.answers["gpt2-eager"] = [replace(RESULT, **change), RESULT]  # type: ignore[arg-type]
    grid_runs.run()
    assert grid_runs.started[-1] == ("gpt2-eager", True)
    assert [line["status"] for line in grid_runs.lines("measured.jsonl")] == ["completed"] * 4


def test_a_worker_without_a_result_is_a_failure_with_its_last_lines(grid_runs: GridRuns) -> None:
    grid_runs.answers["bert-base-mlm"] = [None]
    assert grid_runs.run().failed == ["bert-base-mlm"]
    (line,) = grid_runs.lines("failed.jsonl")
    assert line["name"] == "bert-base-mlm" and "last words" in str(line["message"])


def test_a_row_runs_once_for_time_and_once_for_components(grid_runs: GridRuns) -> None:
    recorded = replace(RESULT, memory=MEMORY, recorded_step_seconds=0.2, peak_allocated_bytes=11)
    grid_runs.answers["bert-large-fp32"] = [RESULT, recorded]
    grid_runs.run(record=True)
    control, record = grid_runs.jobs[-2:]
    assert (control.recorded, control.steps, record.recorded, record.steps) == (False, 8, True, 4)
    line = grid_runs.lines("measured.jsonl")[-1]
    assert (line["peak_allocated_bytes"], line["step_seconds"], line["recorded_step_seconds"]) == (10, 0.1, 0.2)
    assert line["memory"] == json.loads(json.dumps(asdict(MEMORY)))
    assert line["notes"] == ["allocated 11 B at the peak of the recorded run"]
    assert sorted(path.name for path in grid_runs.folder.iterdir()) == ["measured.jsonl"]


def test_both_float16_runs_are_long_enough_for_the_loss_scale_to_stabilize(grid_runs: GridRuns) -> None:
    grid_runs.run(record=True)
    assert {job.steps for job in grid_runs.jobs if job.workload["name"] == "bert-base-fp16"} == {8, 10}


def test_the_control_run_is_kept_if_the_recorded_run_fails(grid_runs: GridRuns) -> None:
    grid_runs.answers["gpt2-eager"] = [RESULT, None]
    assert grid_runs.run(record=True).failed == ["gpt2-eager"]
    (line,) = grid_runs.lines("failed.jsonl")
    assert (line["name"], line["part"]) == ("gpt2-eager", "record")
    assert "gpt2-eager" in [line["name"] for line in grid_runs.lines("measured.jsonl")]


def test_no_row_starts_after_the_time_limit(grid_runs: GridRuns) -> None:
    assert grid_runs.run("--time-limit", "-1").done == []
    assert grid_runs.started == []
