"""Convert the allocation history of a real run to an ``AllocationTrace``, the form that simulated runs have too."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from trainatomy.measurement.traces.history import BUCKETS, COMMUNICATION, HistoryEvent, Note
from trainatomy.results.trace import AllocationTrace, Event, Mark, Origin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainatomy.measurement.traces.history import AllocationHistory

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
