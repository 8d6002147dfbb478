"""Feed a tape to the twin: the size of each allocation's block, what was allocated and reserved when, and the peaks."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from trainatomy.allocator.outofmemory import OutOfMemory
from trainatomy.allocator.twin import CachingAllocator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainatomy.allocator.addresses import AddressPolicy
    from trainatomy.allocator.settings import AllocatorSettings
    from trainatomy.results.tape import Event, Tape

BEFORE_THE_STEP: Final = ("load", "other")
"""Phases in which the kernels of the step are not loaded yet, if nothing else came before."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What the allocator made of a tape (bytes, and indices of events).

    ``block_bytes`` has one entry for each allocation, 0 for one of 0 bytes or one that was not reached;
    ``allocated_bytes`` and ``reserved_bytes`` one for each event, after it.  A peak's index is that of the first
    event that reaches it, None for an empty tape.  ``out_of_memory_at`` is the event that failed, the last of the
    series; nothing more was replayed.
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


def replay(
    tape: Tape,
    settings: AllocatorSettings,
    capacity_bytes: int | None = None,
    *,
    device_bytes: int | None = None,
    addresses: AddressPolicy | None = None,
) -> Replay:
    """Replay all events in order on a fresh allocator; an OutOfMemory ends the replay.

    The origins of the tape tell where loading the model ends, which matters for addresses (see ``addresses.py``).
    Raises ValueError for a tape that frees what is not allocated, or allocates one number twice.
    """
    twin = CachingAllocator(settings, capacity_bytes, device_bytes=device_bytes, addresses=addresses)
    count = 1 + max((event[1] for event in tape.events), default=-1)
    sizes, allocated, reserved = array("q", bytes(8 * count)), array("q"), array("q")
    handles: dict[int, int] = {}
    failure: OutOfMemory | None = None
    first_step = _end_of_loading(tape)
    try:
        for events in (tape.events[:first_step], tape.events[first_step:]):
            _feed(twin, events, handles, sizes, allocated, reserved)
            twin.kernels_loaded()
    except OutOfMemory as error:
        failure = error
        allocated.append(twin.allocated_bytes)
        reserved.append(twin.reserved_bytes)
    return Replay(
        block_bytes=sizes,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        peak_allocated_bytes=twin.peak_allocated_bytes,
        peak_allocated_at=_first_maximum(allocated),
        peak_reserved_bytes=twin.peak_reserved_bytes,
        peak_reserved_at=_first_maximum(reserved),
        num_alloc_retries=twin.num_alloc_retries,
        out_of_memory=failure,
        out_of_memory_at=None if failure is None else len(allocated) - 1,
    )


def _feed(
    twin: CachingAllocator,
    events: Sequence[Event],
    handles: dict[int, int],
    sizes: array[int],
    allocated: array[int],
    reserved: array[int],
) -> None:
    """Replay some events; the hot loop."""
    malloc, free, block_bytes = twin.malloc, twin.free, twin.block_bytes
    for action, allocation, requested, stream in events:
        if action == "alloc":
            if allocation in handles:
                raise ValueError(f"event {len(allocated)}: allocation {allocation} is allocated twice")
            handles[allocation] = handle = malloc(requested, stream)
            sizes[allocation] = block_bytes(handle)
        elif action == "free":
            if allocation not in handles:
                raise ValueError(f"event {len(allocated)}: allocation {allocation} is freed but not allocated")
            free(handles.pop(allocation))
        else:
            twin.empty_cache()
        allocated.append(twin.allocated_bytes)
        reserved.append(twin.reserved_bytes)


def _end_of_loading(tape: Tape) -> int:
    """The index of the first event of the step itself; that of the end without origins."""
    steps = array("b", (origin.phase not in BEFORE_THE_STEP for origin in tape.origins))
    if 1 not in steps:
        return len(tape.events)
    first = steps.index(1)
    return next(index for index, event in enumerate(tape.events) if event.allocation >= first)


def _first_maximum(series: array[int]) -> int | None:
    return series.index(max(series)) if series else None
