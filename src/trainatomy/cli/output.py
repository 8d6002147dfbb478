"""Output of the commands: data to stdout, everything else to stderr."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any

from rich.console import RenderableType

from trainatomy import cli
from trainatomy.reporters.text.rendering import console, error_paper, render
from trainatomy.units import CONTROLS, printable

_QUIET_LIBRARIES = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "BITSANDBYTES_NOWELCOME": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


_ESCAPED = {ord(control): f"\\u{ord(control):04x}" for control in CONTROLS}
"""Control characters in JSON; ``json`` escapes those below the blank itself."""


def show(drawing: RenderableType) -> None:
    """Draw on stdout; in a pipe or a file without colour and without trailing blanks."""
    paper = console()
    if paper.is_terminal:
        paper.print(drawing)
    else:
        print(render(drawing, paper.width), end="")


def show_json(value: dict[str, Any]) -> None:
    """Print one JSON object on stdout."""
    cli.has_shown_json = True
    print(json.dumps(value, indent=2, ensure_ascii=False).translate(_ESCAPED))


def show_result(
    write: Callable[..., dict[str, Any]], draw: Callable[..., RenderableType], *result: Any, json: bool
) -> None:
    """Print what ``write`` makes of a result as JSON, or show what ``draw`` makes of it."""
    if json:
        show_json(write(*result))
    else:
        show(draw(*result))


def say(message: str) -> None:
    """Print a line on stderr."""
    print(printable(message), file=sys.stderr, flush=True)


def note(message: str) -> None:
    """Print something on stderr that the user should know and that is not data."""
    say(f"note: {message}")


@contextmanager
def progress(message: str) -> Iterator[Callable[[str], None]]:
    """Show on stderr what is being done, for how long, and the memory of this process, if stderr is a terminal.

    Yields a function that tells the stage.
    """
    paper = error_paper()
    if not paper.is_terminal:
        yield lambda stage: None
        return
    from trainatomy.cli.progress import live_line

    with live_line(paper) as line:
        task = line.add_task(message, total=None)
        yield lambda stage: line.update(task, description=f"{message}: {stage}")


@contextmanager
def quiet_libraries(*, debug: bool) -> Iterator[None]:
    """Send what libraries and user code print to stderr; drop warnings and logs unless ``debug``.

    The file descriptor is redirected too, so that ``os.write(1, …)`` and C code cannot print into the JSON.
    """
    with _stdout_to_stderr(), redirect_stdout(sys.stderr):
        if debug:
            yield
            return
        for name, value in _QUIET_LIBRARIES.items():
            os.environ.setdefault(name, value)
        logging.disable(logging.ERROR)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            logging.disable(logging.NOTSET)


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Let file descriptor 1 be a copy of 2 for a while."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # closed
        yield
        return
    try:
        with suppress(OSError):
            os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
