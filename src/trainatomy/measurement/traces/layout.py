"""Follow a recorded allocation history block by block, to know the allocated and reserved bytes at every event.

A history gives the address and requested size of each block, but not the block's size.  That follows from the layout:
a request takes the beginning of the free range at its address, and the allocator's rule decides whether the rest of the
range is split off.  Nothing is guessed, neither which range a request takes nor where the driver puts a segment.  So a
history that begins in the middle of a process is followed exactly as well, from the snapshot of that moment.

Source: ``malloc``, ``should_split``, ``free``, ``map_block`` and ``unmap_block`` in c10/cuda/CUDACachingAllocator.cpp,
torch 2.9-2.13.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainatomy.allocator.blocks import MIB, MIN_BLOCK_BYTES, SMALL_REQUEST_BYTES, block_bytes
from trainatomy.allocator.replay import Replay
from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.results.trace import AllocationTrace

if TYPE_CHECKING:
    from trainatomy.measurement.traces.history import AllocationHistory

Segments = Sequence[Mapping[str, Any]]
"""Segments of one device, as in ``torch.cuda.memory_snapshot()``."""
_UNLIMITED = 1 << 62


class BlockLayout:
    """Free and used ranges of reserved memory, with their sums in bytes: ``allocated`` and ``reserved``.

    Events that contradict the layout (a history with gaps) are accepted: a block outside every known range gets the
    size that its request rounds to.
    """

    def __init__(self, settings: AllocatorSettings, segments: Segments = ()) -> None:
        """Start from ``segments``, the memory reserved at the beginning of the history."""
        self._settings = settings
        self._max_split = settings.max_split_size_bytes or _UNLIMITED
        self._is_expandable = settings.expandable_segments
        self._free: dict[int, int] = {}
        self._free_ends: dict[int, int] = {}
        self._used: dict[int, int] = {}
        self._pending: set[int] = set()
        self._segments: dict[int, int] = {}
        self.allocated = self.reserved = 0
        for segment in segments:
            self._add_segment(segment)

    def grow(self, address: int, size: int, *, expandable: bool) -> None:
        """Reserve a segment, or map a piece of an expandable one."""
        if address in self._segments or address in self._free or address in self._used:
            return
        self._reserve(address, size, expandable=expandable)
        self._add_free(address, size)

    def shrink(self, address: int, size: int) -> None:
        """Return a free range, or a piece of one, to the driver."""
        start = self._free_range_around(address, size)
        if start is None:
            return
        end = start + self._remove_free(start)
        self._segments.pop(address, None)
        self.reserved -= size
        for first, last in ((start, address), (address + size, end)):
            if last > first:
                self._add_free(first, last - first)

    def allocate(self, address: int, requested: int) -> int:
        """Serve a request of ``requested`` bytes at ``address`` and return the size of its block."""
        self.release(address)  # does nothing, unless the history lacks the previous block's release
        size = block_bytes(requested, self._settings.roundup_power2_divisions)
        if address in self._free:
            length = self._remove_free(address)
            if self._should_split(size, length - size):
                self._add_free(address + size, length - size)
            else:
                size = length
        self._used[address] = size
        self.allocated += size
        return size

    def request_release(self, address: int) -> bool:
        """Mark the block at ``address`` as freed by the program; other streams may still use it.

        It no longer counts as allocated.  Returns whether there was such a block.
        """
        if address not in self._used or address in self._pending:
            return False
        self._pending.add(address)
        self.allocated -= self._used[address]
        return True

    def release(self, address: int) -> bool:
        """Make the block at ``address`` available again; return whether its release had not been requested before."""
        is_new = self.request_release(address)
        if address in self._used:
            self._pending.remove(address)
            self._add_free(address, self._used.pop(address))
        return is_new

    def _add_segment(self, segment: Mapping[str, Any]) -> None:
        address = segment["address"]
        self._reserve(address, segment["total_size"], expandable=segment.get("is_expandable", False))
        for block in segment["blocks"]:
            size = block["size"]
            if block["state"] == "inactive":
                self._add_free(address, size)
            else:
                self._used[address] = size
                if block["state"] == "active_allocated":
                    self.allocated += size
                else:
                    self._pending.add(address)
            address += size

    def _reserve(self, address: int, size: int, *, expandable: bool) -> None:
        if expandable:
            self._is_expandable = True  # a program may switch them on after it started
        else:
            self._segments[address] = size
        self.reserved += size

    def _should_split(self, size: int, rest: int) -> bool:
        if size <= SMALL_REQUEST_BYTES or self._is_expandable:
            return rest >= MIN_BLOCK_BYTES
        return rest > MIB and size < self._max_split

    def _add_free(self, address: int, size: int) -> None:
        """Add a free range and merge it with its free neighbours in the same segment."""
        before = self._free_ends.get(address)
        if before is not None and address not in self._segments:
            size += self._remove_free(before)
            address = before
        after = address + size
        if after in self._free and after not in self._segments:
            size += self._remove_free(after)
        self._free[address] = size
        self._free_ends[address + size] = address

    def _free_range_around(self, address: int, size: int) -> int | None:
        """Return the start of the free range that contains these bytes."""
        if self._free.get(address, 0) >= size:
            return address
        return next((at for at, length in self._free.items() if at < address and address + size <= at + length), None)

    def _remove_free(self, address: int) -> int:
        size = self._free.pop(address)
        del self._free_ends[address + size]
        return size


def release_on_request(history: AllocationHistory) -> AllocationHistory:
    """Return ``history`` with each block released when the program frees it, as PyTorch's counters count it.

    PyTorch writes two events for a release; between them the block waits for other streams that use it.
    """
    pending: set[int] = set()
    events = []
    for event in history.events:
        action = event.action
        if action == "free_requested":
            pending.add(event.address)
            action = "free_completed"
        elif action == "free_completed" and event.address in pending:
            pending.remove(event.address)
            action = "done"
        events.append(event if action == event.action else event._replace(action=action))
    return replace(history, events=events)


def replay_history(
    history: AllocationHistory,
    trace: AllocationTrace,
    settings: AllocatorSettings,
    segments: Segments = (),
    num_alloc_retries: int = 0,
) -> Replay:
    """Return the block sizes and the allocated and reserved bytes at each event of ``trace``.

    Args:
        history: The recorded history.
        trace: The trace of ``release_on_request(history)``.
        settings: The allocator settings of the run.
        segments: The segments at the beginning of the history, whose first events are then their allocated blocks.
        num_alloc_retries: PyTorch's counter of that name.
    """
    layout = BlockLayout(settings, segments)
    first, peak_reserved = layout.allocated, layout.reserved
    sizes, allocated, reserved = array("q"), array("q"), array("q")
    preallocated = 0
    for action, address, count, _ in history.events:
        is_in_trace = False
        if preallocated < first:
            preallocated += count
            sizes.append(count)
            allocated.append(preallocated)
            reserved.append(layout.reserved)
            continue
        if action == "alloc":
            sizes.append(layout.allocate(address, count))
            is_in_trace = True
        elif action == "free_requested":
            is_in_trace = layout.request_release(address)
        elif action == "free_completed":
            is_in_trace = layout.release(address)
        elif action in ("segment_alloc", "segment_map"):
            layout.grow(address, count, expandable=action == "segment_map")
            peak_reserved = max(peak_reserved, layout.reserved)
        elif action in ("segment_free", "segment_unmap"):
            layout.shrink(address, count)
        if is_in_trace:
            allocated.append(layout.allocated)
            reserved.append(layout.reserved)
    return _to_replay(trace, sizes, allocated, reserved, peak_reserved, num_alloc_retries)


def _to_replay(
    trace: AllocationTrace,
    sizes: array[int],
    allocated: array[int],
    reserved: array[int],
    peak_reserved: int,
    retries: int,
) -> Replay:
    """Expand the series to every event of the trace, which also has ``empty_cache`` events."""
    latest = [0, 0]
    series: tuple[array[int], array[int]] = (array("q"), array("q"))
    values = iter(zip(allocated, reserved, strict=True))
    for event in trace.events:
        if event.action != "empty_cache":
            latest = list(next(values))
        series[0].append(latest[0])
        series[1].append(latest[1])
    peak = max(series[0], default=0)
    return Replay(
        block_bytes=sizes,
        allocated_bytes=series[0],
        reserved_bytes=series[1],
        peak_allocated_bytes=peak,
        peak_allocated_at=series[0].index(peak) if series[0] else None,
        peak_reserved_bytes=peak_reserved,
        peak_requested_bytes=_peak_requested(trace),
        peak_reserved_at=next((at for at, count in enumerate(series[1]) if count == peak_reserved), None),
        num_alloc_retries=retries,
        out_of_memory=None,
        out_of_memory_at=None,
    )


def _peak_requested(trace: AllocationTrace) -> int:
    sizes: dict[int, int] = {}
    now = peak = 0
    for action, allocation, size, _ in trace.events:
        if action == "alloc":
            sizes[allocation] = size
            now += size
            peak = max(peak, now)
        elif action == "free":
            now -= sizes.pop(allocation, 0)
    return peak
