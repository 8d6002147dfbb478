"""Which module made what in passes of a training whose modules nobody followed: what the followed ones tell of them.

Modules are followed in the first steps only, because following costs time.  A pass, the forward and backward of one
micro-batch, does again what an earlier one did.  If it allocates the same sizes in the same order, it is the same.  A
batch that is shorter or longer makes other sizes, but the same allocations in the same order, released in the same
order; what does not depend on the batch, such as the copies that autocast makes of weights, has the same size.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainatomy.results.trace import Mark

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trainatomy.results.trace import AllocationTrace

RECOMPUTATION = ("recompute", "recompute end")
ENDS = ("backward end", "step", "forward", "step end")
"""Marks at which a pass is over; without one, the run broke off in it."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Forward and backward of one micro-batch: its allocations in order, with sizes and events.

    ``shape``: allocations (0) and, of its own ones, releases (the how manieth it was); ``is_whole``: it came to its
    end.
    """

    step: int
    allocations: tuple[int, ...]
    sizes: tuple[int, ...]
    events: tuple[int, ...]
    shape: tuple[int, ...]
    is_whole: bool


def echo(trace: AllocationTrace, followed: Sequence[int]) -> tuple[int, ...]:
    """Give every pass that repeats one of a ``followed`` step its origins, copies of weights, and recomputation.

    Returns the steps with a pass that is like none.
    """
    passes = passes_of(trace)
    models = [one for one in passes if one.step in followed and one.allocations]
    by_size = {one.sizes: one for one in models}
    by_shape: dict[tuple[int, ...], list[Pass]] = {}
    for one in models:
        by_shape.setdefault(one.shape, []).append(one)
    again = [mark for mark in trace.marks if mark.name in RECOMPUTATION]
    strangers: dict[int, None] = {}
    marks: list[Mark] = []
    for one in passes:
        if one.step in followed or not one.allocations:
            continue
        if one.is_whole:
            model = by_size.get(one.sizes) or _like(trace, one, by_shape.get(one.shape, ()))
        else:
            model = _like(trace, one, [other for other in models if other.shape[: len(one.shape)] == one.shape])
        if model is None:
            strangers[one.step] = None
        else:
            marks += _repeat(trace, again, model, one)
    trace.marks += marks
    trace.marks.sort(key=lambda mark: mark.event)
    return tuple(strangers)


def passes_of(trace: AllocationTrace) -> list[Pass]:
    """The passes, in order."""
    found: list[Pass] = []
    begin: Mark | None = None
    for mark in trace.marks:
        if begin is not None and mark.name in ENDS:
            found.append(_pass(trace, begin, mark.event, is_whole=True))
            begin = None
        if mark.name == "forward":
            begin = mark
    if begin is not None:
        found.append(_pass(trace, begin, len(trace.events), is_whole=False))
    return found


def _pass(trace: AllocationTrace, begin: Mark, end: int, *, is_whole: bool) -> Pass:
    places: dict[int, int] = {}
    sizes, events, shape = [], [], []
    for index in range(begin.event, end):
        event = trace.events[index]
        if event.action == "alloc":
            places[event.allocation] = len(places) + 1
            sizes.append(event.bytes)
            events.append(index)
            shape.append(0)
        elif event.allocation in places:
            shape.append(places[event.allocation])
    return Pass(begin.step, tuple(places), tuple(sizes), tuple(events), tuple(shape), is_whole)


def _like(trace: AllocationTrace, one: Pass, models: Iterable[Pass]) -> Pass | None:
    """The first of ``models``, which have the shape of ``one``, whose copies of weights are as large as there."""
    for model in models:
        pairs = zip(model.allocations, model.sizes, one.sizes, strict=False)
        if all(own == size for number, size, own in pairs if trace.labels.get(number) == "weight_copy"):
            return model
    return None


def _repeat(trace: AllocationTrace, again: Sequence[Mark], model: Pass, one: Pass) -> list[Mark]:
    """Write into ``one`` what is known of ``model``; its marks of recomputation, as ``again`` has them."""
    for original, copy in zip(model.allocations, one.allocations, strict=False):
        trace.origins[copy] = trace.origins[original]._replace(step=one.step)
        if trace.labels.get(original) == "weight_copy":
            trace.labels.setdefault(copy, "weight_copy")
    marks = []
    first, last = model.events[0], model.events[-1]
    for mark in again:
        if first < mark.event <= last + 1:
            before = bisect_left(model.events, mark.event) - 1
            if before < len(one.events):
                marks.append(Mark(one.events[before] + mark.event - model.events[before], mark.name, one.step))
    return marks
