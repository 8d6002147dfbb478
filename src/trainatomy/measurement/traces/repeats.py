"""Attribute allocations to modules in steps whose module calls were not recorded, by matching recorded steps.

Module calls are recorded in the first steps only, because recording them costs time.  A pass (the forward and backward
of one micro-batch) repeats an earlier one.  If it allocates the same sizes in the same order, it is the same pass.  A
shorter or longer batch makes other sizes, but the same allocations in the same order, released in the same order; what
does not depend on the batch, such as autocast's copies of weights, keeps its size.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainatomy.results.trace import Mark

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trainatomy.results.trace import AllocationTrace

_RECOMPUTATION = ("recompute", "recompute end")
_BUFFER = "communication_buffer"
_PASS_ENDS = ("backward end", "step", "forward", "step end")
"""Marks that end a pass; a pass without one was interrupted."""


@dataclass(frozen=True, slots=True)
class Pass:
    """The forward and backward of one micro-batch: its allocations in order, with their sizes and events.

    Communication buffers are left out: DDP makes its buckets anew in one pass, in which nothing else is different.

    Attributes:
        step: Optimizer step.
        allocations: Numbers of the allocations.
        sizes: Requested bytes of each.
        events: Index of each one's event.
        shape: Sequence of 0 for an allocation and n for the release of the pass's n-th allocation.
        is_complete: Whether the pass ended.
    """

    step: int
    allocations: tuple[int, ...]
    sizes: tuple[int, ...]
    events: tuple[int, ...]
    shape: tuple[int, ...]
    is_complete: bool


def attribute_repeated_passes(trace: AllocationTrace, tracked_steps: Sequence[int]) -> tuple[int, ...]:
    """Copy origins, weight copies and recomputation marks from tracked passes to the passes that repeat them.

    Args:
        trace: The trace to complete in place.
        tracked_steps: Steps in which module calls were recorded.

    Returns:
        The steps with a pass that matches no tracked one.
    """
    passes = find_passes(trace)
    tracked = [one for one in passes if one.step in tracked_steps and one.allocations]
    by_size = {one.sizes: one for one in tracked}
    by_shape: dict[tuple[int, ...], list[Pass]] = {}
    for one in tracked:
        by_shape.setdefault(one.shape, []).append(one)
    recomputation = [mark for mark in trace.marks if mark.name in _RECOMPUTATION]
    unknown_steps: dict[int, None] = {}
    marks: list[Mark] = []
    for one in passes:
        if one.step in tracked_steps or not one.allocations:
            continue
        if one.is_complete:
            match = by_size.get(one.sizes) or _first_match(trace, one, by_shape.get(one.shape, ()))
        else:
            match = _first_match(trace, one, [other for other in tracked if other.shape[: len(one.shape)] == one.shape])
        if match is None:
            unknown_steps[one.step] = None
        else:
            marks += _copy_attribution(trace, recomputation, match, one)
    trace.marks += marks
    trace.marks.sort(key=lambda mark: mark.event)
    return tuple(unknown_steps)


def find_passes(trace: AllocationTrace) -> list[Pass]:
    """Return the passes of ``trace`` in order."""
    found: list[Pass] = []
    begin: Mark | None = None
    for mark in trace.marks:
        if begin is not None and mark.name in _PASS_ENDS:
            found.append(_pass_between(trace, begin, mark.event, is_complete=True))
            begin = None
        if mark.name == "forward":
            begin = mark
    if begin is not None:
        found.append(_pass_between(trace, begin, len(trace.events), is_complete=False))
    return found


def _pass_between(trace: AllocationTrace, begin: Mark, end: int, *, is_complete: bool) -> Pass:
    positions: dict[int, int] = {}
    sizes, events, shape = [], [], []
    for index in range(begin.event, end):
        event = trace.events[index]
        if trace.labels.get(event.allocation) == _BUFFER:
            continue
        if event.action == "alloc":
            positions[event.allocation] = len(positions) + 1
            sizes.append(event.bytes)
            events.append(index)
            shape.append(0)
        elif event.allocation in positions:
            shape.append(positions[event.allocation])
    return Pass(begin.step, tuple(positions), tuple(sizes), tuple(events), tuple(shape), is_complete)


def _first_match(trace: AllocationTrace, one: Pass, candidates: Iterable[Pass]) -> Pass | None:
    """Return the first of ``candidates``, which share the shape of ``one``, whose weight copies have the same sizes."""
    for candidate in candidates:
        pairs = zip(candidate.allocations, candidate.sizes, one.sizes, strict=False)
        if all(own == size for number, size, own in pairs if trace.labels.get(number) == "weight_copy"):
            return candidate
    return None


def _copy_attribution(trace: AllocationTrace, recomputation: Sequence[Mark], source: Pass, target: Pass) -> list[Mark]:
    """Copy origins and weight copies from ``source`` to ``target``; return the recomputation marks of ``target``."""
    for original, copy in zip(source.allocations, target.allocations, strict=False):
        trace.origins[copy] = trace.origins[original]._replace(step=target.step)
        if trace.labels.get(original) == "weight_copy":
            trace.labels.setdefault(copy, "weight_copy")
    marks = []
    first, last = source.events[0], source.events[-1]
    for mark in recomputation:
        if first < mark.event <= last + 1:
            before = bisect_left(source.events, mark.event) - 1
            if before < len(target.events):
                event = target.events[before] + mark.event - source.events[before]
                marks.append(Mark(event, mark.name, target.step))
    return marks
