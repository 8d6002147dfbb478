"""Record PyTorch's memory history of a loop of any length, in windows of bounded size.

A window begins with a snapshot of the blocks that are allocated already, because PyTorch keeps no history of those.
After ``WINDOW_EVENTS`` events a new window begins, and the old one is kept only if the peak rose in it.  So the window
that is left contains the peak, whenever that was, and host memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from trainatomy.measurement.traces.history import (
    COUNTED_ACTIONS,
    AllocationHistory,
    HistoryEvent,
    Note,
    from_snapshot,
)

if TYPE_CHECKING:
    from trainatomy.measurement.step.recorder import AllocatorCounters

WINDOW_EVENTS = 300_000
"""Allocations and releases in a window: some hundred steps of a BERT-large, and below 200 MB of host memory."""
RING_EVENTS = 4 * WINDOW_EVENTS
"""Size of PyTorch's ring buffer: more than a window, which ends with a step, and room for other events."""
BEFORE = "allocated before the watch"
"""Label of blocks whose purpose is unknown because they existed before the watch began."""


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a run: the segments at its beginning, and the events since.

    Attributes:
        segments: The segments at the beginning.
        labels: Addresses of the blocks whose purpose was known then, by label.
        first_event: Value of the allocator's event counter at the beginning.
        is_whole: Whether it covers everything that was watched.
        trace: PyTorch's trace entries since.
        notes: The recorder's notes since.
        tracked_steps: Steps whose module calls are in ``notes``.
        is_complete: Whether ``trace`` has every event of the window.
    """

    segments: Sequence[Mapping[str, Any]]
    labels: Mapping[str, Sequence[int]]
    first_event: int
    is_whole: bool
    trace: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[Note] = ()
    tracked_steps: Sequence[int] = ()
    is_complete: bool = True

    def history(self) -> AllocationHistory:
        """Return the window as a history whose first events allocate the blocks that were there already."""
        blocks = allocated_blocks(self.segments)
        first = len(blocks)
        shifted = [note._replace(at=max(0, note.at - self.first_event)) for note in self.notes]
        recorded = from_snapshot({}, self.trace, shifted)
        loaded = Note(first, "loaded", -1, self.labels)
        notes = [loaded, *(note._replace(at=note.at + first) for note in recorded.notes)]
        return AllocationHistory({}, [*blocks, *recorded.events], notes)


class WindowedHistory:
    """Switches PyTorch's memory history on, unless the user has done so: then theirs is read and left alone."""

    def __init__(self, device: int) -> None:
        self._device = device
        self.is_users = bool(torch._C._cuda_isHistoryEnabled())
        self._window: Window | None = None
        self._kept: Window | None = None
        self._kept_peak = 0

    def start(self, now: AllocatorCounters, labels: Mapping[str, Sequence[int]]) -> None:
        """Begin a window.  ``labels``: addresses of the tensors whose purpose is known, by label."""
        if not self.is_users:
            torch.cuda.memory._record_memory_history(
                enabled="all", context=None, stacks="python", max_entries=RING_EVENTS, clear_history=True
            )
        segments = [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == self._device]
        is_first = self._window is None
        if is_first:
            known = {address for found in labels.values() for address in found}
            unknown = [block.address for block in allocated_blocks(segments) if block.address not in known]
            labels = {**labels, BEFORE: unknown}
        self._window = Window(segments, labels, now.events, is_first)

    def is_full(self, now: AllocatorCounters) -> bool:
        """Return whether it is time for a new window."""
        return not self.is_users and now.events - self._current.first_event >= WINDOW_EVENTS

    def keep(self, now: AllocatorCounters, notes: Sequence[Note], tracked_steps: Sequence[int]) -> None:
        """Keep the window up to here if the peak rose in it."""
        if now.peak_bytes > self._kept_peak or self._kept is None:
            self._kept = replace(self.window(now, notes, tracked_steps), is_whole=False)
            self._kept_peak = now.peak_bytes

    def window(
        self, now: AllocatorCounters, notes: Sequence[Note], tracked_steps: Sequence[int], *, latest: bool = False
    ) -> Window:
        """Return the window that contains the peak so far, or the ``latest`` one."""
        current = self._current
        if self._kept is not None and now.peak_bytes <= self._kept_peak and not latest:
            return self._kept
        trace, is_complete = last_events(self._trace(), now.events - current.first_event)
        return replace(
            current, trace=trace, notes=list(notes), tracked_steps=list(tracked_steps), is_complete=is_complete
        )

    def has_refused_since(self, now: AllocatorCounters, at: int) -> bool:
        """Return whether the allocator refused a request after the first ``at`` allocations and releases."""
        trace, _ = last_events(self._trace(), now.events - at)
        return any(entry["action"] == "oom" for entry in trace)

    def stop(self) -> None:
        """Switch the history off and drop it, unless it is the user's."""
        if not self.is_users:
            torch.cuda.memory._record_memory_history(enabled=None, clear_history=True)

    @property
    def _current(self) -> Window:
        assert self._window is not None
        return self._window

    def _trace(self) -> Sequence[Mapping[str, Any]]:
        traces: list[list[dict[str, Any]]] = torch.cuda.memory._snapshot()["device_traces"]
        return traces[self._device] if self._device < len(traces) else []


def allocated_blocks(segments: Sequence[Mapping[str, Any]]) -> list[HistoryEvent]:
    """Return the allocated blocks of a snapshot as allocations of whole blocks."""
    blocks: list[HistoryEvent] = []
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                blocks.append(HistoryEvent("alloc", address, block["size"], segment["stream"]))
            address += block["size"]
    return blocks


def last_events(trace: Sequence[Mapping[str, Any]], count: int) -> tuple[Sequence[Mapping[str, Any]], bool]:
    """Return the end of ``trace`` with ``count`` allocations and releases, and whether it has that many.

    It begins right after the last one before them, so that a segment that was reserved for the first is included.
    Releases that complete there but were requested before do no harm: the layout already counts them as released.
    """
    for index in range(len(trace) - 1, -1, -1):
        if trace[index]["action"] in COUNTED_ACTIONS:
            if count == 0:
                return trace[index + 1 :], True
            count -= 1
    return trace, count == 0
