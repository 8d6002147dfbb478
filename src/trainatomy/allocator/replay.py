"""Replays an allocation trace: block sizes, allocated and reserved memory over time, and their peaks.

The least memory of a GPU on which a trace can be replayed to its end.

What the allocator reserves where memory is plenty says little about it: freed blocks that no later request fits stay in
the cache, and only a refusal of the driver empties that.  So sizes are tried, each as a GPU of that size would run the
trace, with the retries that free the cache.
"""

from __future__ import annotations

from array import array
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from trainatomy.allocator.blocks import MIB
from trainatomy.allocator.player import Player, library_moments
from trainatomy.allocator.simulated import CachingAllocator, OutOfMemory
from trainatomy.results.trace import AllocationTrace, DriverAction, DriverCall, Event

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from trainatomy.allocator.segments import AddressPolicy
    from trainatomy.allocator.settings import AllocatorSettings


Kept = TypeVar("Kept")


@dataclass(frozen=True, slots=True)
class Replay:
    """Result of a replay, in bytes and indices of events.

    Attributes:
        block_bytes: Size of each allocation's block; 0 for one of 0 bytes, not reached, or skipped.
        allocated_bytes: Allocated bytes after each event.
        reserved_bytes: Reserved bytes after each event.
        peak_allocated_bytes: Highest allocated bytes.
        peak_allocated_at: First event that reaches them, None for an empty trace.
        peak_reserved_bytes: Highest reserved bytes.
        peak_reserved_at: First event that reaches them, None for an empty trace.
        peak_requested_bytes: Highest sum of requests, before they are rounded up to blocks.
        num_alloc_retries: Times that the allocator released its cache to serve a request.
        out_of_memory: Failure that ended the replay.
        out_of_memory_at: Event that failed, the last of the series.
        skipped_workspaces: Workspaces that their library did without because memory was short (see ``Choices``).
        driver_calls: Calls of the driver, in order.
    """

    block_bytes: array[int]
    allocated_bytes: array[int]
    reserved_bytes: array[int]
    peak_allocated_bytes: int
    peak_allocated_at: int | None
    peak_reserved_bytes: int
    peak_reserved_at: int | None
    peak_requested_bytes: int
    num_alloc_retries: int
    out_of_memory: OutOfMemory | None
    out_of_memory_at: int | None
    skipped_workspaces: tuple[int, ...] = ()
    driver_calls: tuple[DriverCall, ...] = ()


