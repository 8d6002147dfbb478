"""A whole measurement with a CUDA and an NVML that answer from a script, and the real step on the CPU."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
import torch
from fake_gpu import MIB, FakeNvml, fake_cuda

from trainatomy.errors import DeviceError, WorkloadError
from trainatomy.gpu import nvml, on_card, tape, worker
from trainatomy.gpu.job import Job, read_result
from trainatomy.training import run as steps

if TYPE_CHECKING:
    from pathlib import Path

TINY = {
    "name": "tiny",
    "model": {
        "class": "BertForSequenceClassification",
        "config": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8},
    },
    "data": {"sequence_length": 8},
    "loop": "pytorch",
    "train": {"per_device_train_batch_size": 2, "optim": "sgd"},
}
TRACE = [
    {"action": "alloc", "addr": 1, "size": 4, "stream": 0},
    {"action": "alloc", "addr": 2, "size": 8, "stream": 0},
]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    library = FakeNvml(pid=os.getpid())
    monkeypatch.setattr(nvml, "_library", lambda: library)
    fake_cuda(monkeypatch, library, TRACE)
    return library


def test_a_measurement_holds_what_cuda_and_the_driver_say(card: FakeNvml) -> None:
    found = on_card.run(Job(TINY))
    assert (found.name, found.status, found.gpu, found.driver) == ("tiny", "completed", "NVIDIA H200", "580.159.04")
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == (40 * MIB, 64 * MIB)
    assert (found.model_bytes, found.context_bytes, found.device_bytes) == (11 * MIB, 527 * MIB, 529 * MIB)
    assert found.steps == 4
    assert found.step_seconds is not None and found.step_seconds > 0
    assert found.versions["torch"] == torch.__version__
    assert card.opened == 0


def test_the_worker_reads_a_workload_and_writes_a_result(card: FakeNvml, tmp_path: Path) -> None:
    description, result = tmp_path / "workload.json", tmp_path / "result.json"
    description.write_text(json.dumps(TINY | {"steps": 1}))
    assert worker.main([str(description), str(result), "--tape", str(tmp_path / "tape.json.gz")]) == 0
    found = read_result(result)
    assert (found.steps, found.step_seconds) == (1, None)
    history = tape.read(tmp_path / "tape.json.gz")
    assert history.case["name"] == "tiny"
    tiny = tape.to_tape(history)
    assert [(origin.phase, origin.step) for origin in tiny.origins] == [("load", -1), ("forward", 0)]
    said = ["loaded", "step", "forward", "forward end", "backward end", "optimizer", "optimizer end"]
    assert [mark.name for mark in tiny.marks] == [*said, "zero_grad", "zero_grad end", "step end"]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried"), RuntimeError("CUDA error: out of memory\nmore")]
)
def test_running_out_of_memory_is_a_result(card: FakeNvml, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def run(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(steps, "run", run)
    found = on_card.run(Job(TINY))
    assert (found.status, found.steps) == ("out of memory", 0)
    assert found.message == str(error).splitlines()[0]
    assert found.peak_allocated_bytes == 40 * MIB


def test_other_errors_are_not_out_of_memory(card: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: misaligned address")

    monkeypatch.setattr(steps, "run", run)
    with pytest.raises(RuntimeError, match="misaligned"):
        on_card.run(Job(TINY))


def test_an_error_of_the_workloads_reaches_the_caller(card: FakeNvml, tmp_path: Path) -> None:
    worker.execute(Job({"model": {"class": "BertForNothing"}}), tmp_path / "result.json")
    with pytest.raises(WorkloadError, match="BertForNothing"):
        read_result(tmp_path / "result.json")


def test_a_pytorch_without_cuda_says_so(card: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r"finds no GPU.*predict"):
        on_card.run(Job(TINY))
