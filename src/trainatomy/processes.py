"""Processes that end with the one that started them, and the signals that end a command."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals that end a command: Ctrl-C, what `docker stop` and job schedulers send, a terminal that is closed."""
SERVER_PARENT = "TRAINATOMY_SERVER_PARENT"
"""Variable of the process that workers are forked from: the id of its parent, if that one's main thread started it."""
ORPHANED = 1
"""Exit code of a process whose parent was gone before it could say that it wants to end with it."""
_PR_SET_PDEATHSIG = 1


@contextmanager
def ending_blocked() -> Iterator[None]:
    """Start processes inside the block that hear no signal that ends a command before they unblock them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_interrupts() -> None:
    """Leave Ctrl-C and the end of the terminal to the process that started this one, as ``ending_blocked`` did."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def end_with_parent(parent: int | None = None) -> None:
    """Ask Linux to kill this process when its parent ends, however that happens.

    Linux takes the thread that started this process for its parent, so that thread has to live as long as its process.

    Args:
        parent: Process id of the parent, which may have ended already; by default, it is still alive.
    """
    parent = parent or os.getppid()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(ORPHANED)
