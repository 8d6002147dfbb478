"""The least memory of a GPU on which a trace can be replayed to its end.

What the allocator reserves where memory is plenty says little about it: freed blocks that no later request fits stay in
the cache, and only a refusal of the driver empties that.  So sizes are tried, each as a GPU of that size would run the
trace, with the retries that free the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trainatomy.allocator.replay import Replay, replay
from trainatomy.allocator.sizes import MIB

if TYPE_CHECKING:
    from trainatomy.allocator.settings import AllocatorSettings
    from trainatomy.results.trace import AllocationTrace

PRECISION_BYTES: Final = 64 * MIB
"""Distance within which the least size is found."""
PRECISION_SHARE: Final = 0.01
"""The same as a share of it; the larger of the two counts."""


def replay_on_least(
    trace: AllocationTrace,
    settings: AllocatorSettings,
    too_small: int,
    outside_bytes: int,
    unlimited: Replay,
) -> Replay:
    """Return the replay on the smallest GPU on which the trace runs to its end.

    A GPU with the reserved peak of that replay and what lies outside the allocator is enough.

    Args:
        trace: Allocations and releases.
        settings: Settings of the allocator.
        too_small: Memory of a GPU on which it runs out of memory.
        outside_bytes: Memory of a GPU that is not the allocator's: context and libraries.
        unlimited: The replay without a limit of the reserved bytes.
    """
    low, high, found = too_small, 0, unlimited
    if unlimited.out_of_memory is None:
        high = unlimited.peak_reserved_bytes + outside_bytes
    tensors = max(unlimited.peak_allocated_bytes + outside_bytes, low)
    half = _precision(tensors) // 2
    sizes = [tensors + half, tensors - half]  # mostly, what tensors alone take suffices once the cache is freed
    while not high or high - low > _precision(high):
        size = sizes.pop(0) if sizes else _between(low, high, tensors)
        if not low < size < (high or size + 1):
            continue
        tried = replay(trace, settings, max(size - outside_bytes, 0), device_bytes=size)
        if tried.out_of_memory is None:
            high, found = size, tried
        else:
            low = size
    return found


def _between(low: int, high: int, tensors: int) -> int:
    """Return the size to try next: the middle, or twice as far beyond what tensors take as was not enough."""
    farther = tensors + 2 * (low - tensors)
    if not high:
        return max(farther, low + _precision(low))
    middle = (low + high) // 2
    return min(middle, farther) if farther > low else middle


def _precision(size: int) -> int:
    return max(PRECISION_BYTES, int(PRECISION_SHARE * size))
