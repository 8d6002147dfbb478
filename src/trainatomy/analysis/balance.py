"""Who holds what at one instant: by component, by line, by module."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from trainatomy.analysis.purposes import Purpose
from trainatomy.results.memory import Line, ModuleActivations
from trainatomy.results.trace import AllocationTrace

COMPONENTS = ("weights", "optimizer_states", "gradients", "activations", "temporary", "functionality")
_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def held_after(trace: AllocationTrace, event: int) -> list[int]:
    """The allocations that are held after the event of that index."""
    held: dict[int, None] = {}
    for index, (action, allocation, _, _) in enumerate(trace.events):
        if index > event:
            break
        if action == "alloc":
            held[allocation] = None
        elif action == "free":
            held.pop(allocation, None)
    return list(held)


def by_component(held: Sequence[int], purposes: Sequence[Purpose], sizes: Sequence[int]) -> dict[str, int]:
    """Bytes by component; every component is there."""
    totals = dict.fromkeys(COMPONENTS, 0)
    for number in held:
        totals[purposes[number].component] += sizes[number]
    return totals


def lines(held: Sequence[int], purposes: Sequence[Purpose], sizes: Sequence[int]) -> tuple[Line, ...]:
    """The lines of the bill, in the order of the components, the largest first."""
    totals: dict[Purpose, list[int]] = defaultdict(lambda: [0, 0])
    for number in held:
        entry = totals[purposes[number]]
        entry[0] += sizes[number]
        entry[1] += 1
    found = [Line(purpose.component, purpose.line, size, count) for purpose, (size, count) in totals.items()]
    return tuple(sorted(found, key=lambda line: (COMPONENTS.index(line.component), -line.bytes)))


def folded(path: str) -> str:
    """``encoder.layer.7.attention`` as ``encoder.layer.*.attention``: the same module of every layer."""
    return _LAYER.sub("*", path)


def by_module(
    trace: AllocationTrace, held: Sequence[int], purposes: Sequence[Purpose], sizes: Sequence[int]
) -> tuple[ModuleActivations, ...]:
    """Activations by module, layers folded, the largest first."""
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for number in held:
        if purposes[number].component == "activations":
            entry = totals[folded(trace.origins[number].module)]
            entry[0] += sizes[number]
            entry[1] += 1
    shares = (ModuleActivations(module, size, count) for module, (size, count) in totals.items())
    return tuple(sorted(shares, key=lambda share: -share.activation_bytes))


def over_time(
    trace: AllocationTrace, purposes: Sequence[Purpose], sizes: Sequence[int], start: int = 0
) -> Iterator[tuple[int, dict[str, int]]]:
    """Event index and bytes by component after it, from ``start`` on. The dictionary is the same object each time."""
    totals = dict.fromkeys(COMPONENTS, 0)
    for index, (action, allocation, _, _) in enumerate(trace.events):
        if action == "alloc":
            totals[purposes[allocation].component] += sizes[allocation]
        elif action == "free":
            totals[purposes[allocation].component] -= sizes[allocation]
        if index >= start:
            yield index, totals
