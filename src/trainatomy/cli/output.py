"""Where things go: data to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType

from trainatomy.reporters.text.rendering import console, render


def show(drawing: RenderableType) -> None:
    """Draw on stdout; in a pipe or a file without colour and without blanks at the ends of lines."""
    paper = console()
    if paper.is_terminal:
        paper.print(drawing)
    else:
        print(render(drawing, paper.width), end="")


def show_json(value: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def note(message: str) -> None:
    """Something that a reader should know and that is not data."""
    print(f"note: {message}", file=sys.stderr)


@contextmanager
def progress(message: str) -> Iterator[None]:
    """Show on stderr that work is going on, where somebody is looking."""
    paper = Console(stderr=True)
    if not paper.is_terminal:
        yield
        return
    with paper.status(message):
        yield
