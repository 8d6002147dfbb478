"""Times that threads of this process waited for a processor while they had work to do."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_TASKS = Path("/proc/self/task")


class ThreadMeter:
    """Reads the scheduler's counters of some threads, since it was made (Linux)."""

    def __init__(self, threads: Iterable[int]) -> None:
        self._before = {thread: times for thread in threads if (times := _times(thread)) is not None}

    def read(self) -> float | None:
        """Return the waits as a share of the time in which the threads ran or waited; ``None``: not known.

        A thread that sleeps, because another one works for it, does neither.
        """
        ran = waited = 0
        for thread, before in self._before.items():
            if (after := _times(thread)) is not None:
                ran += after[0] - before[0]
                waited += after[1] - before[1]
        return waited / (ran + waited) if ran > 0 else None


def _times(thread: int) -> tuple[int, int] | None:
    """Return the nanoseconds that a thread ran and waited; ``None`` where the kernel does not count them."""
    with suppress(OSError, ValueError):
        ran, waited, *_ = map(int, (_TASKS / str(thread) / "schedstat").read_text(encoding="ascii").split())
        return ran, waited
    return None
