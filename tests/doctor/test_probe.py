"""The probe's copies with a torch that pretends to have two GPUs, and a probe that does not end."""

from __future__ import annotations

import json
import subprocess
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recorded_nvml import RecordedNvml

from trainatomy.doctor import gathering, probe
from trainatomy.doctor.gpus import DriverState
from trainatomy.doctor.host import read_software
from trainatomy.measurement.device import nvml

UUIDS = ["GPU-a", "GPU-b"]


class TwoGPUs:
    """As much of torch as the copies need; tensors are in host memory."""

    uint8, float16 = torch.uint8, torch.float32

    def __init__(self) -> None:
        self.cuda = SimpleNamespace(
            device_count=lambda: 2,
            get_device_properties=lambda index: SimpleNamespace(uuid="ab"[index]),
            device=lambda index: nullcontext(),
            synchronize=lambda *device: None,
        )

    def empty(self, size: int, dtype: torch.dtype, device: str | None = None) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    def empty_like(self, tensor: torch.Tensor, device: str | None = None) -> torch.Tensor:
        return torch.empty_like(tensor)

    def ones(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.ones(size, dtype=dtype)

    def randn(self, *size: int, device: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(16, 16)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> TwoGPUs:
    binding = RecordedNvml("load")
    second = {key.replace("(0", "(1", 1): answer for key, answer in binding.answers.items() if "(0" in key}
    names = {f"nvmlDeviceGetUUID({index})": uuid for index, uuid in enumerate(UUIDS)}
    binding.answers |= {**second, **names, "nvmlDeviceGetCount()": 2}
    monkeypatch.setattr(nvml, "_library", lambda: binding)
    monkeypatch.setattr(probe, "COPIED_BYTES", 1 << 12)
    monkeypatch.setattr(probe, "_LOAD_SECONDS", 0.001)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    return TwoGPUs()


def test_each_gpu_is_measured_and_read_meanwhile(two: TwoGPUs) -> None:
    said = json.loads(json.dumps(probe._all_copies(two, UUIDS)))
    assert list(said) == UUIDS
    rates = gathering.copy_rates(said["GPU-b"])
    assert rates is not None
    assert set(rates.rates) == {"pinned_to_device", "device_to_pinned", "pageable_to_device", "device_to_device"}
    assert (rates.pcie.width, rates.replays, rates.clocks.sm, rates.power.watts) == (16, 0, 1470, 690.365)
    assert rates.power.reasons == ("power cap",)


def test_pairs_of_gpus_are_measured_once(two: TwoGPUs) -> None:
    found = probe._between(two, UUIDS)
    assert list(found) == ["GPU-a GPU-b"] and found["GPU-a GPU-b"] > 0
    assert probe._between(two, ["GPU-a", "GPU-elsewhere"]) == {}


def test_a_gpu_that_fails_does_not_prevent_the_other(two: TwoGPUs, monkeypatch: pytest.MonkeyPatch) -> None:
    def copies(torch: Any, gpu: nvml.NvmlDevice) -> dict[str, Any]:
        if gpu.uuid == "GPU-a":
            raise RuntimeError("CUDA error: uncorrectable ECC error\nmore")
        return {"rates": {}}

    monkeypatch.setattr(probe, "_copies", copies)
    assert probe._all_copies(two, UUIDS) == {
        "GPU-a": {"error": "RuntimeError: CUDA error: uncorrectable ECC error"},
        "GPU-b": {"rates": {}},
    }


def test_what_a_probe_said_before_it_hung_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], **options: Any) -> None:
        said = b'{"torch": {"torch": "2.11"}}\n{"importing": "flash-attn"}\n'
        raise subprocess.TimeoutExpired(command, options["timeout"], output=said)

    monkeypatch.setattr(subprocess, "run", hang)
    assert gathering.probe(["GPU-a"]) == {"torch": {"torch": "2.11"}, "importing": "flash-attn"}


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({}, "torch cannot be imported"),
        ({"torch": {"torch": "2.11"}, "starting": True}, "starting it does not end, or ends the process"),
        ({"torch": {"cuda_error": "no driver"}, "starting": False}, "no driver"),
        ({"torch": {"cuda_error": ""}, "starting": False}, ""),
    ],
)
def test_a_probe_that_ended_early_says_why_cuda_does_not_start(said: dict[str, Any], error: str) -> None:
    assert read_software(DriverState("580"), said).cuda_error == error
