"""Steps beyond those that were asked for, where they decide what comes later.

A later batch may hold the longest sample of the data set (``longest.py``).  Memory that has grown in each step may go
on growing, or be a loader that fills its queue: further steps show which.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from trainatomy.analysis.growth import growth_of

if TYPE_CHECKING:
    from trainatomy.scripts.observer import ScriptObserver

FURTHER_STEPS = 2
"""Steps that show whether memory goes on growing."""


class StepsAhead:
    """Decides whether a loop goes on after its steps are over.

    Args:
        observer: Observer of the loop.
        looks_ahead: False: it never does.
    """

    def __init__(self, observer: ScriptObserver, *, looks_ahead: bool) -> None:
        self._observer = observer
        self._left = FURTHER_STEPS if looks_ahead else 0

    def goes_on(self) -> bool:
        """Return whether another step is executed; called when one is about to begin after all that were asked for."""
        if self._observer.longest.goes_on():
            self._observer.go_ahead()
            return True
        if not self._left or growth_of(self._observer.recorder.trace, 0) is None:
            return False
        self._left -= 1
        gc.collect()  # what only waits for Python's collector is no growth
        self._observer.go_ahead()
        return True
