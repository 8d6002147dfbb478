"""The one place where an outcome becomes an exit code and a message on stderr.

0    done
1-8  an error of ``trainatomy.errors``, each with a code of its own
2    also: an unknown command or option, or a value that an option does not take
70   a bug of ours (EX_SOFTWARE of sysexits.h)
130  interrupted (128 + SIGINT)
141  nobody reads the output any more (128 + SIGPIPE)
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from typing import Any

import typer

from trainatomy.errors import TrainatomyError

BUG = 70
INTERRUPTED = 130
BROKEN_PIPE = 141

# Typer carries its own copy of click and exports one of its usage errors; its base is what every wrong option raises.
UsageError: Any = typer.BadParameter.__mro__[1]


def report(error: BaseException, *, debug: bool) -> int:
    """Say on stderr what happened, without a traceback unless ``debug``; returns the exit code."""
    if _is_broken_pipe(error):
        _close_stdout()
        return BROKEN_PIPE
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    code, message = _explained(error)
    if message:
        print(message, file=sys.stderr)
    return code


def explain_exit(code: int) -> int:
    """Say why, where the command-line parser itself ended the run; returns ``code``."""
    if code == INTERRUPTED:
        print("interrupted", file=sys.stderr)
    return code


def _explained(error: BaseException) -> tuple[int, str]:
    if isinstance(error, TrainatomyError):
        return error.exit_code, f"error: {error}"
    if isinstance(error, UsageError):
        return 2, _usage(error)
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return INTERRUPTED, "interrupted"
    if isinstance(error, OSError) and error.filename is not None:
        return 1, f"error: {error.filename}: {error.strerror}"
    if isinstance(error, MemoryError):
        return 1, "error: this machine has no memory left; a prediction needs little, so something else holds it"
    return BUG, _bug(error)


def _usage(error: BaseException) -> str:
    """What is wrong with the command line, and where to read on; nothing where help was shown for want of a command."""
    message = getattr(error, "format_message", error.__str__)().strip()
    if not message:
        return ""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "trainatomy"
    return f"error: {message}\nTry '{command} --help'."


def _bug(error: BaseException) -> str:
    said = str(error).strip().splitlines()
    what = f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
    return f"error: this is a bug of trainatomy ({what}); run again with --debug and report what it prints"


def _is_broken_pipe(error: BaseException | None) -> bool:
    """Whether the reader of stdout went away; rich and typer make it a ``SystemExit`` with the cause as context."""
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            return True
        error = error.__context__ if isinstance(error, SystemExit) else None
    return False


def _close_stdout() -> None:
    """Point stdout at nothing, so that the interpreter does not complain when it flushes at its end."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
