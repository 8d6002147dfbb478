"""Compare the simulated and the real allocation trace of a training, by size of allocation.

An allocation has no name that both share, but its size is the same to the byte.  So count how often each size is
allocated in one step, and how many blocks of each size are alive at the peak: missing and superfluous allocations show
at once, and their origins (operations of the one, stacks of the other) say where to look.
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
"""Granularity of the allocator (kMinBlockSize, c10/cuda/CUDACachingAllocator.cpp)."""


@dataclass(frozen=True, slots=True)
class SizeDifference:
    """A size (requested bytes) that one trace has more often, with the counts and origins in each."""

    bytes: int
    simulated: int
    real: int
    simulated_origins: tuple[str, ...]
    real_origins: tuple[str, ...]

    @property
    def excess_bytes(self) -> int:
        """Rounded bytes that the simulation has in excess (negative: lacks)."""
        return (self.simulated - self.real) * -(-self.bytes // BLOCK_BYTES) * BLOCK_BYTES


def compare_step(simulated: AllocationTrace, real: AllocationTrace, step: int | None = None) -> list[SizeDifference]:
    """Return sizes with different counts in ``step`` (``None``: the whole run), largest difference in bytes first."""
    return _differences(simulated, _allocated(simulated, step), real, _allocated(real, step))


def compare_peak(simulated: AllocationTrace, real: AllocationTrace) -> list[SizeDifference]:
    """Return sizes with different counts at the peak of each trace, largest difference in bytes first."""
    return _differences(simulated, alive_at_peak(simulated), real, alive_at_peak(real))


def alive_at_peak(trace: AllocationTrace) -> list[int]:
    """Return the allocations that are alive at the first peak of the rounded sizes."""
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
) -> list[SizeDifference]:
    by_size = (_by_size(simulated, ours), _by_size(real, theirs))
    found = [
        SizeDifference(size, len(one), len(other), _origins(simulated, one), _origins(real, other))
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
    descriptions = Counter(_describe(trace, allocation) for allocation in allocations)
    return tuple(f"{count} x {text}" for text, count in descriptions.most_common() if text)


def _describe(trace: AllocationTrace, allocation: int) -> str:
    origin = trace.origins[allocation]
    return " ".join(part for part in (origin.operation, origin.module and f"in {origin.module}") if part)
