"""Plays the events of a trace on an allocator bit by bit, as they come.

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
"""

from __future__ import annotations

from collections import deque
from itertools import compress, count, islice
from operator import itemgetter, methodcaller
from typing import TYPE_CHECKING, Final

from trainatomy.allocator.simulated import CachingAllocator, OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from trainatomy.results.trace import AllocationTrace, Event, PlansTried


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
        blocks: Address and size of the blocks of allocations whose place others take later, by their numbers (see
            ``AllocationTrace.places``).
    """

    def __init__(self, trace: AllocationTrace, allocator: CachingAllocator, moments: Sequence[Moment] = ()) -> None:
        self.allocator = allocator
        self.handles: dict[int, int] = {}
        self._trace = trace
        self.blocks: dict[int, tuple[int, int]] = {}
        self._known_special: tuple[tuple[int, int], Collection[int]] = (0, 0), ()
        self._choices = Choices(trace.choices, allocator.malloc, trace.trials, allocator.largest_possible)
        self._moments = deque(moments)
        self._done = 0

    def remember(self, number: int) -> None:
        """Keep the place of the block of an allocation that is held."""
        if handle := self.handles[number]:
            self.blocks[number] = handle, self.allocator.block_bytes(handle)

    def play(self, end: int) -> None:
        """Allocate and release what the next events say, up to the event of that index."""
        while self._moments and self._moments[0][0] <= end:
            event, notify = self._moments.popleft()
            self._play(self._trace.events[self._done : event])
            notify(self.allocator)
            self._done = event
        self._play(self._trace.events[self._done : end])
        self._done = end

    def _special(self) -> Collection[int]:
        """Return the allocations that are no plain requests, or whose place others take."""
        choices, places = self._choices.of, self._trace.places
        if not places:
            return choices
        if self._known_special[0] != (len(choices), len(places)):
            self._known_special = (len(choices), len(places)), {*choices, *places, *places.values()}
        return self._known_special[1]

    def _take(self, allocation: int, requested: int, stream: int) -> int:
        """Allocate one of them, and return its handle."""
        if allocation in self._choices.of:
            return self._choices.take(allocation, requested, stream)
        old = self._trace.places.get(allocation)
        if old is None:
            handle = self.allocator.malloc(requested, stream)
        else:
            handle = self.allocator.malloc_at(*self.blocks[old], requested, stream)
        self.blocks[allocation] = handle, self.allocator.block_bytes(handle)
        return handle

    def _play(self, events: Sequence[Event]) -> None:
        allocator, special, handles = self.allocator, self._special(), self.handles
        for action, allocation, requested, stream in events:
            if action == "alloc" and allocation in special:
                handles[allocation] = self._take(allocation, requested, stream)
            elif action == "alloc":
                handles[allocation] = allocator.malloc(requested, stream)
            elif action == "free":
                allocator.free(handles.pop(allocation))
            else:
                allocator.empty_cache()


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
