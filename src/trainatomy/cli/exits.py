"""Exit codes, and messages on stderr.

0    done
1-9  an error of ``trainatomy.errors``, each with its own code
1    also: the output cannot be written
2    also: an unknown command or option, or an invalid value
70   a bug of trainatomy (EX_SOFTWARE of sysexits.h)
124  stopped by the time limit of a search
130  interrupted by Ctrl-C (128 + SIGINT); by SIGTERM 143, by SIGHUP 129
141  the reader of the output is gone (128 + SIGPIPE)

Signals that end a command: Ctrl-C, SIGTERM and SIGHUP stop it at the same places, each with its own exit code.

None strikes inside an import: code in C swallows the exception there, or a library that was imported in part fails
later. A signal waits until the import is over, and ends the process if that takes too long.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import signal
import sys
import threading
import traceback
from time import monotonic
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import typer

from trainatomy import cli
from trainatomy.cli.output import show_json
from trainatomy.errors import TrainatomyError
from trainatomy.processes import ENDING
from trainatomy.units import printable

LONGEST_WAIT = 0.4
"""Seconds that a signal waits for the end of an import."""
_LOOK_AGAIN = 0.05
_IMPORT = ("<frozen importlib._bootstrap>", "_find_and_load")
_LATE = getattr(signal, "SIGUSR1", signal.SIGTERM)
"""Signal of the time limit."""
_received: list[int] = []
_waits_since = 0.0


def listen() -> None:
    """Raise ``KeyboardInterrupt`` on each signal that ends a command.

    One that is ignored stays so, as under ``nohup``; Ctrl-C is always heard, as a command shows its best so far.
    """
    for number in ENDING:
        if number == signal.SIGINT or signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _interrupt)


def stop_after(seconds: float) -> None:
    """Interrupt the command after this time, as Ctrl-C does."""
    signal.signal(_LATE, _interrupt)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), _LATE))
    timer.daemon = True
    timer.start()


def exit_code() -> int | None:
    """Return the exit code of a command that was interrupted, by the first signal; None if no signal came."""
    if not _received:
        return None
    return TIMED_OUT if _received[0] == _LATE else 128 + _received[0]


def end(code: int, *, silently: bool) -> NoReturn:
    """End a process with this exit code.

    The interpreter does not end it: it takes seconds to take PyTorch and transformers apart.  What a signal left
    imported in part complains then, and where Ctrl-C met code that ``exec`` runs, Python kills itself by SIGINT instead
    of returning a code.

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


BUG = 70
TIMED_OUT = 124
INTERRUPTED = 130
BROKEN_PIPE = 141
_INTERRUPTION = "Interrupted"

# Typer carries its own copy of click and exports one of its usage errors; its base is what every wrong option raises.
UsageError: Any = typer.BadParameter.__mro__[1]


def report(error: BaseException, *, debug: bool, json: bool = False) -> int:
    """Report an error on stderr, with a traceback only if ``debug``, and return the exit code.

    Whatever goes wrong after a signal is its consequence, such as a library that was imported in part.

    Args:
        error: The error.
        debug: Whether to show a traceback.
        json: Whether to print it on stdout as a JSON object too, if nothing else was printed there.
    """
    if _is_broken_pipe(error):
        _close_stdout()
        return BROKEN_PIPE
    if exit_code() is not None and not isinstance(error, KeyboardInterrupt):
        return report(KeyboardInterrupt(), debug=debug, json=json)
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    if _cannot_write(error):
        _close_stdout()
    found = _explained(error)
    with contextlib.suppress(OSError):
        if found.message:
            print(printable(found.text), file=sys.stderr)
        if found.message and json and not cli.has_shown_json:
            _show_json(found)
    return found.code


def _show_json(found: Explained) -> None:
    from trainatomy.reporters.json import error_to_json

    show_json(error_to_json(found.code, found.kind, found.message))
    sys.stdout.flush()


class Explained(NamedTuple):
    """An error in words: its exit code, its kind, what is wrong, and where to read more."""

    code: int
    kind: str
    message: str
    hint: str = ""

    @property
    def text(self) -> str:
        """What standard error shows."""
        return self.message if self.kind == _INTERRUPTION else f"error: {self.message}{self.hint}"


def explain_exit(code: int, *, json: bool = False) -> int:
    """Report an interrupt that the command-line parser caught, and return its exit code, else ``code``."""
    return report(KeyboardInterrupt(), debug=False, json=json) if code == INTERRUPTED else code


def _explained(error: BaseException) -> Explained:
    kind = type(error).__name__
    if isinstance(error, TrainatomyError):
        return Explained(error.exit_code, kind, str(error))
    if isinstance(error, UsageError):
        return _usage(error)
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        code = exit_code() or INTERRUPTED
        return Explained(code, _INTERRUPTION, "stopped by the time limit" if code == TIMED_OUT else "interrupted")
    if isinstance(error, OSError) and error.filename is not None:
        return Explained(1, kind, f"{error.filename}: {error.strerror}")
    if _cannot_write(error):
        return Explained(1, kind, f"the output cannot be written: {getattr(error, 'strerror', None) or error}")
    if isinstance(error, MemoryError):
        return Explained(
            1, kind, "this machine is out of memory; a prediction needs little, so another process holds it"
        )
    return Explained(BUG, "Bug", _bug(error))


def _usage(error: BaseException) -> Explained:
    """Return what is wrong with the command line; an empty message where help was shown instead of a command."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "trainatomy"
    message = getattr(error, "format_message", error.__str__)().strip()
    return Explained(2, "UsageError", message, f"\nTry '{command} --help'.")


def _bug(error: BaseException) -> str:
    said = str(error).strip().splitlines()
    what = f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
    return f"this is a bug in trainatomy ({what}); run again with --debug and report the output"


def _cannot_write(error: BaseException) -> bool:
    """Return whether stdout is full or closed (/dev/full, `>&-`)."""
    return (
        isinstance(error, OSError) and error.filename is None and error.errno in (errno.ENOSPC, errno.EBADF, errno.EIO)
    )


def _is_broken_pipe(error: BaseException | None) -> bool:
    """Return whether the reader of stdout is gone; rich and typer raise ``SystemExit`` in the context of the cause."""
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            return True
        error = error.__context__ if isinstance(error, SystemExit) else None
    return False


def _close_stdout() -> None:
    """Redirect stdout to /dev/null, so that the interpreter can flush it when it ends."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
