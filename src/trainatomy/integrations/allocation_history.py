"""PyTorch's memory history of a loop that runs as long as it likes, in windows of bounded size.

A tape begins with what is allocated already: PyTorch tells no history of that, but its snapshot lists the blocks.
After ``WINDOW_EVENTS`` events a new window begins with a new list, and the old one is kept only if the peak rose in it.
So the tape that is left holds the peak, whenever that was, and host memory stays bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from trainatomy.integrations.notes import Counted
from trainatomy.measurement.traces.trace import COUNTED, AllocationHistory, Entry, Note, from_trace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WINDOW_EVENTS = 300_000
"""Allocations and releases in a window: some hundred steps of a BERT-large, and below 200 MB of host memory."""
RING_EVENTS = 4 * WINDOW_EVENTS
"""What PyTorch may keep at most: more than a window, whose end waits for that of a step, and events besides."""
BEFORE = "allocated before the watch"
"""The line of the bill for blocks whose purpose nobody knows, because they were there already."""


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of the run: the segments at its beginning, and what happened since.

    ``names``: where blocks lay then whose purpose was known, by label; ``is_whole``: it is all that was watched.
    """

    segments: Sequence[Mapping[str, Any]]
    names: Mapping[str, Sequence[int]]
    begins_at: int
    is_whole: bool
    trace: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[Note] = ()
    followed: Sequence[int] = ()
    complete: bool = True

    def history(self) -> AllocationHistory:
        """The window as the history of a run whose first events allocate what was there already, each block whole."""
        blocks = allocated_blocks(self.segments)
        first = len(blocks)
        shifted = [note._replace(at=max(0, note.at - self.begins_at)) for note in self.notes]
        told = from_trace({}, self.trace, shifted)
        loaded = Note(first, "loaded", -1, self.names)
        notes = [loaded, *(note._replace(at=note.at + first) for note in told.notes)]
        return AllocationHistory({}, [*blocks, *told.events], notes)


class Recording:
    """Has PyTorch write its history, unless the user does so already: theirs is read and left alone."""

    def __init__(self, device: int) -> None:
        self._device = device
        self.is_borrowed = bool(torch._C._cuda_isHistoryEnabled())
        self._window: Window | None = None
        self._kept: Window | None = None
        self._kept_peak = 0

    def start(self, now: Counted, names: Mapping[str, Sequence[int]]) -> None:
        """Begin a window here.  ``names``: where tensors lie whose purpose is known, by label."""
        if not self.is_borrowed:
            torch.cuda.memory._record_memory_history(
                enabled="all", context=None, stacks="python", max_entries=RING_EVENTS, clear_history=True
            )
        segments = [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == self._device]
        is_first = self._window is None
        if is_first:
            known = {address for found in names.values() for address in found}
            strangers = [block.address for block in allocated_blocks(segments) if block.address not in known]
            names = {**names, BEFORE: strangers}
        self._window = Window(segments, names, now.events, is_first)

    def is_full(self, now: Counted) -> bool:
        """Whether it is time for a new window."""
        return not self.is_borrowed and now.events - self._begin.begins_at >= WINDOW_EVENTS

    def keep(self, now: Counted, notes: Sequence[Note], followed: Sequence[int]) -> None:
        """Keep the window up to here if the peak rose in it."""
        if now.peak_bytes > self._kept_peak or self._kept is None:
            self._kept, self._kept_peak = replace(self.window(now, notes, followed), is_whole=False), now.peak_bytes

    def window(self, now: Counted, notes: Sequence[Note], followed: Sequence[int], *, latest: bool = False) -> Window:
        """The window that holds the peak so far, or the ``latest``; ``followed``: the steps in ``notes`` whose modules
        are noted."""
        begin = self._begin
        if self._kept is not None and now.peak_bytes <= self._kept_peak and not latest:
            return self._kept
        trace, complete = last_events(self._trace(), now.events - begin.begins_at)
        return replace(begin, trace=trace, notes=list(notes), followed=list(followed), complete=complete)

    def refused_since(self, now: Counted, at: int) -> bool:
        """Whether the allocator refused a request after the first ``at`` allocations and releases."""
        trace, _ = last_events(self._trace(), now.events - at)
        return any(entry["action"] == "oom" for entry in trace)

    def stop(self) -> None:
        """Let PyTorch forget it, unless the history is the user's."""
        if not self.is_borrowed:
            torch.cuda.memory._record_memory_history(enabled=None, clear_history=True)

    @property
    def _begin(self) -> Window:
        assert self._window is not None
        return self._window

    def _trace(self) -> Sequence[Mapping[str, Any]]:
        traces: list[list[dict[str, Any]]] = torch.cuda.memory._snapshot()["device_traces"]
        return traces[self._device] if self._device < len(traces) else []


def allocated_blocks(segments: Sequence[Mapping[str, Any]]) -> list[Entry]:
    """The allocated blocks of a snapshot as allocations: address and bytes of the whole block."""
    blocks: list[Entry] = []
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                blocks.append(Entry("alloc", address, block["size"], segment["stream"]))
            address += block["size"]
    return blocks


def last_events(trace: Sequence[Mapping[str, Any]], count: int) -> tuple[Sequence[Mapping[str, Any]], bool]:
    """The end of ``trace`` with ``count`` allocations and releases in it, and whether there are as many.

    It begins right after the last one before them: a segment that was reserved for the first belongs to it.  What
    ended there that had begun before does no harm, because whoever follows knows that it is over.
    """
    for index in range(len(trace) - 1, -1, -1):
        if trace[index]["action"] in COUNTED:
            if count == 0:
                return trace[index + 1 :], True
            count -= 1
    return trace, count == 0
