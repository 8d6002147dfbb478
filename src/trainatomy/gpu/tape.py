"""The tape of a real run: PyTorch's memory history as a file, and that file as the ``Tape`` which twin and ledger read.

The file is gzipped JSON::

    {"case": {...},                                  what was run
     "events": [[action, address, bytes, stream]],   in PyTorch's own words, bytes as requested, before rounding
     "notes": [[index, name, step, {label: [address]}]],  what the loop said before that event (may be missing)
     "stacks": ["inner < outer < ...", ...],         only with stacks: each distinct stack once
     "stack": [index, ...]}                          and, for each event, which stack it has (-1: none)

Actions are those of ``TraceEntry`` (c10/cuda/CUDACachingAllocator.h, torch 2.9-2.13): ``alloc``, ``free_requested``,
``free_completed``, ``segment_alloc``, ``segment_free``, ``segment_map``, ``segment_unmap``, ``oom``, ``snapshot``.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from trainatomy.gpu.stacks import shorten
from trainatomy.results.tape import Event, Mark, Origin, Tape

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

GROWS = frozenset({"segment_alloc", "segment_map", "oom"})
SHRINKS = frozenset({"segment_free", "segment_unmap"})
COUNTED = frozenset({"alloc", "free_requested"})
"""The events that the allocator's own counters count (``allocation.all.allocated`` and ``.freed``)."""

PHASES = {"loaded": "other", "forward": "forward", "forward end": "backward", "backward end": "other"} | {
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
    """

    at: int
    name: str
    step: int
    addresses: Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class History:
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


def from_trace(case: Mapping[str, Any], trace: Iterable[Mapping[str, Any]], notes: Sequence[Note] = ()) -> History:
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
    return History(case, events, placed, list(known), stack if known else [])


def write(history: History, path: Path) -> None:
    """Write the history as gzipped JSON."""
    content: dict[str, Any] = {"case": dict(history.case), "events": history.events, "notes": history.notes}
    if history.stacks:
        content |= {"stacks": list(history.stacks), "stack": list(history.stack)}
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(content, file, separators=(",", ":"))


def read(path: Path) -> History:
    """Read what ``write`` wrote."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        content = json.load(file)
    events = [Entry(*event) for event in content["events"]]
    notes = [Note(*note) for note in content.get("notes", ())]
    return History(content["case"], events, notes, content.get("stacks", ()), content.get("stack", ()))


def to_tape(history: History) -> Tape:
    """Number the allocations (an address that is used again is another one), and give them phase, step and label.

    A block is free for others at ``free_completed`` (with one stream the same moment as ``free_requested``).  Releases
    of what was allocated before the history began are left out.  Segments that are given back with no growth after them
    were given back by ``empty_cache``; before a growth, the allocator did it by itself, and a twin will do the same.
    """
    tape = Tape()
    live: dict[int, int] = {}
    phase, step = ("load", -1) if history.notes else ("other", 0)
    notes = iter([*history.notes, Note(len(history.events) + 1, "", 0, {})])
    note = next(notes)
    for index, entry in enumerate(history.events):
        while note.at <= index:
            phase, step = PHASES.get(note.name, phase), note.step
            _take(note, tape, live)
            note = next(notes)
        if entry.action == "alloc":
            live[entry.address] = len(tape.origins)
            tape.events.append(Event("alloc", len(tape.origins), entry.bytes, entry.stream))
            tape.origins.append(Origin(history.stack_of(index), "", phase, step))
        elif entry.action == "free_completed" and entry.address in live:
            tape.events.append(Event("free", live.pop(entry.address), 0, entry.stream))
        elif entry.action in SHRINKS and _is_last_of_emptying(history.events, index):
            tape.events.append(Event("empty_cache", -1, 0, entry.stream))
    while note.name:
        _take(note, tape, live)
        note = next(notes)
    return tape


def _take(note: Note, tape: Tape, live: Mapping[int, int]) -> None:
    """Write a note's mark and labels; a tensor that lies inside another's block has no label of its own."""
    tape.marks.append(Mark(len(tape.events), note.name, note.step))
    for label, addresses in note.addresses.items():
        tape.labels |= {live[address]: label for address in addresses if address in live}


def _is_last_of_emptying(events: Sequence[Entry], index: int) -> bool:
    following = events[index + 1].action if index + 1 < len(events) else ""
    return following not in SHRINKS and following not in GROWS
