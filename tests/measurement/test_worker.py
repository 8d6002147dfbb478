"""The worker process: its answers, its children, and its check that CUDA is untouched."""

from __future__ import annotations

import io
import json
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from measured import RESULT

from trainatomy.errors import WorkloadError
from trainatomy.measurement.process import worker
from trainatomy.measurement.process.job import NVML_CHECK, Job, Progress, Reporter, from_plain, read_progress
from trainatomy.measurement.step import runner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def pipe() -> Iterator[tuple[int, Callable[[], list[dict[str, Any]]]]]:
    """Return a file descriptor for answers and a function that reads them."""
    reading, writing = os.pipe()

    def answers() -> list[dict[str, Any]]:
        return [json.loads(line) for line in os.read(reading, 65536).splitlines()]

    yield writing, answers
    os.close(reading)
    os.close(writing)


def runs(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> None:
    monkeypatch.setattr(runner, "run", run)


def test_a_run_answers_with_progress_and_its_result(monkeypatch: pytest.MonkeyPatch, pipe: Any) -> None:
    def run(job: Job, reporter: Reporter) -> Any:
        reporter.step(2, 9, 5)
        return RESULT

    runs(monkeypatch, run)
    assert worker._run(Job({}, record=True), pipe[0]) == 0
    first, second, third = pipe[1]()
    assert read_progress(first["progress"]) == Progress("recorded", "loading libraries")
    assert read_progress(second["progress"]) == Progress("recorded", "training", 2, 9, 5)
    assert from_plain(third["result"]) == RESULT


def test_an_error_of_the_workloads_is_an_answer(monkeypatch: pytest.MonkeyPatch, pipe: Any) -> None:
    def run(*_: object) -> Any:
        raise WorkloadError("train.optim: unknown")

    runs(monkeypatch, run)
    assert worker._run(Job({}), pipe[0]) == 0
    with pytest.raises(WorkloadError, match=r"train\.optim: unknown"):
        from_plain(pipe[1]()[-1]["result"])


def test_any_other_error_is_a_traceback_in_the_log(
    monkeypatch: pytest.MonkeyPatch, pipe: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    runs(monkeypatch, lambda *_: 1 / 0)
    assert worker._run(Job({}), pipe[0]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert all("result" not in answer for answer in pipe[1]())


def test_each_job_has_a_child_of_its_own(monkeypatch: pytest.MonkeyPatch, pipe: Any) -> None:
    monkeypatch.setenv(NVML_CHECK, "1")

    def run(job: Job, reporter: Reporter) -> Any:
        assert NVML_CHECK not in os.environ
        reporter.stage(str(os.getpid()))
        return RESULT

    runs(monkeypatch, run)
    assert worker._run_in_child(Job({}), pipe[0]) == 0
    stages = [answer["progress"]["stage"] for answer in pipe[1]() if "progress" in answer]
    assert stages[-1] != str(os.getpid())


def test_the_exit_of_a_child_is_described(monkeypatch: pytest.MonkeyPatch, pipe: Any) -> None:
    runs(monkeypatch, lambda *_: os.kill(os.getpid(), 9))
    assert worker._run_in_child(Job({}), pipe[0]) == -9
    runs(monkeypatch, lambda *_: sys.exit(3))
    assert worker._run_in_child(Job({}), pipe[0]) == 1


@pytest.mark.parametrize("ready", [True, False])
def test_a_worker_accepts_jobs_only_where_forks_can_use_the_gpu(
    monkeypatch: pytest.MonkeyPatch, pipe: Any, ready: bool
) -> None:
    served: list[Job] = []
    monkeypatch.setattr(worker, "preload", lambda: ready)
    monkeypatch.setattr(worker, "_redirect_stdout", lambda: pipe[0])
    monkeypatch.setattr(worker, "_run_in_child", lambda job, _: served.append(job) or -6)
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(Job({"name": name}).to_json() + "\n" for name in "ab")))
    assert worker.main(["--fork"]) == 0
    assert [job.workload["name"] for job in served] == (["a", "b"] if ready else [])
    assert pipe[1]() == [{"ready": ready}] + [{"ended": -6}] * len(served)


def test_without_forks_a_worker_runs_one_job(monkeypatch: pytest.MonkeyPatch, pipe: Any) -> None:
    monkeypatch.setattr(worker, "_redirect_stdout", lambda: pipe[0])
    monkeypatch.setattr(worker, "_run", lambda job, _: 0)
    monkeypatch.setattr(sys, "stdin", io.StringIO((Job({}).to_json() + "\n") * 2))
    assert worker.main([]) == 0
    assert pipe[1]() == [{"ended": 0}]


def test_preloading_leaves_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NVML_CHECK, "")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert worker.preload()
    assert os.environ[NVML_CHECK] == "1"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not worker.preload()


def test_preloading_imports_the_compiler_where_bitsandbytes_will(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setenv(NVML_CHECK, "")
    monkeypatch.delenv("TORCH_WARM_POOL", raising=False)
    monkeypatch.setattr(worker, "import_module", imported.append)
    for installed in (False, True):
        monkeypatch.setattr(worker, "version_of", lambda name, found=installed: "1" if found else None)
        imported.clear()
        worker.preload()
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
    worker.preload()
    assert sys.modules.get("bitsandbytes") is (before if loaded else None)


def test_a_reader_that_is_gone_ends_the_run() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with pytest.raises(BrokenPipeError):
        Reporter(writing).stage("training")
    os.close(writing)
