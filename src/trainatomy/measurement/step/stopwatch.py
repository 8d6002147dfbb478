"""Time steps on the GPU by CUDA events, without waiting for them.  Takes no GPU memory."""

from __future__ import annotations

from collections import deque
from contextlib import suppress

import torch


class Stopwatch:
    """CUDA events at each ``tick``; the time between two is a step.  They are read once the GPU has passed them.

    Attributes:
        seconds: Duration of each step.
        ends: End of each step in GPU seconds since the first tick, what was left out included.
    """

    def __init__(self, device: int | None = None) -> None:
        """Time GPU ``device`` (``None``: the current device at each tick)."""
        self._device = device
        self._pending: deque[tuple[torch.cuda.Event, bool]] = deque()
        self._since_first_tick = 0.0
        self.seconds: list[float] = []
        self.ends: list[float] = []

    def tick(self) -> None:
        """Record an event behind the work that the GPU has queued so far."""
        self._record(ends_step=True)

    def leave_out(self) -> None:
        """Leave the time since the last tick out of the next step.

        While the GPU is behind, that is no time at all, and the work that was left out delayed nothing.
        """
        self._record(ends_step=False)

    def _record(self, *, ends_step: bool) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._pending.append((event, ends_step))
        self._read()

    def finish(self) -> None:
        """Read the events that the GPU has passed: all of them after a synchronisation.

        After a CUDA error, which every later query raises again, the events left cannot be read.
        """
        with suppress(RuntimeError):
            self._read()

    def _read(self) -> None:
        while len(self._pending) > 1 and self._pending[1][0].query():
            begin, _ = self._pending.popleft()
            end, ends_step = self._pending[0]
            seconds = begin.elapsed_time(end) / 1000
            self._since_first_tick += seconds
            if ends_step:
                self.seconds.append(seconds)
                self.ends.append(self._since_first_tick)
