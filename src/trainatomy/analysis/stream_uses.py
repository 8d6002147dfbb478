"""The range of peaks where memory waits for other streams (``Tensor.record_stream``), which depends on timing.

The allocator takes back such a block when the streams that used it are done, and asks them whenever it is asked for
memory (c10/cuda/CUDACachingAllocator.cpp, ``process_events``).  At the earliest this is when the tensor dies, at the
latest when the CPU has waited for those streams.  The truth lies between the two.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from trainatomy.allocator.replay import replay
from trainatomy.results.memory import PeakRange

if TYPE_CHECKING:
    from trainatomy.allocator.settings import AllocatorSettings
    from trainatomy.results.memory import Memory
    from trainatomy.results.trace import AllocationTrace, Event


def peak_range(trace: AllocationTrace, settings: AllocatorSettings, gpu_bytes: int, memory: Memory) -> PeakRange | None:
    """Return the range of the peaks; None if no memory waits for other streams.

    Args:
        trace: Allocations of a run, in which such memory is free as soon as the tensor dies.
        settings: Settings of the allocator.
        gpu_bytes: Memory of the GPU.
        memory: Peaks of the trace itself.
    """
    if not trace.stream_uses:
        return None
    late = replay(released_late(trace), settings, device_bytes=gpu_bytes)
    return PeakRange(
        allocated_bytes=_ordered(memory.peak_allocated_bytes, late.peak_allocated_bytes),
        reserved_bytes=_ordered(memory.peak_reserved_bytes, late.peak_reserved_bytes),
    )


def released_late(trace: AllocationTrace) -> AllocationTrace:
    """Return the trace with each release that waits for other streams at the CPU's next wait for them."""
    used: dict[int, set[int]] = defaultdict(set)
    uses = iter(sorted(trace.stream_uses, key=lambda use: use.event))
    waits = iter(sorted(trace.cpu_waits, key=lambda wait: wait.event))
    use, wait = next(uses, None), next(waits, None)
    events: list[Event] = []
    pending: list[tuple[int, Event, set[int]]] = []
    for index, event in enumerate(trace.events):
        while use is not None and use.event <= index:
            used[use.allocation].add(use.stream)
            use = next(uses, None)
        while wait is not None and wait.event <= index:
            still = []
            for freed, release, streams in pending:
                done = wait.done
                streams = set() if done is None else {one for one in streams if done.get(one, 0) <= freed}
                if streams:
                    still.append((freed, release, streams))
                else:
                    events.append(release)
            pending, wait = still, next(waits, None)
        if event.action == "free" and used.get(event.allocation):
            pending.append((index, event, set(used[event.allocation])))
        else:
            events.append(event)
    return replace(trace, events=events, stream_uses=[], cpu_waits=[])


def _ordered(one: int, other: int) -> tuple[int, int]:
    return min(one, other), max(one, other)
