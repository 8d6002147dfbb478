"""Convert the allocation history of a real run to an ``AllocationTrace``, the form that simulated runs have too.

Attribute allocations to modules in steps whose module calls were not recorded, by matching recorded steps.

Module calls are recorded in the first steps only, because recording them costs time.  A pass (the forward and backward
of one micro-batch) repeats an earlier one.  If it allocates the same sizes in the same order, it is the same pass.  A
shorter or longer batch makes other sizes, but the same allocations in the same order, released in the same order; what
does not depend on the batch, such as autocast's copies of weights, keeps its size.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainatomy.measurement.traces.history import (
    AROUND_OUTPUT_LAYER,
    BUCKETS,
    COMMUNICATION,
    OUTPUT_LAYER,
    AllocationHistory,
    HistoryEvent,
    Note,
)
from trainatomy.results.trace import AllocationTrace, Event, Mark, Origin

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


_GROWING_ACTIONS = frozenset({"segment_alloc", "segment_map", "oom"})
_SHRINKING_ACTIONS = frozenset({"segment_free", "segment_unmap"})

PHASES = {"loaded": "other", "forward": "forward", "forward end": "backward", "backward end": "other"} | {
    "recompute": "recompute",
    "recompute end": "backward",
    "optimizer": "optimizer",
    "optimizer end": "other",
    "zero_grad": "zero_grad",
    "zero_grad end": "other",
    "evaluation": "evaluation",
    "evaluation end": "other",
    "saving": "saving",
    "saving end": "other",
    "restoring": "restoring",
    "restoring end": "other",
    "generation": "prefill",
    "token": "decode",
    "generation end": "other",
}
"""The phase that begins with a note of that name; before the first note, the model is loaded."""


def to_trace(history: AllocationHistory) -> AllocationTrace:
    """Number the allocations and give each its phase, module, step and label.

    A block is available again at ``free_completed`` (with one stream, the same moment as ``free_requested``), and its
    address may then belong to another allocation.  Releases of blocks that were allocated before the history began are
    left out.  Segments that are released with no growth after them were released by ``empty_cache``; before a growth
    the allocator released them itself, and the simulated allocator will do the same.
    """
    builder = _TraceBuilder(has_notes=bool(history.notes))
    notes = iter([*history.notes, Note(len(history.events) + 1, "", 0, {})])
    note = next(notes)
    for index, event in enumerate(history.events):
        while note.at <= index:
            builder.apply(note)
            note = next(notes)
        if event.action == "alloc":
            builder.allocate(event, history.stack_of(index))
        elif event.action == "free_completed":
            builder.free(event)
        elif event.action in _SHRINKING_ACTIONS and _ends_empty_cache(history.events, index):
            builder.trace.events.append(Event("empty_cache", -1, 0, event.stream))
    while note.name:
        builder.apply(note)
        note = next(notes)
    return builder.finished()


class _TraceBuilder:
    """The trace so far, and the state of the run: phase, step, and the modules being called."""

    def __init__(self, *, has_notes: bool) -> None:
        self.trace = AllocationTrace()
        self._live: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._phase, self._step = ("load", -1) if has_notes else ("other", 0)
        self._calls: list[Note] = []
        self._copied: set[int] = set()
        self._at_end: dict[int, str] = {}
        self._are_buckets = False

    def finished(self) -> AllocationTrace:
        """Return the trace with the labels of communication, which only allocations without another label get."""
        for number, label in self._at_end.items():
            self.trace.labels.setdefault(number, label)
        return self.trace

    def allocate(self, event: HistoryEvent, stack: str) -> None:
        number = len(self.trace.origins)
        self._live[event.address] = number
        self._sizes[number] = event.bytes
        module = self._calls[-1].module if self._calls else ""
        self.trace.events.append(Event("alloc", number, event.bytes, event.stream))
        self.trace.origins.append(Origin(stack, module, self._phase, self._step))
        if self._is_weight_copy(event.bytes):
            self.trace.labels[number] = "weight_copy"
        if self._are_buckets:
            self._at_end[number] = "communication_buffer"

    def free(self, event: HistoryEvent) -> None:
        number = self._live.pop(event.address, None)
        if number is not None:
            self.trace.events.append(Event("free", number, 0, event.stream))

    def apply(self, note: Note) -> None:
        """Update phase, step and module stack, and write the note's mark and labels."""
        if note.name == "call":
            self._calls.append(note)
            return
        if note.name == "return":
            self._calls = self._calls[:-1]
            return
        if note.name in (OUTPUT_LAYER, AROUND_OUTPUT_LAYER):
            layers = self.trace.output_layers if note.name == OUTPUT_LAYER else self.trace.around_output_layers
            layers.add(note.module)
            return
        if note.name in (COMMUNICATION, BUCKETS, f"{BUCKETS} end"):
            self._are_buckets = self._are_buckets if note.name == COMMUNICATION else note.name == BUCKETS
            for label, addresses in note.addresses.items():
                self._label(label, addresses, self._at_end)
            return
        self._phase, self._step = PHASES.get(note.name, self._phase), note.step
        if note.name in ("forward", "recompute", "evaluation forward", "generation", "token"):
            self._copied.clear()
        if note.name != "recompute":
            self._calls.clear()  # a forward that raised returns from none of its modules
        self.trace.marks.append(Mark(len(self.trace.events), note.name, note.step))
        for label, addresses in note.addresses.items():
            self._label(label, addresses, self.trace.labels)

    def _is_weight_copy(self, size: int) -> bool:
        """Return whether an allocation of ``size`` is autocast's copy of a weight of the current module.

        Autocast copies a weight where it is first used and keeps the copy until its outermost context ends.  Among the
        allocations of a module the copies come first, because compilers evaluate the casts of an operator's arguments
        last argument first (``cached_cast`` in aten/src/ATen/autocast_mode.h, torch 2.9-2.13).
        """
        if not self._calls:
            return False
        for weight, bytes_ in self._calls[-1].copies:
            if bytes_ == size and weight not in self._copied:
                self._copied.add(weight)
                return True
        return False

    def _label(self, label: str, addresses: Sequence[int], labels: dict[int, str]) -> None:
        """Label the allocations at ``addresses``; a tensor may lie inside another block; first labels stay."""
        missing = []
        for address in addresses:
            if address in self._live:
                labels.setdefault(self._live[address], label)
            elif address:
                missing.append(address)
        if not missing:
            return
        starts = sorted(self._live)
        for address in missing:
            at = bisect_right(starts, address) - 1
            number = self._live[starts[at]] if at >= 0 else None
            if number is not None and address < starts[at] + self._sizes[number]:
                labels.setdefault(number, label)


def _ends_empty_cache(events: Sequence[HistoryEvent], index: int) -> bool:
    next_action = events[index + 1].action if index + 1 < len(events) else ""
    return next_action not in _SHRINKING_ACTIONS and next_action not in _GROWING_ACTIONS
