"""The simulated GPU as a program sees it: its properties, the counters of its memory, and generators.

The counters come from the trace of the process: it is replayed on a simulated allocator when somebody asks, as far as
it has come since the last time.  Addresses are of no importance here: they decide between blocks of equal size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from trainatomy.allocator.player import Player
from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.allocator.simulated import CachingAllocator
from trainatomy.catalog.gpus import threads_per_multiprocessor
from trainatomy.simulator.cards import EVERYTHING, Cards

if TYPE_CHECKING:
    from trainatomy.results.trace import AllocationTrace


_NAMES = {name: f"{name}:sramecc+:xnack-" for name in ("gfx90a", "gfx942", "gfx950")}
"""Architectures of AMD GPUs as their driver names them with its settings."""


_SHARED_MEMORY_KIB = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (12, 0): 99, (12, 1): 99}
"""Maximum shared memory of a block, where it is not 227 KiB.  Source: CUDA C++ programming guide, compute
capabilities."""


class DeviceProperties:
    """Result of ``torch.cuda.get_device_properties``.

    What differs between GPUs is looked up when it is asked for.
    """

    def __init__(self, cards: Cards) -> None:
        self._cards = cards
        self.warp_size = cards.processor.warp_size  # cards of one execution have the same architecture
        self.is_integrated = self.is_multi_gpu_board = False
        self.regs_per_multiprocessor = 65536
        self.shared_memory_per_block = 48 << 10
        self.max_threads_per_block = 1024
        self.L2_cache_size = 50 << 20
        self.gcnArchName = _NAMES.get(cards.processor.architecture, cards.processor.architecture)

    @property
    def major(self) -> int:
        """First number of the compute capability."""
        return self._cards.decide(lambda processor: processor.capability[0])

    @property
    def minor(self) -> int:
        """Second number of the compute capability."""
        return self._cards.decide(lambda processor: processor.capability[1])

    @property
    def shared_memory_per_block_optin(self) -> int:
        """Shared memory that a block may have, in bytes."""
        return self._cards.decide(lambda processor: _SHARED_MEMORY_KIB.get(processor.capability, 227) << 10)

    @property
    def shared_memory_per_multiprocessor(self) -> int:
        """Shared memory of a multiprocessor, in bytes."""
        return self.shared_memory_per_block_optin + (1 << 10)

    @property
    def max_threads_per_multi_processor(self) -> int:
        """Threads that a multiprocessor holds."""
        return self._cards.decide(lambda processor: threads_per_multiprocessor(processor))

    @property
    def computes_in_bfloat16(self) -> bool:
        """Whether it has arithmetic units for bfloat16."""
        return self._cards.decide(lambda processor: processor.capability >= (8, 0))  # all of AMD's say 9.0 or more

    @property
    def name(self) -> str:
        """Name of the GPU."""
        self._cards.asked("name")
        return self._cards.own.name

    @property
    def total_memory(self) -> int:
        """Its memory in bytes."""
        self._cards.asked("memory_bytes")
        return self._cards.own.memory_bytes

    @property
    def multi_processor_count(self) -> int:
        """Number of its multiprocessors."""
        return self._cards.processor.multiprocessors


SettingsOfProcess = Callable[[], AllocatorSettings]


class MemoryCounters:
    """The counters of a process's allocator, by the names of ``torch.cuda``.

    Args:
        trace: Allocations of the process, which grow.
        settings: Returns the settings of its allocator; asked once.
        cards: The GPU, and others that the execution serves as long as nobody asks for its memory.
    """

    def __init__(self, trace: AllocationTrace, settings: SettingsOfProcess, cards: Cards) -> None:
        self._trace = trace
        self._settings = settings
        self._cards = cards
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
        self._cards.asked(EVERYTHING)
        if self._player is None:
            self._player = Player(self._trace, CachingAllocator(self._settings()))
        self._player.play(len(self._trace.events))
        return self._player.allocator

    def address(self, number: int) -> int:
        """Return the address of the block of an allocation that is held."""
        self._now()
        assert self._player is not None
        return self._player.handles[number]

    def remember(self, number: int) -> None:
        """Keep the place of the block of an allocation that is held, for others that take it later."""
        self._now()
        assert self._player is not None
        self._player.remember(number)

    def private_bytes(self) -> int:
        """Return the reserved bytes of private pools."""
        return self._now().private_bytes()

    def _free_and_total(self) -> tuple[int, int]:
        total = self._cards.own.memory_bytes
        return max(total - self._now().reserved_bytes, 0), total

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


class _AnyGenerator(type(torch._C.Generator)):  # type: ignore[misc]
    """Lets PyTorch's own generators be instances of the class that takes their place."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch._C.Generator)


class SimulatedGenerator(torch._C.Generator, metaclass=_AnyGenerator):
    """``torch.Generator`` in a simulated process: one of the GPU has its state on the host, and draws nothing there."""

    _device: torch.device

    def __new__(cls, device: Any = "cpu") -> Any:
        """Return a generator of a device."""
        made = torch._C.Generator.__new__(cls, "cpu")  # type: ignore[call-arg]
        made._device = torch.device(device)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device whose numbers it draws."""
        kind = self._device.type
        return torch.device(kind, self._device.index or 0) if kind == "cuda" else self._device

    def clone_state(self) -> SimulatedGenerator:
        """Return a copy."""
        made: SimulatedGenerator = type(self)(self._device)
        made.set_state(self.get_state())
        return made

    def graphsafe_get_state(self) -> SimulatedGenerator:
        """Return itself: its state is on the host."""
        return self

    def graphsafe_set_state(self, state: torch._C.Generator) -> SimulatedGenerator:
        """Change nothing."""
        return self
