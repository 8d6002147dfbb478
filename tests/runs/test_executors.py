"""Predictions on workers of Dask, of Ray and of the caller's: equal to local ones, and not lost with their workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import mortal
import pytest
from torch import nn

import trainatomy
from trainatomy import api
from trainatomy.cli import main
from trainatomy.errors import MissingLibrary, TrainatomyError, WorkloadError
from trainatomy.runs import executors
from trainatomy.runs.predicting import predict_all, prediction_pool
from trainatomy.workload.schema import Workload

needs_dask = pytest.mark.skipif(find_spec("distributed") is None, reason="needs distributed")
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
ITEMS = list(range(6))


def workload(**config: object) -> Workload:
    tiny = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return Workload.from_mapping(
        {
            "model": {"class": "BertForSequenceClassification", "config": {**tiny, **config}},
            "data": {"sequence_length": 8},
            "gpu": "h200",
        }
    )


@pytest.fixture(scope="module")
def dask_address() -> Iterator[str]:
    import dask
    import distributed

    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 1}),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, memory_limit=None, dashboard_address=":0", silence_logs=60
        ) as cluster,
    ):
        yield cluster.scheduler_address


@pytest.fixture(scope="module")
def local_ray() -> Iterator[str]:
    import ray

    with mock.patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}):
        ray.init(
            address="local", num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False, logging_level=40
        )
        yield "ray"
        ray.shutdown()


def assert_nothing_is_lost(executor: object, folder: Path) -> None:
    assert predict_all(partial(mortal.die_once, folder), ITEMS, None, executor) == [2 * item for item in ITEMS]
    processes = (folder / "3").read_text().split()
    assert len(processes) == 2 and len(set(processes)) == 2


def assert_predicts_as_here(executor: object, *several: Workload) -> None:
    here, there = api.compare(several), api.compare(several, executor=executor)
    for one, other in zip(here.rows, there.rows, strict=True):
        assert one.prediction is not None and other.prediction is not None
        assert (one.prediction.memory, one.prediction.time) == (other.prediction.memory, other.prediction.time)


@needs_dask
def test_threads_of_a_worker_of_dask_predict_as_here() -> None:
    import distributed

    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=2, processes=False, protocol="tcp", dashboard_address=":0"
        ) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        assert_predicts_as_here(client, workload(), workload(num_hidden_layers=2))


@needs_dask
def test_the_profiler_of_a_dask_worker_holds_no_tensors_of_a_prediction(dask_address: str) -> None:
    import distributed

    assert predict_all(mortal.sampled, [0, 1], None, dask_address) == [False, False]
    with distributed.Client(dask_address, set_as_default=False) as client:
        assert client.submit(mortal.sampled, 2).result()


@needs_dask
@pytest.mark.slow  # the worker imports torch and transformers
def test_workers_of_dask_predict_as_here(dask_address: str) -> None:
    assert_predicts_as_here(dask_address, workload())


@needs_dask
def test_a_killed_worker_of_a_dask_cluster_loses_nothing(dask_address: str, tmp_path: Path) -> None:
    assert_nothing_is_lost(dask_address, tmp_path)


@needs_dask
def test_a_search_goes_on_when_a_worker_of_dask_is_killed(dask_address: str, tmp_path: Path) -> None:
    predict: Any = partial(mortal.die_once, tmp_path)
    with prediction_pool(predict, None, dask_address.replace("tcp://", "dask://")) as pool:
        futures: list[Any] = [pool.submit(item) for item in ITEMS]  # type: ignore[arg-type]
        wait(futures)
        assert [each.result() for each in futures] == [2 * item for item in ITEMS]
        assert 1 <= pool.jobs <= 2


@needs_dask
def test_a_prediction_that_kills_every_worker_is_an_error(dask_address: str) -> None:
    with pytest.raises(TrainatomyError, match=r"its worker died each time that it was repeated.*\(KilledWorker\)"):
        predict_all(mortal.die, [1], None, dask_address)


@needs_dask
def test_dask_is_started_here(capfd: pytest.CaptureFixture[str]) -> None:
    assert predict_all(print, ["from a worker"], 1, "dask") == [None]
    found = capfd.readouterr()
    assert found.out == "" and "from a worker" in found.err


@needs_dask
def test_no_scheduler_at_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "CONNECT_SECONDS", 0.5)
    with pytest.raises(TrainatomyError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:1 "):
        predict_all(mortal.die, [1], None, "dask://127.0.0.1:1")


@needs_ray
def test_a_killed_worker_of_ray_loses_nothing(local_ray: str, tmp_path: Path) -> None:
    assert_nothing_is_lost(local_ray, tmp_path)
    with pytest.raises(KeyError, match="a bug"):
        predict_all(mortal.refuse, [2], None, local_ray)


@needs_ray
@pytest.mark.slow
def test_workers_of_ray_predict_as_here(local_ray: str) -> None:
    assert_predicts_as_here(local_ray, workload(), workload(num_hidden_layers=2))


def test_threads_of_the_caller_predict_as_here_one_at_a_time() -> None:
    with ThreadPoolExecutor(2) as threads:
        assert_predicts_as_here(threads, workload(), workload(num_hidden_layers=2))
        assert predict_all(mortal.expect, [True] * 4, 1, threads) == [True] * 4
        assert [str(each) for each in predict_all(mortal.refuse, [1, 1], None, threads)] == ["one is refused"] * 2


def test_a_search_on_an_executor_finds_what_a_local_one_finds() -> None:
    keep = ("gradient_checkpointing", "attention", "optimizer", "allocator")
    here = trainatomy.fit(workload(), effective_batch_size=8, keep=keep, prices=False)
    with ThreadPoolExecutor(1) as threads:
        there = trainatomy.fit(workload(), effective_batch_size=8, keep=keep, prices=False, executor=threads)
    assert here.best is not None and there.best is not None
    assert (here.best.workload, here.best.step_seconds) == (there.best.workload, there.best.step_seconds)


def test_workers_have_the_environment_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    surroundings = executors._like_here()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:100")
    names = ["CUBLAS_WORKSPACE_CONFIG", "PYTORCH_CUDA_ALLOC_CONF"]
    there = [executors._called_inside(surroundings, mortal.variables, name) for name in names]
    assert there == [":4096:8", None]
    assert list(map(mortal.variables, names)) == [":16:8", "max_split_size_mb:100"]


def test_workers_with_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    surroundings = executors._like_here()
    versions = executors.installed_versions()
    monkeypatch.setattr(executors, "installed_versions", lambda: {**versions, "torch": versions["torch"] + "+cu130"})
    if "+" not in versions["torch"]:
        with surroundings():
            pass
    monkeypatch.setattr(executors, "installed_versions", lambda: {**versions, "transformers": "5.0.1"})
    with pytest.raises(TrainatomyError, match=r"has transformers 5\.0\.1 instead of .*; install the same ones"):
        executors._called_inside(surroundings, mortal.variables, "HOME")


@pytest.mark.parametrize("executor", ["spark", "dask://", "http://there:80", 3, ""])
def test_what_is_no_executor_is_refused(executor: object) -> None:
    with pytest.raises(WorkloadError, match=r"executor: .* is none of dask, ray, dask://HOST:PORT"):
        api.compare([workload()], executor=executor)


def test_a_worker_without_trainatomy_is_named() -> None:
    with pytest.raises(TrainatomyError, match=r"a worker has no trainatomy; install"), executors._deaths_explained():
        raise RuntimeError("deserialization") from ModuleNotFoundError("No module named 'trainatomy'")


@pytest.mark.parametrize(
    ("command", "function", "jobs"),
    [
        (["compare", "notebook", "--gpu", "h200"], "predict_comparison", None),
        (["compare", "notebook", "--gpu", "h200", "--jobs", "50"], "predict_comparison", 50),
        (["fit", "--model", "openai-community/gpt2", "--gpu", "h200"], "search_settings", None),
    ],
)
def test_the_command_line_hands_the_executor_on(
    command: list[str], function: str, jobs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[object, object]] = []

    def record(what: Any, request: Any, *_: object) -> None:
        given.append((request.executor, request.jobs))
        raise WorkloadError("enough")

    monkeypatch.setattr(api, function, record)
    assert main([*command, "--executor", "tcp://there:8786"]) == WorkloadError.exit_code
    assert given == [("tcp://there:8786", jobs)]


@pytest.mark.parametrize(
    ("name", "library"), [("dask", "distributed"), ("tcp://there:80", "distributed"), ("ray", "ray")]
)
def test_a_missing_library_is_named(name: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingLibrary, match=rf"needs {library}, which is not installed: pip install 'trainatomy\["):
        api.compare([workload()], executor=name)


def test_futures_of_another_kind_and_jobs_below_one_are_refused() -> None:
    class Odd:
        def submit(self, *arguments: object) -> int:
            return 3

    with pytest.raises(WorkloadError, match=r"Odd\.submit returned int, not a concurrent\.futures\.Future"):
        predict_all(mortal.die, [1], None, Odd())
    with pytest.raises(WorkloadError, match=r"jobs: 0 is not a number"):
        predict_all(mortal.die, [1], 0, "dask")


def test_a_live_module_is_not_sent_to_workers() -> None:
    with pytest.raises(WorkloadError, match=r"executor: a live module is predicted in this process"):
        trainatomy.fit(nn.Linear(2, 2), executor="dask", gpu="h200", batch={})
