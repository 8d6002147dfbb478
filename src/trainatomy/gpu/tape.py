"""The tape of a real run: PyTorch's memory history as a file, and that file as the ``Tape`` which twin and ledger read.

The file is gzipped JSON::

    {"case": {...},                                  what was run
     "events": [[action, address, bytes, stream]],   in PyTorch's own words, bytes as requested, before rounding
     "steps": [index, ...],                          the first event of each optimizer step (may be missing)
     "stacks": ["inner < outer < ...", ...],         only with stacks: each distinct stack once
     "stack": [index, ...]}                          and, for each event, which stack it has (-1: none)

Actions are those of ``TraceEntry`` (c10/cuda/CUDACachingAllocator.h, torch 2.9-2.13): ``alloc``, ``free_requested``,
``free_completed``, ``segment_alloc``, ``segment_free``, ``segment_map``, ``segment_unmap``, ``oom``, ``snapshot``.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from trainatomy.gpu.stacks import shorten
from trainatomy.results.tape import Event, Origin, Tape

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

GROWS = frozenset({"segment_alloc", "segment_map", "oom"})
SHRINKS = frozenset({"segment_free", "segment_unmap"})


class Entry(NamedTuple):
    """One line of PyTorch's history: what happened, where (an address), how many bytes, on which stream."""

    action: str
    address: int
    bytes: int
    stream: int


@dataclass(frozen=True, slots=True)
class History:
    """A real run's history: what was run, its events, where steps begin, and where each event came from (if known)."""

    case: Mapping[str, Any]
    events: Sequence[Entry]
    steps: Sequence[int] = ()
    stacks: Sequence[str] = ()
    stack: Sequence[int] = ()

    def origin(self, index: int) -> Origin:
        """Where event ``index`` came from: stack as operation; step, -1 before the first, 0 where none is marked."""
        known = self.stack[index] if self.stack else -1
        step = bisect_right(self.steps, index) - 1 if self.steps else 0
        return Origin(operation=self.stacks[known] if known >= 0 else "", module="", phase="other", step=step)


def from_trace(
    case: Mapping[str, Any], trace: Iterable[Mapping[str, Any]], step_times_us: Sequence[int] = ()
) -> History:
    """The history from one device's list in ``torch.cuda.memory._snapshot()["device_traces"]``.

    ``step_times_us``: when each step began, microseconds since 1970, the clock of the history's own ``time_us``.
    """
    events: list[Entry] = []
    times: list[int] = []
    known: dict[str, int] = {}
    stack: list[int] = []
    for entry in trace:
        address = entry["addr"] if "addr" in entry else entry.get("device_free", 0)
        events.append(Entry(entry["action"], int(address), int(entry["size"]), int(entry["stream"])))
        times.append(int(entry.get("time_us", 0)))
        text = shorten(entry.get("frames", ()))
        stack.append(known.setdefault(text, len(known)) if text else -1)
    steps = [next((index for index, time in enumerate(times) if time >= begin), len(times)) for begin in step_times_us]
    return History(case, events, steps, list(known), stack if known else [])


def write(history: History, path: Path) -> None:
    """Write the history as gzipped JSON."""
    content: dict[str, Any] = {"case": dict(history.case), "events": history.events, "steps": list(history.steps)}
    if history.stacks:
        content |= {"stacks": list(history.stacks), "stack": list(history.stack)}
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(content, file, separators=(",", ":"))


def read(path: Path) -> History:
    """Read what ``write`` wrote."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        content = json.load(file)
    events = [Entry(*event) for event in content["events"]]
    return History(
        content["case"], events, content.get("steps", ()), content.get("stacks", ()), content.get("stack", ())
    )


def to_tape(history: History) -> Tape:
    """Number the allocations: an address that is used again is another allocation.

    A block is free for others at ``free_completed`` (with one stream the same moment as ``free_requested``).  Releases
    of what was allocated before the history began are left out.  Segments that are given back with no growth after them
    were given back by ``empty_cache``; before a growth, the allocator did it by itself, and a twin will do the same.
    """
    tape = Tape()
    live: dict[int, int] = {}
    for index, entry in enumerate(history.events):
        if entry.action == "alloc":
            live[entry.address] = len(tape.origins)
            tape.events.append(Event("alloc", len(tape.origins), entry.bytes, entry.stream))
            tape.origins.append(history.origin(index))
        elif entry.action == "free_completed" and entry.address in live:
            tape.events.append(Event("free", live.pop(entry.address), 0, entry.stream))
        elif entry.action in SHRINKS and _is_last_of_emptying(history.events, index):
            tape.events.append(Event("empty_cache", -1, 0, entry.stream))
    return tape


def _is_last_of_emptying(events: Sequence[Entry], index: int) -> bool:
    following = events[index + 1].action if index + 1 < len(events) else ""
    return following not in SHRINKS and following not in GROWS
