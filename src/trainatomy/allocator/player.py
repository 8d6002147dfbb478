"""Plays the events of a trace on an allocator bit by bit, where only the allocator's state afterwards is wanted."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from trainatomy.allocator.choices import Choices

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainatomy.allocator.simulated import CachingAllocator
    from trainatomy.results.trace import AllocationTrace, Event


class Player:
    """Player of the events of one trace in their order.

    Args:
        trace: The trace; it may grow.
        allocator: The allocator.
        moments: (event, what to call before it) in order: the moments at which libraries take memory of their own, on
            which addresses of segments depend (``replay.library_moments``).  Those of a trace that grows are not known.
    """

    def __init__(
        self,
        trace: AllocationTrace,
        allocator: CachingAllocator,
        moments: Sequence[tuple[int, Callable[[], None]]] = (),
    ) -> None:
        self.allocator = allocator
        self._trace = trace
        self._choices = Choices(trace.choices, allocator.malloc, trace.trials, allocator.largest_possible)
        self._handles: dict[int, int] = {}
        self._moments = deque(moments)
        self._done = 0

    def play(self, end: int) -> None:
        """Allocate and release what the next events say, up to the event of that index."""
        while self._moments and self._moments[0][0] <= end:
            event, notify = self._moments.popleft()
            self._play(self._trace.events[self._done : event])
            notify()
            self._done = event
        self._play(self._trace.events[self._done : end])
        self._done = end

    def _play(self, events: Sequence[Event]) -> None:
        allocator, choices, handles = self.allocator, self._choices, self._handles
        for action, allocation, requested, stream in events:
            if action == "alloc" and allocation in choices.of:
                handles[allocation] = choices.take(allocation, requested, stream)
            elif action == "alloc":
                handles[allocation] = allocator.malloc(requested, stream)
            elif action == "free":
                allocator.free(handles.pop(allocation))
            else:
                allocator.empty_cache()