class RecordingPlayer(Player):
    """Player on a new allocator that records what each event does; the arguments are those of ``replay``."""

    def __init__(
        self,
        trace: AllocationTrace,
        settings: AllocatorSettings,
        capacity_bytes: int | None = None,
        *,
        device_bytes: int | None = None,
        addresses: AddressPolicy | None = None,
    ) -> None:
        allocator = CachingAllocator(
            settings, capacity_bytes, device_bytes=device_bytes, addresses=addresses, on_driver=self._note
        )
        super().__init__(trace, allocator, library_moments(trace))
        numbers = 1 + max(map(itemgetter(1), trace.events), default=-1)
        self._sizes, self._allocated, self._reserved = array("q", bytes(8 * numbers)), array("q"), array("q")
        self._driver_calls: list[DriverCall] = []

    def _note(self, action: DriverAction, size: int) -> None:
        self._driver_calls.append(DriverCall(len(self._allocated), action, size))

    def _play(self, events: Sequence[Event]) -> None:
        allocator, handles = self.allocator, self.handles
        malloc, free, block_bytes = allocator.malloc, allocator.free, allocator.block_bytes
        special, take = self._special(), self._take
        sizes, allocated, reserved = self._sizes, self._allocated, self._reserved
        for action, allocation, requested, stream in events:
            if action == "alloc":
                if allocation in handles:
                    raise ValueError(f"event {len(allocated)}: allocation {allocation} is allocated twice")
                handle = take(allocation, requested, stream) if allocation in special else malloc(requested, stream)
                handles[allocation] = handle
                sizes[allocation] = block_bytes(handle)
            elif action == "free":
                if allocation not in handles:
                    raise ValueError(f"event {len(allocated)}: allocation {allocation} is freed but not allocated")
                free(handles.pop(allocation))
            else:
                allocator.empty_cache()
            allocated.append(allocator.allocated_bytes)
            reserved.append(allocator.reserved_bytes)

    def to_end(self, on_event: Callable[[CachingAllocator, int], None] | None = None) -> Replay:
        """Play what is left of the trace, up to the first OutOfMemory."""
        events, allocator, failure = self._trace.events, self.allocator, None
        allocated, reserved = self._allocated, self._reserved
        try:
            if on_event is not None:
                for index in range(self._done, len(events)):
                    self.play(index + 1)
                    on_event(allocator, self.handles.get(events[index].allocation, 0))
            self.play(len(events))
        except OutOfMemory as error:
            failure = error
            allocated.append(allocator.allocated_bytes)
            reserved.append(allocator.reserved_bytes)
        return Replay(
            block_bytes=self._sizes,
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            peak_allocated_bytes=allocator.peak_allocated_bytes,
            peak_allocated_at=_first_maximum(allocated),
            peak_reserved_bytes=allocator.peak_reserved_bytes,
            peak_reserved_at=_first_maximum(reserved),
            peak_requested_bytes=allocator.peak_requested_bytes,
            num_alloc_retries=allocator.num_alloc_retries,
            out_of_memory=failure,
            out_of_memory_at=None if failure is None else len(allocated) - 1,
            skipped_workspaces=tuple(self._choices.skipped),
            driver_calls=tuple(self._driver_calls),
        )


def replay(
    trace: AllocationTrace,
    settings: AllocatorSettings,
    capacity_bytes: int | None = None,
    *,
    device_bytes: int | None = None,
    addresses: AddressPolicy | None = None,
    on_event: Callable[[CachingAllocator, int], None] | None = None,
) -> Replay:
    """Replay all events in order on a new allocator, up to the first OutOfMemory.

    A workspace that its library does without does not end the replay.  The trace's origins show where loading the model
    ends, its labels where cuBLAS handles are made; both matter for addresses (see ``segments.py``).

    Args:
        trace: Allocations and releases.
        settings: Settings of the allocator.
        capacity_bytes: Limit of the reserved bytes, None for no limit.
        device_bytes: Memory of the GPU, by default the capacity.
        addresses: Placement of segments, by default as the driver's.
        on_event: Called after each event with the allocator and the handle of the allocation (0 after other events).

    Raises:
        ValueError: The trace frees an unallocated number, or allocates one twice.
    """
    player = RecordingPlayer(trace, settings, capacity_bytes, device_bytes=device_bytes, addresses=addresses)
    return player.to_end(on_event)


def unlimited_replay(
    trace: AllocationTrace, settings: AllocatorSettings, device_bytes: int, player: RecordingPlayer | None = None
) -> Replay:
    """Return the replay of a finished trace without a limit, which the trace keeps.

    Args:
        trace: Allocations and releases.
        settings: Settings of the allocator.
        device_bytes: Memory of the GPU.
        player: One that has played some of it on a GPU of that memory.
    """
    return kept(
        trace,
        "replay",
        settings,
        device_bytes,
        lambda: (player or RecordingPlayer(trace, settings, device_bytes=device_bytes)).to_end(),
    )


def kept(
    trace: AllocationTrace, name: Hashable, settings: AllocatorSettings, device_bytes: int, make: Callable[[], Kept]
) -> Kept:
    """Return what a finished trace keeps of its replays without a limit, or make it.

    GPUs on which a training allocates the same share it: the GPU's memory matters only where a setting refers to it.

    Args:
        trace: Allocations and releases, to which nothing is added any more.
        name: What is kept, with what it depends on besides.
        settings: Settings of the allocator.
        device_bytes: Memory of the GPU.
        make: Makes it.
    """
    key = _key(trace, name, settings, device_bytes)
    if key not in trace.replayed:
        trace.replayed[key] = make()
    found: Kept = trace.replayed[key]
    return found


