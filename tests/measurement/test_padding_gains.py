"""``lab/timing/padding.py``: predicted and measured gains of padding."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_gpu import FakeNvml, fake_cuda

from trainatomy.workload import Workload

FILE = Path(__file__).parents[2] / "lab" / "timing" / "padding.py"
TINY = {
    "model": {"class": "GPT2LMHeadModel", "config": {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 65}},
    "data": {"sequence_length": 8},
    "train": {"per_device_train_batch_size": 2},
    "gpu": "h200",
}


@pytest.fixture(scope="module")
def padding() -> Any:
    spec = importlib.util.spec_from_file_location("padding_gains", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_cases_differ_in_one_setting(padding: Any) -> None:
    for case in padding.cases("h200"):
        before, after = (json.dumps(one.to_mapping(), sort_keys=True).split(",") for one in case[2:])
        assert len([1 for a, b in zip(before, after, strict=True) if a != b]) == 1, case.name


def test_a_padded_vocabulary_is_predicted_to_save_much(padding: Any) -> None:
    (case,) = (case for case in padding.cases("h200") if case.name == "gpt2-vocabulary-bf16")
    found = padding.compared(case, padding.predicted)
    assert 0.2 < found["saves"]["gpu"] < 0.7
    assert found["after"]["gpu"] <= found["after"]["step"]


def test_measuring_times_steps_and_adds_up_kernels(padding: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the step on the CPU and attach the kernels that CUPTI would report to one of its events."""
    fake_cuda(monkeypatch, FakeNvml())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    profiled, real = torch.profiler.profile, torch.profiler.profile.events
    cpu = [torch.profiler.ProfilerActivity.CPU]  # CUPTI without CUDA writes a stack for every operation

    def with_kernels(profiler: Any) -> Any:
        events = real(profiler)
        next(event for event in events if event.name == "aten::addmm").append_kernel("gemm", 0, 1000.0)
        return events

    monkeypatch.setattr(profiled, "events", with_kernels)
    monkeypatch.setattr(torch.profiler, "profile", lambda activities, **other: profiled(activities=cpu, **other))
    workload = Workload.from_mapping(TINY)
    clock = iter(range(100))
    monkeypatch.setattr(padding, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    found = padding.measured(workload)
    assert found.gpu == pytest.approx(1e-3 / 2)
    assert found.step == pytest.approx(1.0 / padding.TIMED / 2)
