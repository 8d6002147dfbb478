"""How long steps take on the GPU, without waiting for it: CUDA's own time stamps between them."""

from __future__ import annotations

from collections import deque
from contextlib import suppress

import torch


class Stopwatch:
    """A time stamp at each ``tick``; what lies between two is a step.  They are read when the GPU has passed them.

    ``device``: the GPU whose stamps they are (``None``: the current one, which need not be the one that works).
    """

    def __init__(self, device: int | None = None) -> None:
        self._device = device
        self._waiting: deque[torch.cuda.Event] = deque()
        self.seconds: list[float] = []

    def tick(self) -> None:
        """Put a stamp behind what the GPU has to do so far."""
        stamp = torch.cuda.Event(enable_timing=True)
        stamp.record(torch.cuda.current_stream(self._device))
        self._waiting.append(stamp)
        self._read()

    def finish(self) -> None:
        """Read the stamps that the GPU has passed: all of them once it was waited for, none any more after an error of
        CUDA's, which every question to it raises again."""
        with suppress(RuntimeError):
            self._read()

    def _read(self) -> None:
        while len(self._waiting) > 1 and self._waiting[1].query():
            begin = self._waiting.popleft()
            self.seconds.append(begin.elapsed_time(self._waiting[0]) / 1000)
