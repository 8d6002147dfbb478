"""Simulated caching allocator behind ``torch.cuda``, in place of a GPU's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainatomy.allocator.simulated import CachingAllocator, OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from trainatomy.allocator.blocks import Block, Pool
    from trainatomy.allocator.settings import AllocatorSettings


class ReportingAllocator(CachingAllocator):
    """Reports segments that are reserved and released, except pieces of expandable ones."""

    def __init__(self, *arguments: Any, write: Callable[[str, int, int], None], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._write = write

    def _allocate(self, pool: Pool, size: int) -> Block | None:
        block = super()._allocate(pool, size)
        if block is not None and block.expandable is None:
            self._write("segment_alloc", block.address, block.size)
        return block

    def _release(self, block: Block) -> None:
        self._write("segment_free", block.address, block.size)
        super()._release(block)


class SimulatedMemory:
    """Allocates on the simulated allocator, with PyTorch's history, snapshot and counters.

    A block that another stream uses stays in place after its release until ``arrive``: it no longer counts as
    allocated, but is not available.
    """

    def __init__(self, settings: AllocatorSettings, capacity: int | None = None) -> None:
        self._allocator = ReportingAllocator(settings, capacity, device_bytes=capacity, write=self._write)
        self._requested: dict[int, int] = {}
        self._waiting: dict[int, int] = {}
        self._trace: list[dict[str, Any]] = []
        self._recording = False
        self._entries = 1 << 62
        self._calls = [0, 0]
        self.peak = self.peak_reserved = 0
        self._mapped = self._ranges()

    # -- operations of a program ---------------------------------------------------------------------------------------

    def alloc(self, size: int) -> int | None:
        """Return the address, or ``None`` if the driver refuses."""
        try:
            address = self._allocator.malloc(size)
        except OutOfMemory:
            self._follow_segments()
            self._write("oom", 0, size)
            return None
        self._follow_segments()
        self._requested[address] = size
        self._calls[0] += 1
        self._write("alloc", address, size)
        self.peak = max(self.peak, self.allocated)
        return address

    def free(self, address: int, *, waits: bool = False) -> None:
        """Free a block, which another stream may still use (``waits``)."""
        size = self._requested.pop(address)
        self._calls[1] += 1
        self._write("free_requested", address, size)
        self._waiting[address] = size
        if not waits:
            self._complete(address)

    def arrive(self) -> None:
        """Let the other streams finish with all blocks."""
        for address in list(self._waiting):
            self._complete(address)

    def empty_cache(self) -> None:
        """``torch.cuda.empty_cache``."""
        self._allocator.empty_cache()
        self._follow_segments()

    # -- answers of torch.cuda -----------------------------------------------------------------------------------------

    @property
    def allocated(self) -> int:
        """Return the bytes of all live blocks."""
        return self._allocator.allocated_bytes - sum(self._allocator.block_bytes(address) for address in self._waiting)

    @property
    def live(self) -> list[int]:
        """Return the addresses of all live blocks."""
        return list(self._requested)

    @property
    def reserved(self) -> int:
        """Return the bytes of all segments."""
        return self._allocator.reserved_bytes

    def reset_peaks(self, device: int | None = None) -> None:
        """``torch.cuda.reset_peak_memory_stats``."""
        self.peak, self.peak_reserved = self.allocated, self.reserved

    def snapshot(self) -> list[dict[str, Any]]:
        """``torch.cuda.memory_snapshot``, which also appears in the history."""
        self._write("snapshot", 0, 0)
        return [
            {
                "device": 0,
                "address": segment.address,
                "total_size": segment.size,
                "stream": segment.stream,
                "segment_type": "small" if segment.is_small else "large",
                "is_expandable": segment.is_expandable,
                "blocks": [
                    {"address": block.address, "size": block.size, "state": self._state(block.address)}
                    for block in segment.blocks
                ],
            }
            for segment in self._allocator.snapshot()
        ]

    def statistics(self, device: int | None = None) -> dict[str, Any]:
        """``torch.cuda.memory_stats_as_nested_dict``."""
        calls = {"allocated": self._calls[0], "freed": self._calls[1]}
        return {"allocation": {"all": calls}, "allocated_bytes": {"all": {"peak": self.peak}}, "num_alloc_retries": 0}

    def record(self, **options: Any) -> None:
        """``torch.cuda.memory._record_memory_history``."""
        self._recording = options["enabled"] is not None
        self._entries = options.get("max_entries", self._entries)
        if options.get("clear_history"):
            self._trace = []

    def trace(self) -> list[dict[str, Any]]:
        """Return the last entries of the history."""
        return self._trace[-self._entries :]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make ``torch.cuda`` answer for this memory."""
        monkeypatch.setattr(torch.cuda, "memory_snapshot", self.snapshot)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [self.trace()]})
        monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: self._recording, raising=False)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _complete(self, address: int) -> None:
        size = self._waiting.pop(address)
        self._allocator.free(address)
        self._write("free_completed", address, size)

    def _state(self, address: int) -> str:
        if address in self._requested:
            return "active_allocated"
        return "active_pending_free" if address in self._waiting else "inactive"

    def _write(self, action: str, address: int, size: int) -> None:
        if self._recording:
            self._trace.append({"action": action, "addr": address, "size": size, "stream": 0})

    def _ranges(self) -> dict[int, int]:
        return {segment.address: segment.size for segment in self._allocator.snapshot() if segment.is_expandable}

    def _follow_segments(self) -> None:
        """Write which pieces of expandable segments were mapped and unmapped."""
        before, after = self._mapped, self._ranges()
        self._mapped = after
        for action, pieces in (("segment_unmap", _pieces(before, after)), ("segment_map", _pieces(after, before))):
            for address, size in pieces:
                self._write(action, address, size)
        self.peak_reserved = max(self.peak_reserved, self.reserved)


def _pieces(ranges: dict[int, int], others: dict[int, int]) -> list[tuple[int, int]]:
    """Return the parts of ``ranges`` that are not in ``others``, as (address, bytes)."""
    found = []
    for address, size in ranges.items():
        left = [(address, address + size)]
        for other, length in others.items():
            left = [
                piece
                for first, last in left
                for piece in ((first, min(last, other)), (max(first, other + length), last))
                if piece[0] < piece[1]
            ]
        found += [(first, last - first) for first, last in left]
    return found
