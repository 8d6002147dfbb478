"""Local processes of which each predicts training runs that are related to those it predicted before.

A process remembers the micro-batches of its last runs (``simulator/recollections.py``), so a training with the same
ones is predicted in about half the time by the process that remembers them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from typing import Any

KEPT_RUNS = 4
"""Runs that a process remembers, those that were used last; each takes a few MB."""


class RelatedProcesses:
    """Processes with a pool of their own each.

    Args:
        pools: Pools of one process each.
    """

    def __init__(self, pools: Sequence[ProcessPoolExecutor]) -> None:
        self._pools = pools
        self._remembered: list[deque[str]] = [deque(maxlen=KEPT_RUNS) for _ in pools]
        self._running: list[set[Future[Any]]] = [set() for _ in pools]

    def pick(self, kinships: Sequence[str | None]) -> int:
        """Return the place of the training to begin next.

        Args:
            kinships: What is equal for training runs with the same micro-batches; None for one without relatives.
        """
        free = set().union(*(self._remembered[place] for place in self._free()))
        busy = set().union(*self._remembered) - free
        preferred = (
            next((place for place, kinship in enumerate(kinships) if kinship in free), None),
            next((place for place, kinship in enumerate(kinships) if kinship not in busy), None),
        )
        return next((place for place in preferred if place is not None), 0)

    def submit(self, kinship: str | None, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        """Begin to call a function in a free process, if possible in one that remembers a related training."""
        places = self._free() or range(len(self._pools))
        place = min(places, key=lambda one: (kinship not in self._remembered[one], len(self._running[one])))
        future = self._pools[place].submit(function, *arguments)
        self._running[place].add(future)
        future.add_done_callback(self._running[place].discard)
        if kinship is not None:
            with suppress(ValueError):  # a new one
                self._remembered[place].remove(kinship)
            self._remembered[place].append(kinship)
        return future

    def _free(self) -> list[int]:
        return [place for place, running in enumerate(self._running) if not running]
