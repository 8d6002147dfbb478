"""The range of peaks where it depends on timing when memory is released.

Two things hold memory longer than its tensor lives:

- Other streams that use it (``Tensor.record_stream``).  The allocator takes such a block back when those streams are
  done, and asks them whenever it is asked for memory (c10/cuda/CUDACachingAllocator.cpp, ``process_events``): at the
  earliest when the tensor dies, at the latest when the CPU has waited for those streams.
- NCCL's process group, which refers to the tensors of an asynchronous collective until it has seen that it is over
  (see ``CollectiveUse``): at the latest until a backward pass calls the next collective.  DDP replaces its buckets
  between the first and the second step, so that both may exist in the second.

The truth lies between the two ends.
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
    """Return the range of the peaks; None if no release depends on timing.

    Args:
        trace: Allocations of a run, in which memory is free as soon as its tensor dies.
        settings: Settings of the allocator.
        gpu_bytes: Memory of the GPU.
        memory: Peaks of the trace itself.
    """
    late = let_go_late(released_late(trace))
    if late.events == trace.events:
        return None
    replayed = replay(late, settings, device_bytes=gpu_bytes)
    return PeakRange(
        allocated_bytes=_ordered(memory.peak_allocated_bytes, replayed.peak_allocated_bytes),
        reserved_bytes=_ordered(memory.peak_reserved_bytes, replayed.peak_reserved_bytes),
    )


def released_late(trace: AllocationTrace) -> AllocationTrace:
    """Return the trace with each release that waits for other streams at the CPU's next wait for them."""
    if not trace.stream_uses:
        return trace
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
    return replace(trace, events=events, stream_uses=[], cpu_waits=[], collectives=[])


def let_go_late(trace: AllocationTrace) -> AllocationTrace:
    """Return the trace with tensors of asynchronous collectives held until a backward pass calls the next one."""
    held = {number for one in trace.collectives for number in one.allocations}
    backward = iter(sorted(one.event for one in trace.collectives if one.in_backward))
    following = next(backward, None)
    events: list[Event] = []
    pending: list[Event] = []
    for index, event in enumerate(trace.events):
        while following is not None and following <= index:
            events += pending
            pending, following = [], next(backward, None)
        if event.action == "free" and event.allocation in held:
            pending.append(event)
        else:
            events.append(event)
    return replace(trace, events=events, collectives=[])


def _ordered(one: int, other: int) -> tuple[int, int]:
    return min(one, other), max(one, other)
