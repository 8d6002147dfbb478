"""Memory that grows with each step: what earlier steps allocated and nothing ever releases.

A loop that keeps losses with their graphs, or outputs, holds more after each step, and runs out of memory long after
the steps that were simulated.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from trainatomy.results.script import Growth

if TYPE_CHECKING:
    from trainatomy.results.trace import AllocationTrace, Origin

_STEPS = 3
"""Steps that it takes: what two of them left must still be there late in a third, as variables of a loop keep their
values for one more step."""
LEAST_BYTES = 1 << 20
"""Growth per step that is worth telling: less fills no GPU in tens of thousands of steps."""

_STAYS = frozenset({"weight", "buffer", "scale", "gradient", "optimizer_state"})
"""Contents of which more in a later step are none that a loop forgets to release."""
_Place = tuple[str, str, str]
"""Operation, module and phase."""


def growth_of(trace: AllocationTrace, spare_bytes: int) -> Growth | None:
    """Return what each step adds to the memory of a training; None if nothing does, or steps are too few to tell.

    That is what the same operations of both steps before the last left.

    Args:
        trace: Allocations of its steps.
        spare_bytes: Memory of the GPU that was free after them.
    """
    steps = sorted({mark.step for mark in trace.marks if mark.step >= 0})
    if len(steps) < _STEPS:
        return None
    *_, before, previous, last = steps
    end = max(mark.event for mark in trace.marks if mark.step == last)
    kept: dict[int, dict[_Place, int]] = {before: defaultdict(int), previous: defaultdict(int)}
    for allocation, size in _live(trace, end).items():
        origin = trace.origins[allocation]
        if origin.step in kept and trace.labels.get(allocation) not in _STAYS:
            kept[origin.step][_place(origin)] += size
    both = {place: min(size, kept[previous][place]) for place, size in kept[before].items() if kept[previous][place]}
    total = sum(both.values())
    if total < LEAST_BYTES:
        return None
    operation, module, _ = max(both, key=lambda place: both[place])
    return Growth(total, operation, module, len(steps) + max(0, spare_bytes) // total)


def _place(origin: Origin) -> _Place:
    return origin.operation, origin.module, origin.phase


def _live(trace: AllocationTrace, end: int) -> dict[int, int]:
    """Return the bytes of each allocation that is not released before an event."""
    live: dict[int, int] = {}
    for event in trace.events[:end]:
        if event.action == "alloc":
            live[event.allocation] = event.bytes
        elif event.action == "free":
            live.pop(event.allocation, None)
    return live
