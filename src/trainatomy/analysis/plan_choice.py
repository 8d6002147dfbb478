"""The range of peaks over the plans that ``cudnn.benchmark`` may find the fastest.

Of the plans that it times, which one is the fastest is known on the GPU only. The plan decides which workspace the
calls after the trial need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from trainatomy.allocator.replay import replay
from trainatomy.results.memory import PeakRange

if TYPE_CHECKING:
    from trainatomy.allocator.settings import AllocatorSettings
    from trainatomy.results.memory import Memory
    from trainatomy.results.trace import AllocationTrace


def plan_range(trace: AllocationTrace, settings: AllocatorSettings, gpu_bytes: int, memory: Memory) -> PeakRange | None:
    """Return the peaks with the plans of least and of most workspace; None where the plans do not matter.

    Args:
        trace: Allocations of a run, with the plans that are expected.
        settings: Settings of the allocator.
        gpu_bytes: Memory of the GPU.
        memory: Peaks of the trace itself.
    """
    if not trace.trials:
        return None
    ends = [replay(with_plans(trace, pick), settings, device_bytes=gpu_bytes) for pick in (min, max)]
    allocated = [memory.peak_allocated_bytes, *(end.peak_allocated_bytes for end in ends)]
    reserved = [memory.peak_reserved_bytes, *(end.peak_reserved_bytes for end in ends)]
    if len(set(allocated)) == len(set(reserved)) == 1:
        return None
    return PeakRange((min(allocated), max(allocated)), (min(reserved), max(reserved)))


def with_plans(trace: AllocationTrace, pick: Callable[[Iterable[int]], int]) -> AllocationTrace:
    """Return the trace with another of the timed plans for each convolution, picked by their workspaces."""
    kept = {trace.choices[number]: pick(tried.workspaces[: tried.timed]) for number, tried in trace.trials.items()}
    chosen = {number: kept[choice] for number, choice in trace.choices.items() if choice in kept}
    sizes = {number: size for number, size in chosen.items() if number not in trace.trials}
    events = [
        event._replace(bytes=sizes[event.allocation])
        if event.action == "alloc" and event.allocation in sizes
        else event
        for event in trace.events
    ]
    return replace(trace, events=events)
