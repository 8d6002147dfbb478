"""Replays an allocation trace: block sizes, allocated and reserved memory over time, and their peaks.

Workspaces that a library does without when memory is short.

PyTorch finds a plan for cuDNN's convolutions by trying: it catches the ``OutOfMemoryError`` of a plan's workspace and
tries the next plan.  The plan that ran is kept for all equal calls.  When its workspace fails later, PyTorch asks for
plans again, and the first of them fails a second time before the next is tried.  Each failure has made the allocator
release its cache and counts as a retry.  The next plan is assumed to need no workspace (see
``trainatomy.operators.allocation.convolution``).

With ``cudnn.benchmark`` the first call leaves out plans that need more than the driver has left and more than any
cached block, takes a buffer for the largest workspace of the others, half of it and so on where that fails, and times
the plans that fit into the buffer (``generate_and_filter_plans``).

Source: aten/src/ATen/native/cudnn/Conv_v8.cpp (``run_single_conv``, ``try_configs``, ``BenchmarkCache``), the same in
copies of 2023 and of late 2025; Conv_v7.cpp (``AlgoIterator::try_all``) does the same.

Plays the events of a trace on an allocator bit by bit, where only the allocator's state afterwards is wanted.

The least memory of a GPU on which a trace can be replayed to its end.

What the allocator reserves where memory is plenty says little about it: freed blocks that no later request fits stay in
the cache, and only a refusal of the driver empties that.  So sizes are tried, each as a GPU of that size would run the
trace, with the retries that free the cache.
"""

from __future__ import annotations

from array import array
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress, count, islice
from operator import itemgetter, methodcaller
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from trainatomy.allocator.blocks import MIB
from trainatomy.allocator.simulated import CachingAllocator, OutOfMemory
from trainatomy.results.trace import DriverCall

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from trainatomy.allocator.segments import AddressPolicy
    from trainatomy.allocator.settings import AllocatorSettings
    from trainatomy.results.trace import AllocationTrace, DriverAction, Event, PlansTried


Kept = TypeVar("Kept")


class Choices:
    """Allocates optional workspaces as their library would.

    Attributes:
        of: Number of the decision that each allocation belongs to.
        skipped: Allocations that the library did without.
    """

    def __init__(
        self,
        of: Mapping[int, int],
        malloc: Callable[[int, int], int],
        trials: Mapping[int, PlansTried],
        largest_possible: Callable[[], float],
    ) -> None:
        self.of = of
        self.skipped: list[int] = []
        self._malloc = malloc
        self._trials = trials
        self._largest_possible = largest_possible
        self._instead: dict[int, int] = {}
        """Workspace of the plan that is kept, of decisions whose expected plan did not fit into the trial's buffer."""
        self._kept: set[int] = set()
        self._without: set[int] = set()

    def take(self, allocation: int, requested: int, stream: int) -> int:
        """Allocate a workspace and return its handle, 0 if the library does without."""
        choice = self.of[allocation]
        if allocation in self._trials:
            return self._try(choice, self._trials[allocation].workspaces, stream)
        requested = min(requested, self._instead.get(choice, requested))
        if choice not in self._without:
            for _ in range(2 if choice in self._kept else 1):
                try:
                    handle = self._malloc(requested, stream)
                except OutOfMemory:
                    continue
                self._kept.add(choice)
                return handle
            self._without.add(choice)
        self.skipped.append(allocation)
        return 0

    def _try(self, choice: int, workspaces: tuple[int, ...], stream: int) -> int:
        """Allocate the buffer of a trial and return its handle, 0 if all plans that fit need none."""
        possible = self._largest_possible()
        size, handle = max((one for one in workspaces if one <= possible), default=0), 0
        while size and not handle:
            try:
                handle = self._malloc(size, stream)
            except OutOfMemory:
                size //= 2
        if workspaces[0] > size:
            self._instead[choice] = next((one for one in workspaces if one <= size), 0)
        return handle


Moment = tuple[int, "Callable[[CachingAllocator], None]"]
"""An event of a trace, and what to call with the allocator before it."""


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
    num_alloc_retries: int
    out_of_memory: OutOfMemory | None
    out_of_memory_at: int | None
    skipped_workspaces: tuple[int, ...] = ()
    driver_calls: tuple[DriverCall, ...] = ()


