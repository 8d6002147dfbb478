"""From something that rich can draw to characters: on the terminal, or in a string of a fixed width."""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

WIDEST = 120
NARROWEST = 60
_UNKNOWN_TERMINAL = (100, 24)


def console() -> Console:
    """Standard output: as wide as the terminal up to ``WIDEST``, beyond which a line is hard to follow."""
    width = shutil.get_terminal_size(_UNKNOWN_TERMINAL).columns
    return Console(width=max(NARROWEST, min(width, WIDEST)), highlight=False, soft_wrap=False)


def render(drawing: RenderableType, width: int = 80) -> str:
    """``drawing`` as plain text, without colour and without blanks at the ends of lines."""
    paper = Console(file=io.StringIO(), width=width, highlight=False, color_system=None, legacy_windows=False)
    with paper.capture() as capture:
        paper.print(drawing)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def section(title: str, *body: RenderableType) -> Group:
    """A titled part of a page, its body two columns to the right, with an empty line in front."""
    return Group(Text(), Text(title, style="bold"), *(Padding(part, (0, 0, 0, 2)) for part in body))


def figures(*titles: str, numbers: Sequence[str], folded: int = 0) -> Table:
    """An empty table: columns of text, then of numbers; where room is short, the text column ``folded`` folds."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for index, title in enumerate(titles):
        table.add_column(title, overflow="fold", no_wrap=index != folded, vertical="top")
    for title in numbers:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def bullets(sentences: Sequence[str]) -> Table:
    """Sentences, one a line, with hanging indentation."""
    table = Table.grid(padding=(0, 1))
    for sentence in sentences:
        table.add_row("•", Text(sentence))
    return table


def bar(share: float, width: int) -> str:
    """``share`` (0 to 1) of ``width`` columns in blocks, to an eighth of one; what is not nothing is seen."""
    eighths = max(round(share * width * 8), 1 if share > 0 else 0)
    whole, rest = divmod(min(eighths, width * 8), 8)
    return "█" * whole + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[rest]
