"""The latest prediction of each visitor: answers of earlier ones that arrive late are not shown."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

VISITORS = 1000
"""Visitors that are remembered; of more, those who asked longest ago are forgotten."""


class Turns:
    """Numbers the predictions of each visitor."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._latest: OrderedDict[str, int] = OrderedDict()
        self._count = 0

    def next(self, visitor: str) -> int:
        """Return the number of a new prediction, which is the visitor's latest from now on."""
        with self._lock:
            self._count += 1
            self._latest[visitor] = self._count
            self._latest.move_to_end(visitor)
            if len(self._latest) > VISITORS:
                self._latest.popitem(last=False)
            return self._count

    def is_latest(self, visitor: str, turn: int) -> bool:
        """Return whether the visitor has asked for nothing since; a forgotten one has not."""
        with self._lock:
            return self._latest.get(visitor, turn) == turn
