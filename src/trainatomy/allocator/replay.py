"""Feed a tape to the twin: the size of each allocation's block, what was allocated and reserved when, and the peaks."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
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
"""Phases in which the kernels of the step are not loaded yet, if nothing else came before."""
HANDLE_LABEL: Final = "cublas_workspace"
"""The label of the workspace that a thread takes with its cuBLAS handle."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What the allocator made of a tape (bytes, and indices of events).

    ``block_bytes`` has one entry for each allocation, 0 for one of 0 bytes, one that was not reached, or was forgone;
    ``allocated_bytes`` and ``reserved_bytes`` one for each event, after it.  A peak's index is that of the first
    event that reaches it, None for an empty tape.  ``out_of_memory_at`` is the event that failed, the last of the
    series; nothing more was replayed.  ``forgone``: workspaces that their library did without for lack of memory (see
    ``choices.py``).  ``driver_calls``: what was asked of the driver, in order.
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
    forgone: tuple[int, ...] = ()
    driver_calls: tuple[DriverCall, ...] = ()


def replay(
    trace: AllocationTrace,
    settings: AllocatorSettings,
    capacity_bytes: int | None = None,
    *,
    device_bytes: int | None = None,
    addresses: AddressPolicy | None = None,
) -> Replay:
    """Replay all events in order on a fresh allocator; an OutOfMemory ends the replay, but for a workspace that its
    library does without.

    The origins of the tape tell where loading the model ends, its labels where cuBLAS handles are made; both matter for
    addresses (see ``addresses.py``).
    Raises ValueError for a tape that frees what is not allocated, or allocates one number twice.
    """
    driver_calls: list[DriverCall] = []

    def on_driver(action: DriverAction, size: int) -> None:
        driver_calls.append(DriverCall(len(allocated), action, size))

    twin = CachingAllocator(
        settings, capacity_bytes, device_bytes=device_bytes, addresses=addresses, on_driver=on_driver
    )
    choices = Choices(trace.choices, twin.malloc)
    count = 1 + max((event[1] for event in trace.events), default=-1)
    sizes, allocated, reserved = array("q", bytes(8 * count)), array("q"), array("q")
    handles: dict[int, int] = {}
    failure: OutOfMemory | None = None
    done = 0
    try:
        for event, happens in _library_moments(trace, twin):
            _feed(twin, choices, trace.events[done:event], handles, sizes, allocated, reserved)
            happens()
            done = event
        _feed(twin, choices, trace.events[done:], handles, sizes, allocated, reserved)
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
        forgone=tuple(choices.forgone),
        driver_calls=tuple(driver_calls),
    )


def _feed(
    twin: CachingAllocator,
    choices: Choices,
    events: Sequence[Event],
    handles: dict[int, int],
    sizes: array[int],
    allocated: array[int],
    reserved: array[int],
) -> None:
    """Replay some events; the hot loop."""
    malloc, free, block_bytes = twin.malloc, twin.free, twin.block_bytes
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
            twin.empty_cache()
        allocated.append(twin.allocated_bytes)
        reserved.append(twin.reserved_bytes)


def _library_moments(trace: AllocationTrace, twin: CachingAllocator) -> list[tuple[int, Callable[[], None]]]:
    """(event, what to tell the twin before it), in order; a tape without labels has a handle from the first step on."""
    start = _end_of_loading(trace)
    moments: list[tuple[int, Callable[[], None]]] = [(start, twin.kernels_loaded)]
    workspaces = {allocation for allocation, label in trace.labels.items() if label == HANDLE_LABEL}
    if not workspaces:
        return [*moments, (start, twin.handle_created)]
    for index, event in enumerate(trace.events):
        if event.action == "alloc" and event.allocation in workspaces:
            moments.append((index, twin.handle_created))
    return sorted(moments, key=lambda moment: moment[0])


def _end_of_loading(trace: AllocationTrace) -> int:
    """The index of the first event of the step itself; that of the end without origins."""
    steps = array("b", (origin.phase not in BEFORE_THE_STEP for origin in trace.origins))
    if 1 not in steps:
        return len(trace.events)
    first = steps.index(1)
    return next(index for index, event in enumerate(trace.events) if event.allocation >= first)


def _first_maximum(series: array[int]) -> int | None:
    return series.index(max(series)) if series else None
