"""Processes that torchrun starts: their answers, and how they end when one of them fails."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from trainatomy.errors import DeviceError
from trainatomy.measurement.process import rank, ranks
from trainatomy.measurement.process.job import Progress
from trainatomy.measurement.process.pool import TimeLimit
from trainatomy.measurement.process.ranks import RankAnswer, RankProcesses, RankTask

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

HERE = Path(__file__).parent
SECONDS = 60.0
MODULE = ranks.MODULE


@pytest.fixture(scope="module", autouse=True)
def _find_tasks() -> Iterator[None]:
    """Let the ranks import the functions of this folder, and no libraries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *sys.path]))
        patch.setattr(ranks, "GRACE_SECONDS", 0.2)
        patch.setattr(ranks, "MODULE", "light_rank")
        yield


@pytest.fixture(scope="module")
def processes(_find_tasks: None) -> Iterator[RankProcesses]:
    with RankProcesses(2, "expandable_segments:True") as launched:
        yield launched


def task(name: str, folder: Path) -> RankTask:
    return RankTask("control", f"rank_endings:{name}", {"gpus": 2, "pids": str(folder)})


def result_of(answer: RankAnswer) -> Mapping[str, Any]:
    assert answer.result is not None
    return answer.result


def wait_until_gone(folder: Path) -> None:
    """Wait until every process that noted its id in ``folder`` is gone."""
    pids = [int(path.name) for path in folder.iterdir()]
    assert pids
    until = time.monotonic() + 20
    while any(_is_running(pid) for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_tasks_share_a_launch_and_each_has_a_process_group_of_its_own(processes: RankProcesses, tmp_path: Path) -> None:
    reports: list[Progress] = []
    for _ in range(2):
        found = processes.run(task("total_of_ranks", tmp_path), TimeLimit(SECONDS), reports.append)
        assert all(answer.went_well for answer in found), [answer.log for answer in found]
        results = [(one["total"], one["agreed"], one["allocator"]) for one in map(result_of, found)]
        assert results == [(3.0, 10.0, "expandable_segments:True")] * 2
    assert reports.count(Progress("control", "training", 1, 2, 7)) == 2


def test_a_rank_that_fails_ends_the_others_and_the_next_task_runs(processes: RankProcesses, tmp_path: Path) -> None:
    failed, stopped = processes.run(task("one_rank_raises", tmp_path), TimeLimit(SECONDS))
    assert (failed.rank, result_of(failed)["message"]) == (1, "train.optim: unknown")
    assert (stopped.rank, stopped.result, stopped.was_stopped) == (0, None, True)
    wait_until_gone(tmp_path)
    left, stopped = processes.run(task("one_rank_leaves", tmp_path), TimeLimit(SECONDS))
    assert (left.result, left.went_well, stopped.was_stopped) == ({"found": 1, "left_early": True}, False, True)
    assert all(answer.went_well for answer in processes.run(task("total_of_ranks", tmp_path), TimeLimit(SECONDS)))


def test_a_rank_that_dies_is_reported_with_its_signal_and_its_last_words(
    processes: RankProcesses, tmp_path: Path
) -> None:
    dead, stopped = processes.run(task("one_rank_dies", tmp_path), TimeLimit(SECONDS))
    assert (dead.rank, dead.code, dead.result, stopped.was_stopped) == (1, -signal.SIGSEGV, None, True)
    with pytest.raises(DeviceError, match=r"(?s)rank 1: .*signal 11.*CUDA error: misaligned"):
        raise dead.died()


def test_a_task_that_cannot_be_imported_fails_in_every_rank_and_the_next_one_runs(
    processes: RankProcesses, tmp_path: Path
) -> None:
    for answer in processes.run(RankTask("control", "no_such_tasks:run"), TimeLimit(SECONDS)):
        assert not answer.went_well and "No module named 'no_such_tasks'" in answer.log
    assert all(answer.went_well for answer in processes.run(task("total_of_ranks", tmp_path), TimeLimit(SECONDS)))


def test_ranks_that_hang_are_stopped_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_EXIT_SECONDS", 0.5)  # torchrun waits longer for ranks that ignore requests to end
    processes = RankProcesses(2)
    with pytest.raises(DeviceError, match=r"(?s)2 GPUs did not end within .*training"), processes:
        processes.run(RankTask("control", "rank_endings:total_of_ranks", {"gpus": 2}), TimeLimit(SECONDS))
        processes.run(task("hang", tmp_path), TimeLimit(3.0))
    wait_until_gone(tmp_path)


def test_ranks_end_with_a_killed_parent(tmp_path: Path) -> None:
    script = f"""
from trainatomy.measurement.process import rank, ranks
from trainatomy.measurement.process.ranks import RankProcesses, RankTask
ranks.MODULE = "light_rank"
with RankProcesses(2) as processes:
    processes.run(RankTask("control", "rank_endings:hang", {{"pids": {str(tmp_path)!r}}}))
"""
    parent = subprocess.Popen([sys.executable, "-c", script])
    until = time.monotonic() + SECONDS
    while len(list(tmp_path.iterdir())) < 2:
        assert time.monotonic() < until
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    wait_until_gone(tmp_path)


def test_a_launch_that_fails_is_reported_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "MODULE", "trainatomy.no_such_module")
    with RankProcesses(1) as processes, pytest.raises(DeviceError, match="no_such_module"):
        processes.run(task("total_of_ranks", tmp_path), TimeLimit(SECONDS))


def test_the_module_of_a_rank_can_be_started() -> None:
    assert importlib.import_module(MODULE).main is rank.main


def test_fresh_processes_are_started_where_forks_cannot_be(tmp_path: Path) -> None:
    with RankProcesses(2, forks=False) as processes:
        found = processes.run(task("total_of_ranks", tmp_path), TimeLimit(SECONDS))
    assert [answer.went_well for answer in found] == [True, True], [answer.log for answer in found]
