"""The bill of a real run: its tape, read by the ledger that reads simulated ones, under the totals that were measured.

What PyTorch's counters and the driver say decides.  Where the replay of the tape says something else, the difference
stands in the bill as what it is, and in a note.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainatomy.analysis.memory import (
    activations_by_module,
    analyze_replay,
    breakdown_lines,
    bytes_by_component,
    held_after,
)
from trainatomy.measurement.traces.labels import label_the_rest
from trainatomy.measurement.traces.layout import at_their_request, follow
from trainatomy.measurement.traces.trace import AllocationHistory, to_trace
from trainatomy.results.measurement import Measurement
from trainatomy.results.memory import Components, Instant, Line, Memory, ModuleActivations, OutOfMemoryPoint
from trainatomy.units import exact_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainatomy.allocator.settings import AllocatorSettings
    from trainatomy.catalog.workspaces import Workspaces
    from trainatomy.measurement.traces.layout import Segments

UNEXPLAINED = "not explained by the recorded allocations"
NO_MODULES = "step {step}, that of {what}, is like none whose modules were followed: no modules"


@dataclass(frozen=True, slots=True)
class Failure:
    """Out of memory, as its exception tells: where, bytes asked for (rounded as the message rounds), allocated, and
    reserved."""

    instant: Instant
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int

    def point(self) -> OutOfMemoryPoint:
        """As a result."""
        return OutOfMemoryPoint(self.instant, self.requested_bytes, self.allocated_bytes, self.reserved_bytes)


@dataclass(frozen=True, slots=True)
class Counted:
    """What was read while the run happened, bytes: PyTorch's counters, the driver's figure (``None``: it does not
    say), the model once loaded, and how often the allocator gave its cache back."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_bytes: int | None
    model_bytes: int | None
    num_alloc_retries: int


def counted(measurement: Measurement) -> Counted:
    """The totals that a measurement read."""
    return Counted(
        measurement.peak_allocated_bytes,
        measurement.peak_reserved_bytes,
        measurement.device_bytes,
        measurement.model_bytes,
        measurement.num_alloc_retries,
    )


@dataclass(frozen=True, slots=True)
class RealBill:
    """The measured bill, at the peak or at the failure."""

    memory: Memory
    modules: tuple[ModuleActivations, ...]
    out_of_memory: OutOfMemoryPoint | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where it ran: the allocator's settings, sizes of library workspaces there."""

    settings: AllocatorSettings
    workspaces: Workspaces


def real_bill(
    history: AllocationHistory,
    place: Place,
    totals: Counted,
    followed: Sequence[int],
    failure: Failure | None = None,
    begin: Segments = (),
) -> RealBill:
    """Settle a recorded run; ``followed``: the steps in which modules were followed.

    Of one that ended in ``failure`` the bill is that of what was held then.  ``begin``: the segments that were there at
    the beginning of the history, whose first events then are the blocks in them (see ``layout.follow``).
    """
    if failure is not None:
        return _bill_of_failure(history, place, totals, followed, failure, begin)
    trace = to_trace(at_their_request(history))
    strangers = label_the_rest(trace, place.workspaces, followed)
    settled = analyze_replay(trace, follow(history, trace, place.settings, begin), _context(totals))
    memory, notes = reconciled(settled.memory, totals)
    if memory.peak.step not in strangers and followed:
        return RealBill(memory, settled.modules, None, notes)
    unknown = NO_MODULES.format(step=memory.peak.step + 1, what="the peak")
    return RealBill(memory, (), None, (*notes, unknown))


def _bill_of_failure(
    history: AllocationHistory,
    place: Place,
    totals: Counted,
    followed: Sequence[int],
    failure: Failure,
    begin: Segments,
) -> RealBill:
    """What was held when the last request was refused, and what that request was."""
    refusals = [index for index, event in enumerate(history.events) if event.action == "oom"]
    noted = next((note.at for note in history.notes if note.name == "failed"), len(history.events))
    end = refusals[-1] if refusals else noted
    notes = [note._replace(at=min(note.at, end)) for note in history.notes if note.at <= end or note.name == "failed"]
    until = replace(history, events=history.events[:end], notes=notes)
    trace = to_trace(at_their_request(until))
    strangers = label_the_rest(trace, place.workspaces, followed)
    settled = analyze_replay(trace, follow(until, trace, place.settings, begin), _context(totals))
    held = held_after(trace, len(trace.events))
    parts = bytes_by_component(held, settled.purposes, settled.sizes)
    allocated = sum(parts.values())
    reserved = max(failure.reserved_bytes, allocated)
    memory = replace(
        settled.memory,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        device_bytes=reserved + _context(totals),
        components=Components.from_dict({**parts, "cache": reserved - allocated, "context": _context(totals)}),
        lines=breakdown_lines(held, settled.purposes, settled.sizes),
        peak=failure.instant,
        num_alloc_retries=totals.num_alloc_retries,
    )
    asked = history.events[end].bytes if refusals else failure.requested_bytes
    point = OutOfMemoryPoint(failure.instant, asked, allocated, reserved)
    if failure.instant.step in strangers:
        return RealBill(memory, (), point, (NO_MODULES.format(step=failure.instant.step + 1, what="the failure"),))
    return RealBill(memory, activations_by_module(trace, held, settled.purposes, settled.sizes), point, ())


def reconciled(memory: Memory, totals: Counted) -> tuple[Memory, tuple[str, ...]]:
    """``memory`` under the totals that were counted, and a note for each total that it had otherwise."""
    notes = []
    allocated, reserved = totals.peak_allocated_bytes, totals.peak_reserved_bytes
    parts, bill = memory.components, memory.lines
    if missing := allocated - memory.peak_allocated_bytes:
        parts = replace(parts, functionality=parts.functionality + missing)
        bill = (*bill, Line("functionality", UNEXPLAINED, missing, 0))
        notes.append(_differs("allocated", memory.peak_allocated_bytes, allocated, "a line of functionality"))
    if memory.peak_reserved_bytes != reserved:
        notes.append(_differs("reserved", memory.peak_reserved_bytes, reserved, "the cache"))
    if totals.device_bytes is None:
        notes.append("the driver does not say what the process holds, so the context is not in the bill")
    return replace(
        memory,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        device_bytes=reserved + _context(totals),
        model_bytes=memory.model_bytes if totals.model_bytes is None else totals.model_bytes,
        components=replace(parts, cache=reserved - allocated, context=_context(totals)),
        lines=bill,
        num_alloc_retries=totals.num_alloc_retries,
    ), tuple(notes)


def _differs(what: str, replayed: int, counted: int, where: str) -> str:
    return (
        f"peak {what}: PyTorch counted {exact_bytes(counted)} bytes, the replay of the recorded allocations gives "
        f"{exact_bytes(replayed)}; the difference is in {where}"
    )


def _context(totals: Counted) -> int:
    return 0 if totals.device_bytes is None else max(totals.device_bytes - totals.peak_reserved_bytes, 0)
