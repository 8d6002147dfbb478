"""A fake of PyTorch's caching allocator on the CPU: every storage that an operation makes is an allocation.

Addresses are the real ones of host memory, so that lookups by address work.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

import torch
from fake_driver import fake_driver
from fake_gpu import FakeEvent, FakeNvml, instant_event
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainatomy.measurement.device import nvml
from trainatomy.measurement.step import recorder as recorders

if TYPE_CHECKING:
    import pytest

MIB = 2**20
GRAIN = 512
CONTEXT_BYTES = 500 * MIB


class FakeAllocator(TorchDispatchMode):
    """Counts and records allocations as ``torch.cuda`` would, while entered.

    Every storage is a segment with one block, rounded up to ``GRAIN``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[int, int, Any]] = {}
        self.trace: list[dict[str, Any]] = []
        self.recording = False
        self.limit: int | None = None
        self.allocations = self.frees = self.held = self.peak = 0
        self.recordings: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.hold(tensor)
        return result

    def hold(self, tensor: torch.Tensor) -> None:
        """Register the storage of ``tensor`` as a block of the GPU."""
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if size == 0 or address in self.live:
            return
        if self.limit is not None and self.held + size > self.limit:
            self._write("oom", 0, size)
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} B.\nmore")
        self.allocations += 1
        self.held += -(-size // GRAIN) * GRAIN
        self.peak = max(self.peak, self.held)
        self._write("segment_alloc", address, -(-size // GRAIN) * GRAIN)
        self._write("alloc", address, size)
        self.live[address] = (size, len(self.live), weakref.finalize(storage, self._release, address, size))

    def _release(self, address: int, size: int) -> None:
        if address in self.live:
            del self.live[address]
            self.frees += 1
            self.held -= -(-size // GRAIN) * GRAIN
            self._write("free_requested", address, size)
            self._write("free_completed", address, size)
            self._write("segment_free", address, -(-size // GRAIN) * GRAIN)

    def _write(self, action: str, address: int, size: int) -> None:
        if self.recording:
            self.trace.append({"action": action, "addr": address, "size": size, "stream": 0})

    # The answers of torch.cuda.

    def statistics(self, device: int | None = None) -> dict[str, Any]:
        calls = {"allocated": self.allocations, "freed": self.frees}
        return {"allocation": {"all": calls}, "allocated_bytes": {"all": {"peak": self.peak}}, "num_alloc_retries": 0}

    def record(self, **options: Any) -> None:
        self.recordings.append(options)
        self.recording = options["enabled"] is not None
        if options.get("clear_history"):
            self.trace = []

    def snapshot(self) -> list[dict[str, Any]]:
        return [
            {
                "device": 0,
                "address": address,
                "total_size": -(-size // GRAIN) * GRAIN,
                "stream": 0,
                "blocks": [{"state": "active_allocated", "size": -(-size // GRAIN) * GRAIN, "address": address}],
            }
            for address, (size, _, _) in sorted(self.live.items())
        ]

    def reset_peak(self, device: int | None = None) -> None:
        self.peak = self.held

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
        """Make ``torch.cuda`` and NVML answer for this allocator."""
        # The probe's tensors are on the CPU, which stands in for the GPU here.
        monkeypatch.setattr("trainatomy.measurement.device.host.probe_seconds", lambda: 1e-4)
        monkeypatch.setattr("trainatomy.measurement.step.instruments.DataWaits._event", instant_event)
        library = FakeNvml(pid=os.getpid(), used=CONTEXT_BYTES + 64 * MIB)
        monkeypatch.setattr(nvml, "_library", lambda: library)
        fake_driver(monkeypatch, self.statistics)
        answers: dict[str, Any] = {
            "memory_reserved": lambda device=None: 64 * MIB,
            "memory_allocated": lambda device=None: self.held,
            "max_memory_allocated": lambda device=None: self.peak,
            "max_memory_reserved": lambda device=None: 64 * MIB,
            "memory_stats_as_nested_dict": self.statistics,
            "memory_snapshot": self.snapshot,
            "reset_peak_memory_stats": self.reset_peak,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [list(self.trace)]})
        monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: self.recording)
        monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
        monkeypatch.setattr(recorders, "addresses", addresses)
        return library


def addresses(tensors: Any) -> list[int]:
    """Stand in for ``recorder.addresses``, with the CPU as the GPU."""
    return [tensor.untyped_storage().data_ptr() for tensor in tensors]
