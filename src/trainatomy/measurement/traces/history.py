"""PyTorch's allocation history of a run on a real GPU, and the file format that keeps it.

The file is gzipped JSON::

    {"case": {...},                                  the run: workload, versions, GPU
     "events": [[action, address, bytes, stream]],   as PyTorch reports them; bytes as requested, before rounding
     "notes": [[index, name, step, {label: [address]}, module, [[weight, bytes]]]],
                                                     progress of the loop before the event of that index (the key and
                                                     the last two items of a note may be missing)
     "stacks": ["inner < outer < ...", ...],         only with stacks: the distinct stacks
     "stack": [index, ...]}                          for each event, the index of its stack (-1: none)

Actions are those of ``TraceEntry`` (c10/cuda/CUDACachingAllocator.h, torch 2.9-2.13): ``alloc``, ``free_requested``,
``free_completed``, ``segment_alloc``, ``segment_free``, ``segment_map``, ``segment_unmap``, ``oom``, ``snapshot``.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

COUNTED_ACTIONS = frozenset({"alloc", "free_requested"})
"""Actions that the allocator's own counters count (``allocation.all.allocated`` and ``.freed``)."""

COMMUNICATION, BUCKETS = "communication", "buckets"
"""Names of notes on collectives and gathered weights, and on the begin of buckets being allocated (``buckets end``)."""
OUTPUT_LAYER, AROUND_OUTPUT_LAYER = "output layer", "around output layer"
"""Names of notes on a module that makes logits, and on those that it lies in."""

MAX_FRAMES = 8
MAX_NAME_LENGTH = 110

_SKIPPED_FILES = ("torch/nn/modules/module.py", "torch/utils/_contextlib.py", "torch/_ops.py", "torch/_compile.py")
"""Python files whose frames only forward a call."""

_SKIPPED_NAMES = (
    "c10::cuda::",
    "c10::StorageImpl",
    "c10::Dispatcher",
    "c10::impl::",
    "c10::detail::",
    "c10::intrusive_ptr",
    "at::_ops::",
    "at::detail::",
    "at::empty",
    "at::native::empty",
    "at::(anonymous namespace)::wrapper_",
    "torch::unwind",
    "torch::CapturedTraceback",
    "torch::cuda::gather",
    "void c10::",
    "std::",
    "_Py",
    "Py",
    "_start",
    "__libc",
    "??",
)
"""Prefixes of C++ names that every allocation has in its stack: the allocator, the dispatcher, the interpreter."""


class HistoryEvent(NamedTuple):
    """An event of PyTorch's allocation history."""

    action: str
    address: int
    bytes: int
    stream: int


class Note(NamedTuple):
    """Progress that the training loop reported between two events.

    Attributes:
        at: While recording, the number of allocations and releases before the note; in a history, the index of the
            event that follows it.
        name: ``loaded``, ``step``, ``forward``, ``call``, ``return``, ...
        step: Optimizer step, from 0; -1 before the first.
        addresses: Addresses of the tensors whose purpose was known then, by label (weight, gradient,
            optimizer_state, ...).
        module: For ``call`` and ``return``, the module whose forward begins or ends.
        copies: For a ``call`` under autocast, the weights that it may copy to 16 bits: (id, bytes of the copy).
    """

    at: int
    name: str
    step: int
    addresses: Mapping[str, Sequence[int]]
    module: str = ""
    copies: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True)
class AllocationHistory:
    """The allocation history of a real run: its events, the loop's progress, and optionally a stack per event."""

    case: Mapping[str, Any]
    events: Sequence[HistoryEvent]
    notes: Sequence[Note] = ()
    stacks: Sequence[str] = ()
    stack: Sequence[int] = ()

    def stack_of(self, index: int) -> str:
        """Return the stack of event ``index``, or an empty string."""
        known = self.stack[index] if self.stack else -1
        return self.stacks[known] if known >= 0 else ""


def from_snapshot(
    case: Mapping[str, Any], entries: Iterable[Mapping[str, Any]], notes: Sequence[Note] = ()
) -> AllocationHistory:
    """Build a history from one device's list in ``torch.cuda.memory._snapshot()["device_traces"]``.

    Args:
        case: Description of the run.
        entries: The device's trace entries.
        notes: Notes in the order in which they were taken; ``at`` counts allocations and releases.
    """
    events: list[HistoryEvent] = []
    counted: list[int] = []
    known: dict[str, int] = {}
    stack: list[int] = []
    for entry in entries:
        if entry["action"] in COUNTED_ACTIONS:
            counted.append(len(events))
        address = entry["addr"] if "addr" in entry else entry.get("device_free", 0)
        events.append(HistoryEvent(entry["action"], int(address), int(entry["size"]), int(entry["stream"])))
        text = shorten_stack(entry.get("frames", ()))
        stack.append(known.setdefault(text, len(known)) if text else -1)
    counted.append(len(events))
    placed = [note._replace(at=counted[min(note.at, len(counted) - 1)]) for note in notes]
    return AllocationHistory(case, events, placed, list(known), stack if known else [])


def write(history: AllocationHistory, path: Path) -> None:
    """Write ``history`` as gzipped JSON, atomically: on failure an existing file stays as it was."""
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
    """Read a history that ``write`` wrote."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        content = json.load(file)
    events = [HistoryEvent(*event) for event in content["events"]]
    notes = [Note(*note) for note in content.get("notes", ())]
    return AllocationHistory(content["case"], events, notes, content.get("stacks", ()), content.get("stack", ()))


def shorten_stack(frames: Iterable[Mapping[str, Any]]) -> str:
    """Return the innermost informative frames as ``inner < outer < ...``, at most ``MAX_FRAMES`` of them.

    Python frames read ``folder/file.py:line function``; C++ frames are their name alone.
    """
    described = (_describe(str(frame["filename"]), int(frame["line"]), str(frame["name"])) for frame in frames)
    kept: list[str] = []
    for text in described:
        if text and (not kept or kept[-1] != text):
            kept.append(text)
        if len(kept) == MAX_FRAMES:
            break
    return " < ".join(kept)


def _describe(filename: str, line: int, name: str) -> str:
    if filename.endswith(".py"):
        if filename.endswith(_SKIPPED_FILES):
            return ""
        return f"{'/'.join(filename.split('/')[-2:])}:{line} {name}"
    return "" if name.startswith(_SKIPPED_NAMES) else name[:MAX_NAME_LENGTH]
