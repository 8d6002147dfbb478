"""What a real run's allocator made of its requests, block by block: its history, followed on the layout of segments.

A history says where a block lies and what was asked for, not how large the block is.  That follows: a request takes
the beginning of the free range at its address, and what is left of that range is split off or not, by the allocator's
rule.  Nothing has to be guessed, neither which range a request takes nor where the driver puts a segment.  So a history
that begins in the middle of a process is followed exactly as well, from the snapshot of that moment.

Source: ``malloc``, ``should_split``, ``free``, ``map_block`` and ``unmap_block`` in c10/cuda/CUDACachingAllocator.cpp,
torch 2.9-2.13.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainatomy.allocator.replay import Replay
from trainatomy.allocator.sizes import MIB, MIN_BLOCK_BYTES, SMALL_REQUEST_BYTES, block_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainatomy.allocator.settings import AllocatorSettings
    from trainatomy.measurement.traces.trace import AllocationHistory
    from trainatomy.results.trace import AllocationTrace

Segments = Sequence[Mapping[str, Any]]
"""As in ``torch.cuda.memory_snapshot()``, of one device."""
UNBOUNDED = 1 << 62


class Layout:
    """The ranges of reserved memory, free and taken, and their sums in bytes: ``allocated`` and ``reserved``.

    What contradicts the layout (a history with holes) is not refused: a block of which it knows no range has the size
    that its request rounds to.
    """

    def __init__(self, settings: AllocatorSettings, segments: Segments = ()) -> None:
        """``segments``: what is reserved at the beginning."""
        self._settings = settings
        self._max_split = settings.max_split_size_bytes or UNBOUNDED
        self._finely = settings.expandable_segments
        self._free: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        self._waiting: set[int] = set()
        self._segments: dict[int, int] = {}
        self.allocated = self.reserved = 0
        for segment in segments:
            self._place(segment)

    def grow(self, address: int, size: int, *, expandable: bool) -> None:
        """A segment, or a piece of an expandable one, is reserved there."""
        if address in self._segments or address in self._free or address in self._taken:
            return
        self._reserve(address, size, expandable=expandable)
        self._give(address, size)

    def shrink(self, address: int, size: int) -> None:
        """A free range (or a piece of one) is given back to the driver."""
        start = self._range_of(address, size)
        if start is None:
            return
        end = start + self._drop(start)
        self._segments.pop(address, None)
        self.reserved -= size
        for first, last in ((start, address), (address + size, end)):
            if last > first:
                self._give(first, last - first)

    def take(self, address: int, requested: int) -> int:
        """A request is served there; the bytes of its block."""
        self.complete(address)  # nothing, unless its release is not in the history
        size = block_bytes(requested, self._settings.roundup_power2_divisions)
        if address in self._free:
            length = self._drop(address)
            if self._splits(size, length - size):
                self._give(address + size, length - size)
            else:
                size = length
        self._taken[address] = size
        self.allocated += size
        return size

    def request(self, address: int) -> bool:
        """The block there is given back by the program: from now on it does not count as allocated, though other
        streams may still use it.  Whether there is such a block."""
        if address not in self._taken or address in self._waiting:
            return False
        self._waiting.add(address)
        self.allocated -= self._taken[address]
        return True

    def complete(self, address: int) -> bool:
        """The block there can serve another request.  Whether it was not given back before."""
        given_back = self.request(address)
        if address in self._taken:
            self._waiting.remove(address)
            self._give(address, self._taken.pop(address))
        return given_back

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _place(self, segment: Mapping[str, Any]) -> None:
        address = segment["address"]
        self._reserve(address, segment["total_size"], expandable=segment.get("is_expandable", False))
        for block in segment["blocks"]:
            size = block["size"]
            if block["state"] == "inactive":
                self._give(address, size)
            else:
                self._taken[address] = size
                if block["state"] == "active_allocated":
                    self.allocated += size
                else:
                    self._waiting.add(address)
            address += size

    def _reserve(self, address: int, size: int, *, expandable: bool) -> None:
        """Whether segments expand is seen here too: a program may say so after it began."""
        if expandable:
            self._finely = True
        else:
            self._segments[address] = size
        self.reserved += size

    def _splits(self, size: int, rest: int) -> bool:
        if size <= SMALL_REQUEST_BYTES or self._finely:
            return rest >= MIN_BLOCK_BYTES
        return rest > MIB and size < self._max_split

    def _give(self, address: int, size: int) -> None:
        """Make a range free, one with its free neighbours of the same segment."""
        before = self._ends.get(address)
        if before is not None and address not in self._segments:
            size += self._drop(before)
            address = before
        after = address + size
        if after in self._free and after not in self._segments:
            size += self._drop(after)
        self._free[address] = size
        self._ends[address + size] = address

    def _range_of(self, address: int, size: int) -> int | None:
        """Where the free range begins in which these bytes lie."""
        if self._free.get(address, 0) >= size:
            return address
        return next((at for at, length in self._free.items() if at < address and address + size <= at + length), None)

    def _drop(self, address: int) -> int:
        size = self._free.pop(address)
        del self._ends[address + size]
        return size


def at_their_request(history: AllocationHistory) -> AllocationHistory:
    """``history`` with every block released where the program gives it back, which is when PyTorch's counters count it.

    PyTorch writes two events for a release; in between the block waits for other streams that were told of it.
    """
    waiting: set[int] = set()
    events = []
    for event in history.events:
        action = event.action
        if action == "free_requested":
            waiting.add(event.address)
            action = "free_completed"
        elif action == "free_completed" and event.address in waiting:
            waiting.remove(event.address)
            action = "done"
        events.append(event if action == event.action else event._replace(action=action))
    return replace(history, events=events)


def follow(
    history: AllocationHistory,
    trace: AllocationTrace,
    settings: AllocatorSettings,
    begin: Segments = (),
    num_alloc_retries: int = 0,
) -> Replay:
    """What became of ``tape``, which is that of ``history`` with its releases ``at_their_request``.

    ``begin``: the segments at the beginning of the history.  Its first events are then their allocated blocks, whole.
    """
    layout = Layout(settings, begin)
    first, peak_reserved = layout.allocated, layout.reserved
    sizes, held, reserved = array("q"), array("q"), array("q")
    placed = 0
    for action, address, count, _ in history.events:
        told = False
        if placed < first:
            placed += count
            sizes.append(count)
            held.append(placed)
            reserved.append(layout.reserved)
            continue
        if action == "alloc":
            sizes.append(layout.take(address, count))
            told = True
        elif action == "free_requested":
            told = layout.request(address)
        elif action == "free_completed":
            told = layout.complete(address)
        elif action in ("segment_alloc", "segment_map"):
            layout.grow(address, count, expandable=action == "segment_map")
            peak_reserved = max(peak_reserved, layout.reserved)
        elif action in ("segment_free", "segment_unmap"):
            layout.shrink(address, count)
        if told:
            held.append(layout.allocated)
            reserved.append(layout.reserved)
    return _replay(trace, sizes, held, reserved, peak_reserved, num_alloc_retries)


def _replay(
    trace: AllocationTrace, sizes: array[int], held: array[int], reserved: array[int], peak_reserved: int, retries: int
) -> Replay:
    """The series for each event of the tape, which has an emptied cache besides."""
    both = [0, 0]
    series: tuple[array[int], array[int]] = (array("q"), array("q"))
    told = iter(zip(held, reserved, strict=True))
    for event in trace.events:
        if event.action != "empty_cache":
            both = list(next(told))
        series[0].append(both[0])
        series[1].append(both[1])
    peak = max(series[0], default=0)
    return Replay(
        block_bytes=sizes,
        allocated_bytes=series[0],
        reserved_bytes=series[1],
        peak_allocated_bytes=peak,
        peak_allocated_at=series[0].index(peak) if series[0] else None,
        peak_reserved_bytes=peak_reserved,
        peak_reserved_at=next((at for at, count in enumerate(series[1]) if count == peak_reserved), None),
        num_alloc_retries=retries,
        out_of_memory=None,
        out_of_memory_at=None,
    )
