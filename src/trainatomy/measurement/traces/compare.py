"""Two tapes of the same training side by side: what differs between a simulated and a real run, by size of allocation.

An allocation has no name that both worlds share, but its size is shared to the byte.  So for one step, count how often
each size is allocated, and for the instant of the peak, how many blocks of each size are alive: what is missing or too
much shows at once, and the origins (operations of the one, stacks of the other) say where to look.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainatomy.results.trace import AllocationTrace

BLOCK_BYTES = 512
"""The allocator's grain (kMinBlockSize, c10/cuda/CUDACachingAllocator.cpp)."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A size (bytes, as requested) that one side has more often: how often each has it, and where it comes from."""

    bytes: int
    simulated: int
    real: int
    simulated_origins: tuple[str, ...]
    real_origins: tuple[str, ...]

    @property
    def excess_bytes(self) -> int:
        """Rounded bytes that the simulation has too much (negative: too little)."""
        return (self.simulated - self.real) * -(-self.bytes // BLOCK_BYTES) * BLOCK_BYTES


def compare_step(simulated: AllocationTrace, real: AllocationTrace, step: int | None = None) -> list[Difference]:
    """Sizes not allocated equally often in ``step`` (``None``: in the whole run), largest difference in bytes first."""
    return _differences(simulated, _allocated(simulated, step), real, _allocated(real, step))


def compare_peak(simulated: AllocationTrace, real: AllocationTrace) -> list[Difference]:
    """Sizes of which unequally many are alive when each tape is at its peak, largest difference in bytes first."""
    return _differences(simulated, alive_at_peak(simulated), real, alive_at_peak(real))


def alive_at_peak(trace: AllocationTrace) -> list[int]:
    """The allocations that are alive when the sum of rounded sizes is largest for the first time."""
    held = peak = 0
    at = 0
    sizes: dict[int, int] = {}
    for index, event in enumerate(trace.events):
        if event.action == "alloc":
            sizes[event.allocation] = -(-event.bytes // BLOCK_BYTES) * BLOCK_BYTES
            held += sizes[event.allocation]
            if held > peak:
                peak, at = held, index
        elif event.action == "free":
            held -= sizes[event.allocation]
    alive: dict[int, None] = {}
    for event in islice(trace.events, at + 1):
        if event.action == "alloc":
            alive[event.allocation] = None
        elif event.action == "free":
            del alive[event.allocation]
    return list(alive)


def _allocated(trace: AllocationTrace, step: int | None) -> list[int]:
    return [
        event.allocation
        for event in trace.events
        if event.action == "alloc" and (step is None or trace.origins[event.allocation].step == step)
    ]


def _differences(
    simulated: AllocationTrace, ours: Iterable[int], real: AllocationTrace, theirs: Iterable[int]
) -> list[Difference]:
    by_size = (_by_size(simulated, ours), _by_size(real, theirs))
    found = [
        Difference(size, len(one), len(other), _origins(simulated, one), _origins(real, other))
        for size in by_size[0].keys() | by_size[1].keys()
        if len(one := by_size[0].get(size, [])) != len(other := by_size[1].get(size, []))
    ]
    return sorted(found, key=lambda difference: (-abs(difference.excess_bytes), difference.bytes))


def _by_size(trace: AllocationTrace, allocations: Iterable[int]) -> dict[int, list[int]]:
    requested = {event.allocation: event.bytes for event in trace.events if event.action == "alloc"}
    groups: dict[int, list[int]] = defaultdict(list)
    for allocation in allocations:
        groups[requested[allocation]].append(allocation)
    return groups


def _origins(trace: AllocationTrace, allocations: Iterable[int]) -> tuple[str, ...]:
    told = Counter(_tell(trace, allocation) for allocation in allocations)
    return tuple(f"{count} x {text}" for text, count in told.most_common() if text)


def _tell(trace: AllocationTrace, allocation: int) -> str:
    origin = trace.origins[allocation]
    return " ".join(part for part in (origin.operation, origin.module and f"in {origin.module}") if part)
