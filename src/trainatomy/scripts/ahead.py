"""Steps beyond those that were asked for, where they decide what comes later.

A later batch may hold the longest sample of the data set (``longest.py``).  Memory that has grown in each step may go
on growing, or be a loader that fills its queue: further steps show which.
"""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING

from trainatomy.analysis.growth import growth_of, live_bytes
from trainatomy.results.script import MANY_STEPS

if TYPE_CHECKING:
    from trainatomy.scripts.observer import ScriptObserver

FURTHER_STEPS = 2
"""Steps that show whether memory goes on growing."""
_SLOWLY = 1000
"""Steps from which on it grows so slowly that it may be a pool of samples that is filled, such as that of a GAN."""
_MOST_STEPS = 64
_SECONDS = 15.0
"""Further steps that show whether it goes on growing slowly, and the time for them."""


class StepsAhead:
    """Decides whether a loop goes on after its steps are over.

    Args:
        observer: Observer of the loop.
        gpu_bytes: Memory of the GPU.
        looks_ahead: False: it never does.
    """

    def __init__(self, observer: ScriptObserver, gpu_bytes: int, *, looks_ahead: bool) -> None:
        self._observer = observer
        self._gpu_bytes = gpu_bytes
        self._looks_ahead = looks_ahead
        self._steps = 0
        self._began = 0.0

    def goes_on(self) -> bool:
        """Return whether another step is executed; called when one is about to begin after all that were asked for."""
        if not self._looks_ahead:
            return False
        if not self._observer.longest.goes_on() and not self._may_grow():
            return False
        self._observer.go_ahead()
        return True

    def _may_grow(self) -> bool:
        """Return whether memory has grown in the last steps, and a further one shows whether it goes on."""
        self._began = self._began or time.monotonic()
        is_late = time.monotonic() - self._began > _SECONDS
        if self._steps >= _MOST_STEPS or (self._steps >= FURTHER_STEPS and is_late):
            return False
        trace = self._observer.recorder.trace
        growth = growth_of(trace, 0)
        if growth is None:
            return False
        left = (self._gpu_bytes - live_bytes(trace)) // growth.bytes_per_step
        if self._steps >= FURTHER_STEPS and not _SLOWLY < left < MANY_STEPS:
            return False
        self._steps += 1
        gc.collect()  # what only waits for Python's collector is no growth
        return True
