"""The tape of a real run: PyTorch's memory history as a file, and that file as the ``Tape`` which twin and ledger read.

The file is gzipped JSON::

    {"case": {...},                                  what was run
     "events": [[action, address, bytes, stream]],   in PyTorch's own words, bytes as requested, before rounding
     "notes": [[index, name, step, {label: [address]}, module, [[weight, bytes]]]],
                                                     what was said before that event (may be missing, as may the
                                                     last two of each)
     "stacks": ["inner < outer < ...", ...],         only with stacks: each distinct stack once
     "stack": [index, ...]}                          and, for each event, which stack it has (-1: none)

Actions are those of ``TraceEntry`` (c10/cuda/CUDACachingAllocator.h, torch 2.9-2.13): ``alloc``, ``free_requested``,
``free_completed``, ``segment_alloc``, ``segment_free``, ``segment_map``, ``segment_unmap``, ``oom``, ``snapshot``.
"""

from __future__ import annotations

import gzip
import json
import os
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from trainatomy.measurement.traces.stacks import shorten
from trainatomy.results.trace import AllocationTrace, Event, Mark, Origin

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

GROWS = frozenset({"segment_alloc", "segment_map", "oom"})
SHRINKS = frozenset({"segment_free", "segment_unmap"})
COUNTED = frozenset({"alloc", "free_requested"})
"""The events that the allocator's own counters count (``allocation.all.allocated`` and ``.freed``)."""

PHASES = {"loaded": "other", "forward": "forward", "forward end": "backward", "backward end": "other"} | {
    "recompute": "recompute",
    "recompute end": "backward",
    "optimizer": "optimizer",
    "optimizer end": "other",
    "zero_grad": "zero_grad",
    "zero_grad end": "other",
}
"""The phase that begins where the loop says so; before anything is said, the model is loaded."""


class Entry(NamedTuple):
    """One line of PyTorch's history: what happened, where (an address), how many bytes, on which stream."""

    action: str
    address: int
    bytes: int
    stream: int


class Note(NamedTuple):
    """What the loop said: ``at`` counts allocations and releases before it, in a file all events before it.

    ``addresses``: where tensors lie whose purpose was known then, by label (weight, gradient, optimizer_state, ...).
    With the names ``call`` and ``return``: ``module`` begins or ends its forward; of a ``call`` under autocast,
    ``copies`` are the weights that it may copy, each with the bytes of a copy.
    """

    at: int
    name: str
    step: int
    addresses: Mapping[str, Sequence[int]]
    module: str = ""
    copies: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True)
class AllocationHistory:
    """A real run's history: what was run, its events, what the loop said, and where each event came from (if known)."""

    case: Mapping[str, Any]
    events: Sequence[Entry]
    notes: Sequence[Note] = ()
    stacks: Sequence[str] = ()
    stack: Sequence[int] = ()

    def stack_of(self, index: int) -> str:
        """The stack of event ``index``, or nothing."""
        known = self.stack[index] if self.stack else -1
        return self.stacks[known] if known >= 0 else ""


def from_trace(
    case: Mapping[str, Any], trace: Iterable[Mapping[str, Any]], notes: Sequence[Note] = ()
) -> AllocationHistory:
    """The history from one device's list in ``torch.cuda.memory._snapshot()["device_traces"]``.

    ``notes`` in the order in which they were taken, each at the number of allocations and releases before it.
    """
    events: list[Entry] = []
    counted: list[int] = []
    known: dict[str, int] = {}
    stack: list[int] = []
    for entry in trace:
        if entry["action"] in COUNTED:
            counted.append(len(events))
        address = entry["addr"] if "addr" in entry else entry.get("device_free", 0)
        events.append(Entry(entry["action"], int(address), int(entry["size"]), int(entry["stream"])))
        text = shorten(entry.get("frames", ()))
        stack.append(known.setdefault(text, len(known)) if text else -1)
    counted.append(len(events))
    placed = [note._replace(at=counted[min(note.at, len(counted) - 1)]) for note in notes]
    return AllocationHistory(case, events, placed, list(known), stack if known else [])