def _key(trace: AllocationTrace, name: Hashable, settings: AllocatorSettings, device_bytes: int) -> Hashable:
    """Return what a trace keeps something of its replays under."""
    return name, len(trace.events), settings, device_bytes if settings.refer_to_device else None


class Peaks(NamedTuple):
    """Highest allocated and reserved bytes of a replay."""

    allocated_bytes: int
    reserved_bytes: int


def peaks_of(
    trace: AllocationTrace,
    settings: AllocatorSettings,
    device_bytes: int,
    placements: Iterable[AddressPolicy | None] = (None,),
) -> list[Peaks]:
    """Replay a trace with each placement of segments (None: the driver's), where only the peaks are wanted.

    The arguments are those of ``replay``, whose peaks these are; reserved memory has no limit.  One that the trace
    keeps (``unlimited_replay``) is not replayed again.
    """
    moments, found = None, list[Peaks]()
    for addresses in placements:
        known = trace.replayed.get(_key(trace, "replay", settings, device_bytes)) if addresses is None else None
        if known is not None:
            found.append(Peaks(known.peak_allocated_bytes, known.peak_reserved_bytes))
            continue
        moments = library_moments(trace) if moments is None else moments
        allocator = CachingAllocator(settings, device_bytes=device_bytes, addresses=addresses)
        with suppress(OutOfMemory):
            Player(trace, allocator, moments).play(len(trace.events))
        found.append(Peaks(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes))
    return found


def _first_maximum(series: array[int]) -> int | None:
    return series.index(max(series)) if series else None


PRECISION_BYTES: Final = 64 * MIB
"""Distance within which the least size is found."""
PRECISION_SHARE: Final = 0.01
"""The same as a share of it; the larger of the two counts."""


def replay_on_least(
    trace: AllocationTrace,
    settings: AllocatorSettings,
    too_small: int,
    outside_bytes: int,
    unlimited: Replay,
) -> Replay:
    """Return the replay on the smallest GPU on which the trace runs to its end.

    A GPU with the reserved peak of that replay and what lies outside the allocator is enough.

    Args:
        trace: Allocations and releases.
        settings: Settings of the allocator.
        too_small: Memory of a GPU on which it runs out of memory.
        outside_bytes: Memory of a GPU that is not the allocator's: context and libraries.
        unlimited: The replay without a limit of the reserved bytes.
    """
    low, high, found = too_small, 0, unlimited
    if unlimited.out_of_memory is None:
        high = unlimited.peak_reserved_bytes + outside_bytes
    tensors = max(unlimited.peak_allocated_bytes + outside_bytes, low)
    half = _precision(tensors) // 2
    sizes = [tensors + half, tensors - half]  # mostly, what tensors alone take suffices once the cache is freed
    while not high or high - low > _precision(high):
        size = sizes.pop(0) if sizes else _between(low, high, tensors)
        if not low < size < (high or size + 1):
            continue
        tried = replay(trace, settings, max(size - outside_bytes, 0), device_bytes=size)
        if tried.out_of_memory is None:
            high, found = size, tried
        else:
            low = size
    return found


def _between(low: int, high: int, tensors: int) -> int:
    """Return the size to try next: the middle, or twice as far beyond what tensors take as was not enough."""
    farther = tensors + 2 * (low - tensors)
    if not high:
        return max(farther, low + _precision(low))
    middle = (low + high) // 2
    return min(middle, farther) if farther > low else middle


def _precision(size: int) -> int:
    return max(PRECISION_BYTES, int(PRECISION_SHARE * size))
