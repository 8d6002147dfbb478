"""A fake NVML and a fake CUDA, for machines without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain, repeat
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from fake_driver import UUID, fake_driver

from trainatomy.measurement.device import host
from trainatomy.training import run as steps

if TYPE_CHECKING:
    import pytest

MIB = 2**20
IDLE_BYTES = 615 * MIB


class FakeNvmlError(Exception):
    """Fake of ``pynvml.NVMLError``."""


@dataclass
class FakeNvml:
    """Fake pynvml with the functions in use; ``used`` is the memory of this process."""

    used: int = 0
    count: int = 1
    driver_answers: bool = True
    has_second_form: bool = True
    processes_answer: bool = True
    pid: int = 0
    others: dict[int, int | None] = field(default_factory=dict)
    unlisted: int = 0
    instances: tuple[str, ...] = ()
    unreadable: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    opened: int = 0
    opened_handles: list[int] = field(default_factory=list)
    NVMLError: type[Exception] = FakeNvmlError
    nvmlMemory_v2: int = 2  # noqa: N815

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.driver_answers:
            raise FakeNvmlError("Driver Not Loaded")
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.count

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"580.159.04"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index in self.lost:
            raise FakeNvmlError("GPU is lost")
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        if handle >= 100:
            return self.instances[handle - 100]
        return f"GPU-{UUID}" if handle == self.count - 1 else f"GPU-other-{handle}"

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:  # noqa: N802
        return [1 if self.instances else 0, 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, place: int) -> int:  # noqa: N802
        if place >= len(self.instances):
            raise FakeNvmlError("Not Found")
        return 100 + place

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return "NVIDIA H200" if handle < 100 else "NVIDIA H200 MIG 1g.18gb"

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> Any:  # noqa: N802
        self.opened_handles.append(handle)
        if handle in self.unreadable:
            raise FakeNvmlError("Insufficient Permissions")
        used = self.used + self.unlisted + sum(size or 0 for size in self.others.values())
        if version is None:
            return SimpleNamespace(used=IDLE_BYTES + used)
        if not self.has_second_form:
            raise FakeNvmlError("Function Not Found")
        return SimpleNamespace(used=used, reserved=IDLE_BYTES)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        if not self.processes_answer:
            raise FakeNvmlError("Not Supported")
        held = {**self.others, self.pid: self.used}
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in held.items()]


class FakeEvent:
    """Fake CUDA event, half a second after the previous one."""

    count = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object = None) -> None:
        FakeEvent.count += 1
        self.stream = stream
        self.at = FakeEvent.count

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.at - self.at) * 500.0


def instant_event(_: object) -> FakeEvent:
    """Return an event that takes no time, in place of those around the fetching of a batch."""
    event = FakeEvent(enable_timing=True)
    event.at = FakeEvent.count
    return event


def fake_cuda(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml, trace: list[dict[str, Any]] | None = None) -> None:
    """Make ``measurement.step.runner`` see a GPU; the step itself runs on the CPU."""
    from transformers import TrainingArguments  # noqa: F401  # some libraries look for CUDA's functions when imported

    real_run, empty_on = steps.run, host._empty

    def run_on_cpu(*arguments: Any, device: str, **keywords: Any) -> None:
        assert device == "cuda"
        real_run(*arguments, device="cpu", **keywords)

    answers = {
        "init": None,
        "memory_allocated": 11 * MIB,
        "memory_reserved": 2 * MIB,
        "max_memory_allocated": 40 * MIB,
        "max_memory_reserved": 64 * MIB,
    }
    counted = chain([1, 1, 1], repeat(2))  # one allocation while loading, another in the first forward

    def counts(_: int) -> dict[str, Any]:
        calls = {"allocated": next(counted), "freed": 0}
        return {"allocation": {"all": calls}, "allocated_bytes": {"all": {"peak": 40 * MIB}}}

    fake_driver(monkeypatch, counts)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_alloc_retries": 3})
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr("trainatomy.measurement.step.instruments.DataWaits._event", instant_event)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **_: None)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [trace or []]})
    monkeypatch.setattr("trainatomy.measurement.step.runner._make_context", lambda: setattr(nvml, "used", 529 * MIB))
    monkeypatch.setattr(host, "_empty", lambda _: empty_on("cpu"))
    monkeypatch.setattr(steps, "run", run_on_cpu)
