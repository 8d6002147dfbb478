"""The server of measuring processes: their answers, and its check that CUDA is untouched."""

from __future__ import annotations

import json
import os
import sys
import time
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from measured import RESULT

from trainatomy.errors import WorkloadError
from trainatomy.measurement.process import server
from trainatomy.measurement.process.job import NVML_CHECK, Channel, Job, Progress, Reporter, from_plain, read_progress
from trainatomy.measurement.step import runner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Pipe = tuple[Channel, "Callable[[], list[dict[str, Any]]]"]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """Return a channel for answers and a function that reads them."""
    reading, writing = os.pipe()

    def answers() -> list[dict[str, Any]]:
        return [json.loads(line) for line in os.read(reading, 65536).splitlines()]

    channel = Channel(writing)
    yield channel, answers
    channel._lock.close()
    os.close(reading)
    os.close(writing)


def task(number: int = 3, **job: Any) -> dict[str, Any]:
    """Return the message that starts a task."""
    function = "trainatomy.measurement.step.runner:run_rank"
    arguments = {"job": Job({}, **job).to_json()}
    message = {"task": number, "name": "recorded", "function": function, "arguments": arguments}
    return {**message, "ranks": 1, "loop": "", "prepare": "", "environment": {}}


def runs(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> None:
    monkeypatch.setattr(runner, "run", run)


def test_a_run_answers_with_progress_and_its_result(monkeypatch: pytest.MonkeyPatch, pipe: Pipe) -> None:
    def run(job: Job, reporter: Reporter) -> Any:
        reporter.step(2, 9, 5)
        return RESULT

    runs(monkeypatch, run)
    assert server._run(task(record=True), 0, pipe[0]) == 0
    first, second, third = pipe[1]()
    assert {(one["task"], one["rank"]) for one in (first, second, third)} == {(3, 0)}
    assert read_progress(first["progress"]) == Progress("recorded", "loading libraries")
    assert read_progress(second["progress"]) == Progress("recorded", "training", 2, 9, 5)
    assert from_plain(third["result"]) == RESULT


def test_an_error_of_the_workloads_is_an_answer(monkeypatch: pytest.MonkeyPatch, pipe: Pipe) -> None:
    def run(*_: object) -> Any:
        raise WorkloadError("train.optim: unknown")

    runs(monkeypatch, run)
    assert server._run(task(), 0, pipe[0]) == server.LEFT_EARLY
    with pytest.raises(WorkloadError, match=r"train\.optim: unknown"):
        from_plain(pipe[1]()[-1]["result"])


def test_any_other_error_is_a_traceback_in_the_log(
    monkeypatch: pytest.MonkeyPatch, pipe: Pipe, capsys: pytest.CaptureFixture[str]
) -> None:
    runs(monkeypatch, lambda *_: 1 / 0)
    assert server._run(task(), 0, pipe[0]) == server.FAILED
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert all("result" not in answer for answer in pipe[1]())


def ended(pipe: Pipe, message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the answers of a task that a server has forked, once it has ended."""
    serving = server.Server(pipe[0], preloads=False)
    serving._handle(message)
    until = time.monotonic() + 20
    while serving._ranks:
        assert time.monotonic() < until
        serving._reap()
        time.sleep(0.01)
    return pipe[1]()


def test_each_task_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, pipe: Pipe) -> None:
    monkeypatch.setenv(NVML_CHECK, "1")

    def run(job: Job, reporter: Reporter) -> Any:
        assert NVML_CHECK not in os.environ
        os.write(1, b"from the child\n")
        reporter.stage(str(os.getpid()))
        return RESULT

    runs(monkeypatch, run)
    answers = ended(pipe, task())
    stages = [answer["progress"]["stage"] for answer in answers if "progress" in answer]
    assert stages[-1] != str(os.getpid())
    last = {"task": 3, "rank": 0, "ended": 0, "stopped": False, "log": "    from the child"}
    assert answers[-1] == last


def test_the_exit_of_a_process_is_described(monkeypatch: pytest.MonkeyPatch, pipe: Pipe) -> None:
    runs(monkeypatch, lambda *_: os.kill(os.getpid(), 9))
    assert ended(pipe, task())[-1]["ended"] == -9
    runs(monkeypatch, lambda *_: sys.exit(3))
    assert ended(pipe, task())[-1]["ended"] == server.FAILED


def test_a_server_whose_forks_cannot_use_the_gpu_refuses(monkeypatch: pytest.MonkeyPatch, pipe: Pipe) -> None:
    monkeypatch.setattr(server, "preload", lambda *_: False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    serving = server.Server(pipe[0], preloads=True)
    serving._handle(task())
    assert pipe[1]() == [{"task": 3, "refused": True}]
    assert not serving._ranks


def test_libraries_that_cannot_be_imported_are_reported_by_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> bool:
        raise ImportError("broken")

    monkeypatch.setattr(server, "preload", fails)
    assert server._prepared(["trainer"])


def test_preloading_leaves_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NVML_CHECK, "")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert server.preload()
    assert os.environ[NVML_CHECK] == "1"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not server.preload()


def test_preloading_imports_the_compiler_where_bitsandbytes_will(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setenv(NVML_CHECK, "")
    monkeypatch.delenv("TORCH_WARM_POOL", raising=False)
    monkeypatch.setattr(server, "import_module", imported.append)
    for installed in (False, True):
        monkeypatch.setattr(server, "version_of", lambda name, found=installed: "1" if found else None)
        imported.clear()
        server.preload()
        assert ("torch._inductor.compile_fx" in imported) is installed
        assert "TORCH_WARM_POOL" not in os.environ


@pytest.mark.parametrize("loaded", [True, False])
def test_preloading_leaves_bitsandbytes_as_it_was(monkeypatch: pytest.MonkeyPatch, loaded: bool) -> None:
    monkeypatch.setenv(NVML_CHECK, "")
    before = ModuleType("bitsandbytes")
    if loaded:
        monkeypatch.setitem(sys.modules, "bitsandbytes", before)
    else:
        monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    server.preload()
    assert sys.modules.get("bitsandbytes") is (before if loaded else None)


def test_a_reader_that_is_gone_ends_the_run() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    channel = Channel(writing)
    with channel._lock, pytest.raises(BrokenPipeError):
        Reporter(channel.write).stage("training")
    os.close(writing)
