"""Memory that grows with each step: what steps allocate and nothing ever releases.

A loop that keeps losses with their graphs, or outputs, holds more after each step, and runs out of memory long after
the steps that were simulated.  A loader that is some batches ahead also holds more in its first steps, and an average
of the weights appears once: memory grows for good where each of the last steps adds to it.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from trainatomy.allocator.sizes import block_bytes
from trainatomy.results.script import Growth

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainatomy.results.trace import AllocationTrace, Origin

_STEPS = 3
"""Steps that it takes: two of them must have added to what the one before them held."""
_LAST_STEPS = 5
"""Steps that are looked at, of more."""
_MOMENTS = ("optimizer end", "backward end", "step end")
"""Moments at which steps are compared, the first of which they have: a loop holds the same of each step then."""

_STAYS = frozenset({"weight", "buffer", "scale", "gradient", "optimizer_state"})
"""Contents of which more in a later step are none that a loop forgets to release."""
_Place = tuple[str, str]
"""Operation and module."""


def growth_of(trace: AllocationTrace, spare_bytes: int) -> Growth | None:
    """Return what each step adds to the memory of a training; None if nothing does, or steps are too few to tell.

    Args:
        trace: Allocations of its steps.
        spare_bytes: Memory of the GPU that was free after them.
    """
    moments = _moments(trace)
    if len(moments) < _STEPS:
        return None
    held = list(_held(trace, list(moments.values())[-_LAST_STEPS:]))
    added = [{place: later[place] - earlier[place] for place in later} for earlier, later in pairwise(held)]
    growing = {
        place: min(one[place] for one in added[-2:])
        for place in added[-1]
        if all(one.get(place, 0) > 0 for one in added)
    }
    # What takes the place of other memory, as a later batch that of the first, adds nothing.
    total = min(sum(growing.values()), held[-1].total() - held[-2].total())
    if total <= 0:
        return None
    operation, module = max(growing, key=lambda place: growing[place])
    return Growth(total, operation, module, len(moments) + max(0, spare_bytes) // total)


def live_bytes(trace: AllocationTrace) -> int:
    """Return the bytes that are allocated at the end of a trace."""
    sizes: dict[int, int] = {}
    for event in trace.events:
        if event.action == "alloc":
            sizes[event.allocation] = event.bytes
        elif event.action == "free":
            sizes.pop(event.allocation, None)
    return sum(sizes.values())


def _moments(trace: AllocationTrace) -> dict[int, int]:
    """Return the number of events at the same moment of each step."""
    for name in _MOMENTS:
        found = {mark.step: mark.event for mark in trace.marks if mark.name == name and mark.step >= 0}
        if found:
            return found
    return {}


def _held(trace: AllocationTrace, moments: list[int]) -> Iterator[Counter[_Place]]:
    """Yield the bytes of the blocks that are held at each moment, by what allocated them."""
    held: Counter[_Place] = Counter()
    sizes: dict[int, int] = {}
    labels, origins, begin = trace.labels, trace.origins, 0
    for moment in moments:
        for action, number, size, _ in trace.events[begin:moment]:
            if action == "alloc" and labels.get(number) not in _STAYS:
                sizes[number] = block_bytes(size, ())
                held[_place(origins[number])] += sizes[number]
            elif action == "free" and number in sizes:
                held[_place(origins[number])] -= sizes.pop(number)
        begin = moment
        yield Counter(held)


def _place(origin: Origin) -> _Place:
    return origin.operation, origin.module
