"""Signals that end a command: Ctrl-C, SIGTERM and SIGHUP stop it at the same places, each with its own exit code.

None strikes inside an import: code in C swallows the exception there, or a library that was imported in part fails
later. A signal waits until the import is over, and ends the process if that takes too long.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from time import monotonic
from types import FrameType
from typing import NoReturn

from trainatomy.processes import ENDING

LONGEST_WAIT = 0.4
"""Seconds that a signal waits for the end of an import."""
_LOOK_AGAIN = 0.05
_IMPORT = ("<frozen importlib._bootstrap>", "_find_and_load")
_received: list[int] = []
_waits_since = 0.0


def listen() -> None:
    """Raise ``KeyboardInterrupt`` on each signal that ends a command.

    One that is ignored stays so, as under ``nohup``; Ctrl-C is always heard, as a command shows its best so far.
    """
    for number in ENDING:
        if number == signal.SIGINT or signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _interrupt)


def exit_code() -> int | None:
    """Return the exit code of a command that was interrupted, by the first signal; None if no signal came."""
    return 128 + _received[0] if _received else None


def end(code: int, *, silently: bool) -> NoReturn:
    """End a process that was interrupted with this exit code.

    The interpreter does not end it: what was imported in part complains then, and where Ctrl-C met code that ``exec``
    runs, Python kills itself by SIGINT instead of returning a code.

    Args:
        code: The exit code.
        silently: Whether what is done at the end, such as removing temporary folders, prints nothing.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if silently:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    atexit._run_exitfuncs()
    os._exit(code)


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _waits_since
    is_second = bool(_waits_since)
    _received.append(number)
    if not _is_importing(frame):
        raise KeyboardInterrupt
    if is_second:
        _end_import()
    _waits_since = monotonic()
    signal.signal(signal.SIGALRM, _look_again)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_AGAIN, _LOOK_AGAIN)


def _look_again(_: int, frame: FrameType | None) -> None:
    """Interrupt where an import is over."""
    global _waits_since
    if not _is_importing(frame):
        signal.setitimer(signal.ITIMER_REAL, 0)
        _waits_since = 0.0
        raise KeyboardInterrupt
    if monotonic() - _waits_since > LONGEST_WAIT:
        _end_import()


def _end_import() -> NoReturn:
    os.write(2, b"interrupted\n")
    end(exit_code() or 1, silently=True)


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a frame belongs to an import."""
    while frame is not None:
        if (frame.f_code.co_filename, frame.f_code.co_name) == _IMPORT:
            return True
        frame = frame.f_back
    return False
