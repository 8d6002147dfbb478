"""Processes of ranks: their answers, and how they end when one of them fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from trainatomy.errors import DeviceError
from trainatomy.measurement.process import pool
from trainatomy.measurement.process.job import Progress, Task
from trainatomy.measurement.process.pool import Answer, Processes, TimeLimit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

HERE = Path(__file__).parent
SECONDS = 60.0
LIGHT = (sys.executable, "-m", "light_server")


@pytest.fixture(scope="module", autouse=True)
def _find_tasks() -> Iterator[None]:
    """Let the ranks import the functions of this folder, and no libraries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *sys.path]))
        patch.setattr(pool, "SERVER", LIGHT)
        yield


@pytest.fixture(scope="module")
def processes(_find_tasks: None) -> Iterator[Processes]:
    with Processes() as started:
        yield started


def task(name: str, folder: Path) -> Task:
    arguments = {"gpus": 2, "pids": str(folder)}
    return Task("control", f"rank_endings:{name}", arguments, ranks=2, allocator="expandable_segments:True")


def result_of(answer: Answer) -> Mapping[str, Any]:
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


def test_tasks_share_a_launch_and_each_has_a_process_group_of_its_own(processes: Processes, tmp_path: Path) -> None:
    reports: list[Progress] = []
    for _ in range(2):
        found = processes.run(task("total_of_ranks", tmp_path), TimeLimit(SECONDS), reports.append)
        assert all(answer.went_well for answer in found), [answer.log for answer in found]
        results = [(one["total"], one["agreed"], one["allocator"]) for one in map(result_of, found)]
        assert results == [(3.0, 10.0, "expandable_segments:True")] * 2
    assert reports.count(Progress("control", "training", 1, 2, 7)) == 2


def test_a_rank_that_fails_ends_the_others_and_the_next_task_runs(processes: Processes, tmp_path: Path) -> None:
    failed, stopped = processes.run(task("one_rank_raises", tmp_path), TimeLimit(SECONDS))
    assert (failed.rank, result_of(failed)["message"]) == (1, "train.optim: unknown")
    assert (stopped.rank, stopped.result, stopped.was_stopped) == (0, None, True)
    wait_until_gone(tmp_path)
    left, stopped = processes.run(task("one_rank_leaves", tmp_path), TimeLimit(SECONDS))
    assert (left.result, left.went_well, stopped.was_stopped) == ({"found": 1, "left_early": True}, False, True)
    assert all(answer.went_well for answer in processes.run(task("total_of_ranks", tmp_path), TimeLimit(SECONDS)))


def test_a_rank_that_dies_is_reported_with_its_signal_and_its_last_words(processes: Processes, tmp_path: Path) -> None:
    dead, stopped = processes.run(task("one_rank_dies", tmp_path), TimeLimit(SECONDS))
    assert (dead.rank, dead.code, dead.result, stopped.was_stopped) == (1, -signal.SIGSEGV, None, True)
    with pytest.raises(DeviceError, match=r"(?s)rank 1: .*signal 11.*CUDA error: misaligned"):
        raise dead.died()


def test_a_task_that_cannot_be_imported_fails_in_every_rank_and_the_next_one_runs(
    processes: Processes, tmp_path: Path
) -> None:
    for answer in processes.run(Task("control", "no_such_tasks:run", ranks=2), TimeLimit(SECONDS)):
        assert not answer.went_well and "No module named 'no_such_tasks'" in answer.log
    assert all(answer.went_well for answer in processes.run(task("total_of_ranks", tmp_path), TimeLimit(SECONDS)))


def test_ranks_that_hang_are_stopped_in_time_and_the_next_task_runs(processes: Processes, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"(?s)2 GPUs did not end within 3 s .*rank 0: control run: training"):
        processes.run(task("hang", tmp_path), TimeLimit(3.0))
    wait_until_gone(tmp_path)
    assert all(answer.went_well for answer in processes.run(task("total_of_ranks", tmp_path), TimeLimit(SECONDS)))


def test_ranks_end_with_a_killed_parent(tmp_path: Path) -> None:
    script = f"""
from trainatomy.measurement.process import pool
from trainatomy.measurement.process.job import Task
pool.SERVER = {LIGHT!r}
with pool.Processes() as processes:
    processes.run(Task("control", "rank_endings:hang", {{"pids": {str(tmp_path)!r}}}, ranks=2))
"""
    parent = subprocess.Popen([sys.executable, "-c", script])
    until = time.monotonic() + SECONDS
    while len(list(tmp_path.iterdir())) < 2:
        assert time.monotonic() < until
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    wait_until_gone(tmp_path)


def test_a_server_that_fails_is_reported_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "SERVER", (sys.executable, "-m", "trainatomy.no_such_module"))
    with Processes() as processes, pytest.raises(DeviceError, match="no_such_module"):
        processes.run(task("total_of_ranks", tmp_path), TimeLimit(SECONDS))


def test_variables_of_a_task_are_those_of_its_ranks(processes: Processes, tmp_path: Path) -> None:
    given = replace(task("variable", tmp_path), environment={"NCCL_P2P_DISABLE": "1"})
    assert [result_of(answer)["value"] for answer in processes.run(given, TimeLimit(SECONDS))] == ["1", "1"]
    without = processes.run(task("variable", tmp_path), TimeLimit(SECONDS))
    assert [result_of(answer)["value"] for answer in without] == [None, None]


def test_the_libraries_are_imported_in_each_process_where_forks_cannot_use_the_gpu(tmp_path: Path) -> None:
    with Processes() as processes:
        found = processes.run(replace(task("total_of_ranks", tmp_path), preloaded=False), TimeLimit(SECONDS))
    assert [answer.went_well for answer in found] == [True, True], [answer.log for answer in found]


def test_a_server_that_initialised_cuda_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "SERVER", (*LIGHT[:2], "refusing_server"))
    with Processes() as processes:
        for _ in range(2):
            found = processes.run(task("total_of_ranks", tmp_path), TimeLimit(SECONDS))
            assert [answer.went_well for answer in found] == [True, True], [answer.log for answer in found]


def test_a_function_is_called_in_a_process_of_its_own(processes: Processes, tmp_path: Path) -> None:
    like = task("total_of_ranks", tmp_path)
    waiting = processes.call(like, os.getpid), processes.call(like, divmod, 7, 2)
    assert waiting[0]() != os.getpid()
    assert waiting[1]() == (3, 1)
    assert processes.call(like, os.getenv, "CUDA_VISIBLE_DEVICES")() == ""
    with pytest.raises(ZeroDivisionError) as caught:
        processes.call(like, divmod, 1, 0)()
    assert "calls.py" in caught.value.__notes__[0]
    with pytest.raises(DeviceError, match="exit code 3"):
        processes.call(like, os._exit, 3)()
