"""Which group's results hold memory at the peak."""

from __future__ import annotations

from collections.abc import Sequence

from trainatomy.operators.groups import GROUPS, group_of
from trainatomy.results.trace import AllocationTrace

_NOT_RESULTS = frozenset({"weight", "buffer", "optimizer_state", "input", "cublas_workspace", "cublaslt_workspace"})


def held_at_peak(trace: AllocationTrace, sizes: Sequence[int]) -> list[int]:
    """The allocations that are held when most is, at its first instant; ``sizes``: their blocks, bytes."""
    now = most = 0
    peak = -1
    for index, event in enumerate(trace.events):
        if event.action == "alloc":
            now += sizes[event.allocation]
            if now > most:
                most, peak = now, index
        elif event.action == "free":
            now -= sizes[event.allocation]
    held: dict[int, None] = {}
    for event in trace.events[: peak + 1]:
        if event.action == "alloc":
            held[event.allocation] = None
        elif event.action == "free":
            held.pop(event.allocation, None)
    return list(held)


def held_by_group(trace: AllocationTrace, held: Sequence[int], sizes: Sequence[int]) -> dict[str, int]:
    """Bytes by group of the allocations ``held`` at the peak that operations of a step made (``sizes``: their blocks).

    Weights, optimizer states, inputs and workspaces are nobody's results; casts that autocast keeps are element-wise
    operators'.
    """
    found: dict[str, int] = dict.fromkeys(GROUPS, 0)
    for number in held:
        origin = trace.origins[number]
        if origin.phase == "load" or trace.labels.get(number) in _NOT_RESULTS:
            continue
        group = group_of(origin.operation)
        if group is not None:
            found[group] += sizes[number]
    return found
