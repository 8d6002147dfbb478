"""Exit codes, and messages on stderr.

0    done
1-9  an error of ``trainatomy.errors``, each with its own code
1    also: the output cannot be written
2    also: an unknown command or option, or an invalid value
70   a bug of trainatomy (EX_SOFTWARE of sysexits.h)
130  interrupted by Ctrl-C (128 + SIGINT); by SIGTERM 143, by SIGHUP 129
141  the reader of the output is gone (128 + SIGPIPE)
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from typing import Any

import typer

from trainatomy.cli import interrupts
from trainatomy.errors import TrainatomyError
from trainatomy.units import printable

BUG = 70
INTERRUPTED = 130
BROKEN_PIPE = 141

# Typer carries its own copy of click and exports one of its usage errors; its base is what every wrong option raises.
UsageError: Any = typer.BadParameter.__mro__[1]


def report(error: BaseException, *, debug: bool) -> int:
    """Report an error on stderr, with a traceback only if ``debug``, and return the exit code.

    Whatever goes wrong after a signal is its consequence, such as a library that was imported in part.
    """
    if _is_broken_pipe(error):
        _close_stdout()
        return BROKEN_PIPE
    if interrupts.exit_code() is not None and not isinstance(error, KeyboardInterrupt):
        return report(KeyboardInterrupt(), debug=debug)
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    if _cannot_write(error):
        _close_stdout()
    code, message = _explained(error)
    if message:
        with contextlib.suppress(OSError):
            print(printable(message), file=sys.stderr)
    return code


def explain_exit(code: int) -> int:
    """Report an interrupt that the command-line parser caught, and return its exit code, else ``code``."""
    return report(KeyboardInterrupt(), debug=False) if code == INTERRUPTED else code


def _explained(error: BaseException) -> tuple[int, str]:
    if isinstance(error, TrainatomyError):
        return error.exit_code, f"error: {error}"
    if isinstance(error, UsageError):
        return 2, _usage(error)
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return interrupts.exit_code() or INTERRUPTED, "interrupted"
    if isinstance(error, OSError) and error.filename is not None:
        return 1, f"error: {error.filename}: {error.strerror}"
    if _cannot_write(error):
        return 1, f"error: the output cannot be written: {getattr(error, 'strerror', None) or error}"
    if isinstance(error, MemoryError):
        return 1, "error: this machine is out of memory; a prediction needs little, so another process holds it"
    return BUG, _bug(error)


def _usage(error: BaseException) -> str:
    """Return what is wrong with the command line; an empty string where help was shown instead of a command."""
    message = getattr(error, "format_message", error.__str__)().strip()
    if not message:
        return ""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "trainatomy"
    return f"error: {message}\nTry '{command} --help'."


def _bug(error: BaseException) -> str:
    said = str(error).strip().splitlines()
    what = f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
    return f"error: this is a bug in trainatomy ({what}); run again with --debug and report the output"


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
