"""Feed a tape to the twin: the size of each allocation's block, what was allocated and reserved when, and the peaks."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from trainatomy.allocator.outofmemory import OutOfMemory
from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.allocator.twin import CachingAllocator
from trainatomy.results.tape import Tape


@dataclass(frozen=True, slots=True)
class Replay:
    """What the allocator made of a tape (bytes, and indices of events).

    ``block_bytes`` has one entry for each allocation, 0 for one of 0 bytes or one that was not reached;
    ``allocated_bytes`` and ``reserved_bytes`` one for each event, after it.  A peak's index is that of the first
    event that reaches it, None for an empty tape.  After ``out_of_memory`` (at event ``out_of_memory_at``, the last of the
    series) nothing more was replayed.
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
    allocator: CachingAllocator | None = None,
) -> Replay:
    """Replay all events in order, on a fresh allocator unless one is given; an OutOfMemory ends the replay.

    Raises ValueError for a tape that frees what is not allocated, or allocates one number twice.
    """
    twin = allocator or CachingAllocator(settings, capacity_bytes, device_bytes=device_bytes)
    malloc, free, live = twin.malloc, twin.free, twin.block_bytes
    count = 1 + max((event[1] for event in tape.events), default=-1)
    sizes = array("q", bytes(8 * count))
    allocated, reserved = array("q"), array("q")
    handles: dict[int, int] = {}
    failure: OutOfMemory | None = None
    for action, allocation, requested, stream in tape.events:
        try:
            if action == "alloc":
                if allocation in handles:
                    raise ValueError(f"event {len(allocated)}: allocation {allocation} is allocated twice")
                handles[allocation] = handle = malloc(requested, stream)
                sizes[allocation] = live(handle)
            elif action == "free":
                free(handles.pop(allocation))
            else:
                twin.empty_cache()
        except OutOfMemory as error:
            failure = error
        except KeyError:
            raise ValueError(f"event {len(allocated)}: allocation {allocation} is freed but not allocated") from None
        allocated.append(twin.allocated_bytes)
        reserved.append(twin.reserved_bytes)
        if failure is not None:
            break
    return Replay(
        block_bytes=sizes,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        peak_allocated_bytes=twin.peak_allocated_bytes,
        peak_allocated_at=_first(allocated),
        peak_reserved_bytes=twin.peak_reserved_bytes,
        peak_reserved_at=_first(reserved),
        num_alloc_retries=twin.num_alloc_retries,
        out_of_memory=failure,
        out_of_memory_at=None if failure is None else len(allocated) - 1,
    )


def _first(series: array[int]) -> int | None:
    return series.index(max(series)) if series else None
