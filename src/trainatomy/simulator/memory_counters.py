"""Answers of ``torch.cuda.memory_allocated()`` and its like in a simulated process: the allocator's counters so far.

The trace of the process is replayed on a simulated allocator when somebody asks, as far as it has come since the last
time.  Addresses are of no importance here: they decide between blocks of equal size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainatomy.allocator.player import Player
from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.allocator.simulated import CachingAllocator

if TYPE_CHECKING:
    from trainatomy.results.trace import AllocationTrace

SettingsOfProcess = Callable[[], AllocatorSettings]


class MemoryCounters:
    """The counters of a process's allocator, by the names of ``torch.cuda``.

    Args:
        trace: Allocations of the process, which grow.
        settings: Returns the settings of its allocator; asked once.
        total_bytes: Memory of the GPU.
    """

    def __init__(self, trace: AllocationTrace, settings: SettingsOfProcess, total_bytes: int) -> None:
        self._trace = trace
        self._settings = settings
        self._total = total_bytes
        self._player: Player | None = None

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return what replaces the functions of ``torch.cuda`` and ``torch.accelerator``."""
        return {
            "memory_allocated": lambda device=None: self._now().allocated_bytes,
            "max_memory_allocated": lambda device=None: self._now().peak_allocated_bytes,
            "memory_reserved": lambda device=None: self._now().reserved_bytes,
            "max_memory_reserved": lambda device=None: self._now().peak_reserved_bytes,
            "memory_stats": lambda device=None: self._statistics(),
            "mem_get_info": lambda device=None: self._free_and_total(),
            "get_memory_info": lambda device=None: self._free_and_total(),
            "reset_peak_memory_stats": lambda device=None: self._reset(),
            "reset_max_memory_allocated": lambda device=None: self._reset(),
        }

    def _now(self) -> CachingAllocator:
        """Return the allocator after what was allocated and freed so far."""
        if self._player is None:
            self._player = Player(self._trace, CachingAllocator(self._settings()))
        self._player.play(len(self._trace.events))
        return self._player.allocator

    def _free_and_total(self) -> tuple[int, int]:
        return max(self._total - self._now().reserved_bytes, 0), self._total

    def _reset(self) -> None:
        allocator = self._now()
        allocator.peak_allocated_bytes = allocator.allocated_bytes
        allocator.peak_reserved_bytes = allocator.reserved_bytes
        allocator.peak_requested_bytes = allocator.requested_bytes

    def _statistics(self) -> dict[str, int]:
        """Return the totals among PyTorch's statistics; the others are 0."""
        allocator = self._now()
        found: dict[str, int] = defaultdict(int)
        for name, current, peak in (
            ("allocated", allocator.allocated_bytes, allocator.peak_allocated_bytes),
            ("active", allocator.allocated_bytes, allocator.peak_allocated_bytes),
            ("requested", allocator.requested_bytes, allocator.peak_requested_bytes),
            ("reserved", allocator.reserved_bytes, allocator.peak_reserved_bytes),
        ):
            found[f"{name}_bytes.all.current"], found[f"{name}_bytes.all.peak"] = current, peak
        found["num_alloc_retries"], found["num_ooms"] = allocator.num_alloc_retries, allocator.num_ooms
        return found