def write(history: AllocationHistory, path: Path) -> None:
    """Write the history as gzipped JSON; the file is there whole, or as it was before."""
    content: dict[str, Any] = {"case": dict(history.case), "events": history.events, "notes": history.notes}
    if history.stacks:
        content |= {"stacks": list(history.stacks), "stack": list(history.stack)}
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with gzip.open(draft, "wt", encoding="utf-8") as file:
            json.dump(content, file, separators=(",", ":"))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def read(path: Path) -> AllocationHistory:
    """Read what ``write`` wrote."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        content = json.load(file)
    events = [Entry(*event) for event in content["events"]]
    notes = [Note(*note) for note in content.get("notes", ())]
    return AllocationHistory(content["case"], events, notes, content.get("stacks", ()), content.get("stack", ()))


def to_trace(history: AllocationHistory) -> AllocationTrace:
    """Number the allocations (an address that is used again is another one), and give them phase, module, step, label.

    A block is free for others at ``free_completed`` (with one stream the same moment as ``free_requested``).  Releases
    of what was allocated before the history began are left out.  Segments that are given back with no growth after them
    were given back by ``empty_cache``; before a growth, the allocator did it by itself, and a twin will do the same.
    """
    reader = _Reader(noted=bool(history.notes))
    notes = iter([*history.notes, Note(len(history.events) + 1, "", 0, {})])
    note = next(notes)
    for index, entry in enumerate(history.events):
        while note.at <= index:
            reader.take(note)
            note = next(notes)
        if entry.action == "alloc":
            reader.allocate(entry, history.stack_of(index))
        elif entry.action == "free_completed":
            reader.free(entry)
        elif entry.action in SHRINKS and _is_last_of_emptying(history.events, index):
            reader.trace.events.append(Event("empty_cache", -1, 0, entry.stream))
    while note.name:
        reader.take(note)
        note = next(notes)
    return reader.trace


class _Reader:
    """The tape so far, and where the run is: phase, step, the modules that are being called."""

    def __init__(self, *, noted: bool) -> None:
        self.trace = AllocationTrace()
        self._live: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._phase, self._step = ("load", -1) if noted else ("other", 0)
        self._called: list[Note] = []
        self._copied: set[int] = set()

    def allocate(self, entry: Entry, stack: str) -> None:
        number = len(self.trace.origins)
        self._live[entry.address] = number
        self._sizes[number] = entry.bytes
        module = self._called[-1].module if self._called else ""
        self.trace.events.append(Event("alloc", number, entry.bytes, entry.stream))
        self.trace.origins.append(Origin(stack, module, self._phase, self._step))
        if self._is_copy(entry.bytes):
            self.trace.labels[number] = "weight_copy"

    def free(self, entry: Entry) -> None:
        number = self._live.pop(entry.address, None)
        if number is not None:
            self.trace.events.append(Event("free", number, 0, entry.stream))

    def take(self, note: Note) -> None:
        """Go where the note says; write its mark and labels."""
        if note.name == "call":
            self._called.append(note)
            return
        if note.name == "return":
            self._called = self._called[:-1]
            return
        self._phase, self._step = PHASES.get(note.name, self._phase), note.step
        if note.name in ("forward", "recompute"):
            self._copied.clear()
        if note.name != "recompute":
            self._called.clear()  # a forward that raised returns from none of its modules
        self.trace.marks.append(Mark(len(self.trace.events), note.name, note.step))
        for label, addresses in note.addresses.items():
            self._label(label, addresses)

    def _is_copy(self, size: int) -> bool:
        """Whether an allocation of ``size`` is the copy that autocast makes of a weight of the module at work.

        Autocast copies a weight where it is first used and keeps the copy until its outermost context ends.  Among the
        allocations of a module the copies come first, because compilers evaluate the casts of an operator's arguments
        last argument first (``cached_cast`` in aten/src/ATen/autocast_mode.h, torch 2.9-2.13).
        """
        if not self._called:
            return False
        for weight, bytes_ in self._called[-1].copies:
            if bytes_ == size and weight not in self._copied:
                self._copied.add(weight)
                return True
        return False

    def _label(self, label: str, addresses: Sequence[int]) -> None:
        """The first label of an allocation holds; a tensor may lie inside of another's block."""
        missing = []
        for address in addresses:
            if address in self._live:
                self.trace.labels.setdefault(self._live[address], label)
            elif address:
                missing.append(address)
        if not missing:
            return
        starts = sorted(self._live)
        for address in missing:
            at = bisect_right(starts, address) - 1
            number = self._live[starts[at]] if at >= 0 else None
            if number is not None and address < starts[at] + self._sizes[number]:
                self.trace.labels.setdefault(number, label)


def _is_last_of_emptying(events: Sequence[Entry], index: int) -> bool:
    following = events[index + 1].action if index + 1 < len(events) else ""
    return following not in SHRINKS and following not in GROWS
