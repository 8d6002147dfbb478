"""``compare`` in Python: predictions, and measured runs on a scripted GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from measured import called_here

import trainatomy
from trainatomy.api import comparing, predicting
from trainatomy.errors import DeviceError, SimulationError, TrainatomyError, WorkloadError
from trainatomy.measurement import measure as real_gpu
from trainatomy.measurement.measure import Runs
from trainatomy.measurement.process.pool import Processes
from trainatomy.records.store import Store
from trainatomy.runs import single as machines
from trainatomy.runs.comparison import published, published_beside
from trainatomy.runs.plan import Finished, Plan
from trainatomy.runs.single import Machine
from trainatomy.workload.builtin import ready
from trainatomy.workload.schema import Workload

Workloads = tuple[Workload, ...]


@pytest.fixture
def workloads(plan_of: Callable[..., Plan]) -> Workloads:
    return plan_of().workloads


@pytest.fixture
def measure_options(monkeypatch: pytest.MonkeyPatch, gpu: Any, machine: Machine) -> list[dict[str, Any]]:
    """Return the options of each ``measure`` call; predictions fail, since they are not tested here."""
    options: list[dict[str, Any]] = []

    def measure(workload: Workload, runs: Runs, *_: Any, **keywords: Any) -> Any:
        options.append({"gpu": workload.gpu, "time_limit": runs.time_limit, **keywords})
        return gpu(workload)

    def predict(training: Any, *_: Any) -> Any:
        raise SimulationError(f"not predicted for {training.what.resolve_gpu().id}")

    monkeypatch.setattr(real_gpu, "measure", measure)
    monkeypatch.setattr(Processes, "expect", lambda *_: None)
    monkeypatch.setattr(Processes, "call", called_here)
    monkeypatch.setattr(predicting, "predict_training", predict)
    monkeypatch.setattr(machines, "this_machine", lambda: machine)
    return options


def test_runs_are_compared_saved_and_not_repeated(
    workloads: Workloads, measure_options: list[dict[str, Any]], gpu: Any, tmp_path: Path
) -> None:
    finished: list[Finished] = []
    found = trainatomy.compare(
        workloads, measure=True, repeat=2, store=tmp_path, time_limit=60.0, progress=finished.append
    )
    assert gpu.started == ["a", "b", "c"] * 2
    assert {(each["gpu"], each["time_limit"]) for each in measure_options} == {("h200", 60.0)}
    assert [row.status for row in found.rows] == ["completed"] * 3
    assert found.repeats == 2 and all(len(row.measurements) == 2 for row in found.rows)
    assert {row.prediction_error for row in found.rows} == {"not predicted for h200"}
    assert [(each.row, each.repeat) for each in finished] == [(row, repeat) for repeat in (0, 1) for row in range(3)]
    assert {each.group for each in Store(tmp_path).list()} == {found.group}
    again = trainatomy.compare(workloads, measure=True, repeat=3, store=Store(tmp_path))
    assert gpu.started == ["a", "b", "c"] * 3
    assert again.group == found.group and len(again.rows[0].measurements) == 3


def test_fresh_and_a_named_group(workloads: Workloads, measure_options: Any, gpu: Any, tmp_path: Path) -> None:
    first = trainatomy.compare(workloads[:1], measure=True, store=tmp_path, group="mine")
    assert first.group == "mine"
    trainatomy.compare(workloads[:1], measure=True, store=tmp_path, group="mine")
    assert gpu.started == ["a"]
    assert trainatomy.compare(workloads[:1], measure=True, store=tmp_path, fresh=True).group.startswith("comparison-")
    assert gpu.started == ["a", "a"]


def test_the_prediction_uses_another_gpu_on_request(workloads: Workloads, measure_options: Any, tmp_path: Path) -> None:
    found = trainatomy.compare(workloads[:1], measure=True, store=tmp_path, gpu="a100")
    assert found.rows[0].prediction_error == "not predicted for a100-80gb"


def test_a_run_that_fails_is_a_row(workloads: Workloads, measure_options: Any, gpu: Any, tmp_path: Path) -> None:
    gpu.answers["b"] = DeviceError("the worker died")
    found = trainatomy.compare(workloads, measure=True, store=tmp_path)
    assert [row.status for row in found.rows] == ["completed", "failed", "completed"]
    assert found.rows[1].errors == ("the worker died",)


def test_measurements_are_kept_when_interrupted(
    workloads: Workloads, measure_options: Any, gpu: Any, tmp_path: Path
) -> None:
    gpu.answers["b"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        trainatomy.compare(workloads, measure=True, store=tmp_path)
    gpu.started.clear()
    assert trainatomy.compare(workloads, measure=True, store=tmp_path).measured
    assert gpu.started == ["b", "c"]


def test_a_record_that_cannot_be_saved_is_a_warning(
    workloads: Workloads, measure_options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Store, record: Any) -> str:
        raise TrainatomyError("no space left")

    monkeypatch.setattr(Store, "write", full)
    with pytest.warns(UserWarning, match="not recorded: no space left"):
        found = trainatomy.compare(workloads[:1], measure=True, store=tmp_path)
    assert found.rows[0].status == "completed"


def test_an_unknown_gpu_is_a_warning(
    workloads: Workloads,
    measure_options: Any,
    gpu: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine: Machine,
) -> None:
    monkeypatch.setattr(machines, "this_machine", lambda: replace(machine, gpus=("NVIDIA Test 1",)))
    with pytest.warns(UserWarning, match="NVIDIA Test 1 is not a known GPU; predictions are for h200"):
        trainatomy.compare(workloads[:1], measure=True, store=tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeat": 3}, "repeat: needs measure=True"),
        ({"store": "runs", "time_limit": 5.0}, "store, time_limit"),
        ({"measure": True, "repeat": 0}, "repeat: 0"),
        ({"measure": True, "calibration": "none.json"}, "none.json"),
    ],
)
def test_mistakes_are_reported_before_anything_runs(
    workloads: Workloads, measure_options: Any, gpu: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(WorkloadError, match=message):
        trainatomy.compare(workloads, **({"store": tmp_path} if options.get("measure") else {}), **options)
    assert gpu.started == []


def test_other_library_versions_cannot_be_measured(measure_options: Any, gpu: Any, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="era 2022"):
        trainatomy.compare(ready("notebook", "2022"), measure=True, store=tmp_path)
    assert gpu.started == []


def test_published_figures_appear_only_for_their_own_rows() -> None:
    today, then = ready("notebook"), ready("notebook", "2022")
    assert [row.memory_bytes for row in published(then).rows] == [
        row.memory_bytes for row in published_beside(today).rows
    ]
    assert "V100" in published_beside(ready("notebook", "today", "a100")).remark
    assert published(today).rows == published_beside(then).rows == published_beside(today[:3]).rows == ()
    assert published_beside(ready("notebook-fp16")).rows[0].memory_bytes == 4247 * 2**20
    assert published(()).rows == published_beside(()).rows == ()


def test_predictions_are_shared_out_with_equal_simulations_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"class": "GPT2LMHeadModel", "config": {"n_layer": 1}}
    sizes = [(1, ""), (2, ""), (1, "expandable_segments:True"), (4, "")]
    rows = [
        Workload.from_mapping({"model": model, "allocator": allocator, "train": {"per_device_train_batch_size": size}})
        for size, allocator in sizes
    ]
    monkeypatch.setattr(comparing.os, "cpu_count", lambda: 8)
    assert comparing._shares(rows) == [[0, 2], [1], [3]]
    monkeypatch.setattr(comparing.os, "cpu_count", lambda: 2)
    assert comparing._shares(rows) == [[0, 2, 3], [1]]
    assert comparing._shares([]) == []