class Player:
    """Player of the events of one trace in their order.

    Args:
        trace: The trace; it may grow.
        allocator: The allocator.
        moments: Those at which libraries take memory of their own, on which addresses of segments depend
            (``library_moments``).  Those of a trace that grows are not known.

    Attributes:
        allocator: The allocator.
        handles: Handles of the allocations that are held, by their numbers.
    """

    def __init__(self, trace: AllocationTrace, allocator: CachingAllocator, moments: Sequence[Moment] = ()) -> None:
        self.allocator = allocator
        self.handles: dict[int, int] = {}
        self._trace = trace
        self._choices = Choices(trace.choices, allocator.malloc, trace.trials, allocator.largest_possible)
        self._moments = deque(moments)
        self._done = 0

    def play(self, end: int) -> None:
        """Allocate and release what the next events say, up to the event of that index."""
        while self._moments and self._moments[0][0] <= end:
            event, notify = self._moments.popleft()
            self._play(self._trace.events[self._done : event])
            notify(self.allocator)
            self._done = event
        self._play(self._trace.events[self._done : end])
        self._done = end

    def _play(self, events: Sequence[Event]) -> None:
        allocator, choices, handles = self.allocator, self._choices, self.handles
        for action, allocation, requested, stream in events:
            if action == "alloc" and allocation in choices.of:
                handles[allocation] = choices.take(allocation, requested, stream)
            elif action == "alloc":
                handles[allocation] = allocator.malloc(requested, stream)
            elif action == "free":
                allocator.free(handles.pop(allocation))
            else:
                allocator.empty_cache()


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
        chosen, take = self._choices.of, self._choices.take
        sizes, allocated, reserved = self._sizes, self._allocated, self._reserved
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
    key = name, len(trace.events), settings, device_bytes if settings.refer_to_device else None
    if key not in trace.replayed:
        trace.replayed[key] = make()
    found: Kept = trace.replayed[key]
    return found


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

    The arguments are those of ``replay``, whose peaks these are; reserved memory has no limit.
    """
    moments, found = None, list[Peaks]()
    for addresses in placements:
        moments = library_moments(trace) if moments is None else moments
        allocator = CachingAllocator(settings, device_bytes=device_bytes, addresses=addresses)
        with suppress(OutOfMemory):
            Player(trace, allocator, moments).play(len(trace.events))
        found.append(Peaks(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes))
    return found


def library_moments(trace: AllocationTrace) -> list[Moment]:
    """Return the moments at which libraries take memory of their own, in order.

    In a trace without labels the handle is made when the first step begins.
    """
    start = _end_of_loading(trace)
    moments: list[Moment] = [(start, CachingAllocator.kernels_loaded)]
    moments += [(event, methodcaller("host_memory_pinned", size)) for event, size in _pinned(trace)]
    moments += [(event, CachingAllocator.handle_created) for event in _handles(trace, start)]
    return sorted(moments, key=lambda moment: moment[0])


def _handles(trace: AllocationTrace, start: int) -> list[int]:
    """Return the events before which a thread makes its cuBLAS handle."""
    workspaces = {allocation for allocation, label in trace.labels.items() if label == HANDLE_LABEL}
    if not workspaces:
        return [start]
    found = compress(count(), map(workspaces.__contains__, map(itemgetter(1), trace.events)))
    return list(islice((index for index in found if trace.events[index].action == "alloc"), len(workspaces)))


def _pinned(trace: AllocationTrace) -> list[tuple[int, int]]:
    """Return the event before which each block of host memory is pinned, and its bytes."""
    found, waiting = list[tuple[int, int]](), list(reversed(trace.pinned))
    for index, event in enumerate(trace.events if waiting else ()):
        while event.action == "alloc" and waiting and waiting[-1].allocation <= event.allocation:
            found.append((index, waiting.pop().bytes))
    return found


def _end_of_loading(trace: AllocationTrace) -> int:
    """Return the index of the first event of a step; that of the end for a trace without origins."""
    phases = map(itemgetter(2), trace.origins)
    of_steps = (number for number, phase in enumerate(phases) if phase not in BEFORE_THE_STEP)
    first = next(of_steps, None)
    if first is None:
        return len(trace.events)
    return next(compress(count(), map(first.__le__, map(itemgetter(1), trace.events))))


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
