"""Replays an allocation trace: block sizes, allocated and reserved memory over time, and their peaks."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from trainatomy.allocator.choices import Choices
from trainatomy.allocator.outofmemory import OutOfMemory
from trainatomy.allocator.simulated import CachingAllocator
from trainatomy.results.trace import DriverCall

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainatomy.allocator.addresses import AddressPolicy
    from trainatomy.allocator.settings import AllocatorSettings
    from trainatomy.results.trace import AllocationTrace, DriverAction, Event

BEFORE_THE_STEP: Final = ("load", "other")
"""Phases before the first step, in which its kernels are not loaded yet."""
HANDLE_LABEL: Final = "cublas_workspace"
"""Label of the workspace that a thread allocates with its cuBLAS handle."""


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
        num_alloc_retries: Times that the allocator released its cache to serve a request.
        out_of_memory: Failure that ended the replay.
        out_of_memory_at: Event that failed, the last of the series.
        skipped_workspaces: Workspaces that their library did without because memory was short (see ``choices.py``).
        driver_calls: Calls of the driver, in order.
    """

    block_bytes: array[int]
    allocated_bytes: array[int]
    reserved_bytes: array[int]
    peak_allocated_bytes: int
    peak_allocated_at: int | None
    peak_reserved_bytes: int
    peak_reserved_at: int | None
    num_alloc_retries: int
    out_of_memory: OutOfMemory | None
    out_of_memory_at: int | None
    skipped_workspaces: tuple[int, ...] = ()
    driver_calls: tuple[DriverCall, ...] = ()


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
    ends, its labels where cuBLAS handles are made; both matter for addresses (see ``addresses.py``).

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
    driver_calls: list[DriverCall] = []

    def on_driver(action: DriverAction, size: int) -> None:
        driver_calls.append(DriverCall(len(allocated), action, size))

    allocator = CachingAllocator(
        settings, capacity_bytes, device_bytes=device_bytes, addresses=addresses, on_driver=on_driver
    )
    choices = Choices(trace.choices, allocator.malloc, trace.trials, allocator.largest_possible)
    count = 1 + max((event[1] for event in trace.events), default=-1)
    sizes, allocated, reserved = array("q", bytes(8 * count)), array("q"), array("q")
    handles: dict[int, int] = {}
    failure: OutOfMemory | None = None
    done = 0

    def feed(events: Sequence[Event]) -> None:
        for some in [events] if on_event is None else [[event] for event in events]:
            _feed(allocator, choices, some, handles, sizes, allocated, reserved)
            if on_event is not None:
                on_event(allocator, handles.get(some[0].allocation, 0))

    try:
        for event, notify in library_moments(trace, allocator):
            feed(trace.events[done:event])
            notify()
            done = event
        feed(trace.events[done:])
    except OutOfMemory as error:
        failure = error
        allocated.append(allocator.allocated_bytes)
        reserved.append(allocator.reserved_bytes)
    return Replay(
        block_bytes=sizes,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_allocated_at=_first_maximum(allocated),
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        peak_reserved_at=_first_maximum(reserved),
        num_alloc_retries=allocator.num_alloc_retries,
        out_of_memory=failure,
        out_of_memory_at=None if failure is None else len(allocated) - 1,
        skipped_workspaces=tuple(choices.skipped),
        driver_calls=tuple(driver_calls),
    )


def _feed(
    allocator: CachingAllocator,
    choices: Choices,
    events: Sequence[Event],
    handles: dict[int, int],
    sizes: array[int],
    allocated: array[int],
    reserved: array[int],
) -> None:
    """Replay some events: the hot loop."""
    malloc, free, block_bytes = allocator.malloc, allocator.free, allocator.block_bytes
    chosen, take = choices.of, choices.take
    for action, allocation, requested, stream in events:
        if action == "alloc":
            if allocation in handles:
                raise ValueError(f"event {len(allocated)}: allocation {allocation} is allocated twice")
            handle = take(allocation, requested, stream) if allocation in chosen else malloc(requested, stream)
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


def library_moments(trace: AllocationTrace, allocator: CachingAllocator) -> list[tuple[int, Callable[[], None]]]:
    """Return (event, method of the allocator to call before it), in order.

    In a trace without labels the handle is made when the first step begins.
    """
    start = _end_of_loading(trace)
    moments: list[tuple[int, Callable[[], None]]] = [(start, allocator.kernels_loaded)]
    moments += [(event, partial(allocator.host_memory_pinned, size)) for event, size in _pinned(trace)]
    moments += [(event, allocator.handle_created) for event in _handles(trace, start)]
    return sorted(moments, key=lambda moment: moment[0])


def _handles(trace: AllocationTrace, start: int) -> list[int]:
    """Return the events before which a thread makes its cuBLAS handle."""
    workspaces = {allocation for allocation, label in trace.labels.items() if label == HANDLE_LABEL}
    if not workspaces:
        return [start]
    return [
        index for index, event in enumerate(trace.events) if event.action == "alloc" and event.allocation in workspaces
    ]


def _pinned(trace: AllocationTrace) -> list[tuple[int, int]]:
    """Return the event before which each block of host memory is pinned, and its bytes."""
    found, waiting = list[tuple[int, int]](), list(reversed(trace.pinned))
    for index, event in enumerate(trace.events if waiting else ()):
        while event.action == "alloc" and waiting and waiting[-1].allocation <= event.allocation:
            found.append((index, waiting.pop().bytes))
    return found


def _end_of_loading(trace: AllocationTrace) -> int:
    """Return the index of the first event of a step; that of the end for a trace without origins."""
    steps = array("b", (origin.phase not in BEFORE_THE_STEP for origin in trace.origins))
    if 1 not in steps:
        return len(trace.events)
    first = steps.index(1)
    return next(index for index, event in enumerate(trace.events) if event.allocation >= first)


def _first_maximum(series: array[int]) -> int | None:
    return series.index(max(series)) if series else None
