"""The range of peaks over places in the address space where the driver may put segments.

Addresses decide between free blocks of equal size, and with them what the next allocation finds.  Where the driver puts
a segment follows rules (``allocator/addresses.py``), but for the gaps that mappings of host memory leave, which differ
between processes.  Replays with other gaps show whether that matters for a training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trainatomy.allocator.addresses import Scattered
from trainatomy.allocator.replay import replay
from trainatomy.results.memory import PeakRange

if TYPE_CHECKING:
    from trainatomy.allocator.settings import AllocatorSettings
    from trainatomy.results.memory import Memory
    from trainatomy.results.trace import AllocationTrace

LAYOUTS: Final = 16
"""Replays with other gaps."""
MOST_EVENTS: Final = 120_000
"""Events that are replayed for it, about a second; a longer trace gets fewer replays, or none."""
LEAST_BYTES: Final = 1 << 30
"""Reserved memory below which no GPU is at stake."""
LEAST_SHARE: Final = 0.005
"""Share of reserved memory that a range must span to be worth a line."""


def layout_range(
    trace: AllocationTrace, settings: AllocatorSettings, gpu_bytes: int, memory: Memory
) -> PeakRange | None:
    """Return the peaks with other gaps between segments; None where they differ by less than 0.5 %.

    An expandable segment is one range of addresses, so that gaps do not matter.

    Args:
        trace: Allocations of a run that fits.
        settings: Settings of the allocator.
        gpu_bytes: Memory of the GPU.
        memory: Peaks of the trace itself.
    """
    if settings.expandable_segments or memory.peak_reserved_bytes < LEAST_BYTES:
        return None
    count = min(LAYOUTS, MOST_EVENTS // max(len(trace.events), 1))
    others = [replay(trace, settings, device_bytes=gpu_bytes, addresses=Scattered(seed)) for seed in range(count)]
    allocated = [memory.peak_allocated_bytes, *(other.peak_allocated_bytes for other in others)]
    reserved = [memory.peak_reserved_bytes, *(other.peak_reserved_bytes for other in others)]
    if max(reserved) - min(reserved) < LEAST_SHARE * memory.peak_reserved_bytes:
        return None
    return PeakRange((min(allocated), max(allocated)), (min(reserved), max(reserved)))
