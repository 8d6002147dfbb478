"""Building blocks of text pages, and how a page becomes characters on a terminal or in a string."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from trainatomy.units import CONTROLS, printable

WIDEST = 120
NARROWEST = 60
_UNKNOWN_TERMINAL = (100, 24)
_GAP = 2


class Paper(Console):
    """A console that shows foreign text and lets none of it command the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render without the control characters of texts; those of live lines and colours stay."""
        for segment in super().render(renderable, options):
            is_clean = segment.control or CONTROLS.isdisjoint(segment.text)
            yield segment if is_clean else segment._replace(text=printable(segment.text))


def error_paper() -> Paper:
    """Return a console for standard error: progress and live views."""
    return Paper(stderr=True, highlight=False)


def console() -> Paper:
    """Return a console for standard output, as wide as the terminal up to ``WIDEST`` columns."""
    width = shutil.get_terminal_size(_UNKNOWN_TERMINAL).columns
    return Paper(width=max(NARROWEST, min(width, WIDEST)), highlight=False, soft_wrap=False)


def render(drawing: RenderableType, width: int = 80) -> str:
    """Return ``drawing`` as plain text, without colour and trailing blanks."""
    buffer = Paper(file=io.StringIO(), width=width, highlight=False, color_system=None, legacy_windows=False)
    with buffer.capture() as capture:
        buffer.print(drawing)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def section(title: str, *body: RenderableType) -> Group:
    """Return a titled part of a page: an empty line, the title, and the body indented by two columns."""
    return Group(Text(), Text(title, style="bold"), *(Padding(part, (0, 0, 0, 2)) for part in body))


def figures(*titles: str, numbers: Sequence[str], folded: int = 0) -> Table:
    """Return an empty table with columns of text, then of numbers.

    Args:
        titles: Titles of the text columns.
        numbers: Titles of the number columns.
        folded: The text column that folds where the page is narrow.
    """
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
    for index, title in enumerate(titles):
        table.add_column(title, overflow="fold", no_wrap=index != folded, vertical="top")
    for title in numbers:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def grid(*justify: str) -> Table:
    """Return an empty table without titles, with one column for each of ``left`` and ``right``."""
    table = Table.grid(padding=(0, _GAP, 0, 0))
    for side in justify:
        table.add_column(justify=side, no_wrap=side == "right", overflow="fold")  # type: ignore[arg-type]
    return table


@dataclass(frozen=True, slots=True)
class Column:
    """A column of figures. ``rank``: columns with the highest rank are left out first; 0 is never left out."""

    title: str
    rank: int = 0
    justify: str = "right"


def swept(names: Sequence[str]) -> tuple[str, list[str]]:
    """Return what names of rows have in common, and the names without it.

    Rows of a sweep over several settings are called ``a=1, b=2``, ``a=1, b=4``: they share ``a, b``, and differ in
    ``1, 2``, ``1, 4``.  Without such settings nothing is in common.
    """
    parts = [[part.partition("=") for part in name.split(", ")] for name in names]
    keys = [tuple(key for key, equals, _ in row if equals) for row in parts]
    if len(names) < 2 or len(keys[0]) < 2 or len(set(keys)) > 1:
        return "", list(names)
    return ", ".join(keys[0]), [", ".join(value if equals else key for key, equals, value in row) for row in parts]


class AdaptiveTable:
    """A table of names and figures that leaves out columns where the page is too narrow for the names.

    The settings that all names of a sweep state are named once, above the table.
    """

    def __init__(self, title: str, columns: Sequence[Column], *, name_width: int = 26) -> None:
        self.title = title
        self.columns = columns
        self.name_width = name_width
        self.rows: list[tuple[str, list[Text]]] = []

    def add_row(self, name: str, *cells: str | Text) -> None:
        """Add a row with one cell for each column."""
        self.rows.append((name, [Text(cell) if isinstance(cell, str) else cell for cell in cells]))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        settings, names = swept([name for name, _ in self.rows])
        if settings:
            yield Text(f"Rows: {settings}", style="dim")
        shown = self._fitting(names, options.max_width)
        table = figures(self.title, numbers=())
        for index in shown:
            column = self.columns[index]
            table.add_column(column.title, justify=column.justify, no_wrap=True)  # type: ignore[arg-type]
        for name, (_, cells) in zip(names, self.rows, strict=True):
            table.add_row(name, *(cells[index] for index in shown))
        yield table
        if len(shown) < len(self.columns):
            titles = [
                " ".join(self.columns[index].title.split()) for index in range(len(self.columns)) if index not in shown
            ]
            yield Text(f"\nOn a wider terminal, also: {', '.join(titles)}.", style="dim")

    def _fitting(self, names: Sequence[str], width: int) -> list[int]:
        """Return the indices of the columns that leave enough width for the names."""
        longest = max(map(cell_len, names), default=0)
        needed = min(self.name_width, max(longest, cell_len(self.title)))
        shown = list(range(len(self.columns)))
        while needed + sum(_GAP + self._width(index) for index in shown) > width:
            worst = max(shown, key=lambda index: (self.columns[index].rank, index))
            if not self.columns[worst].rank:
                break
            shown.remove(worst)
        return shown

    def _width(self, index: int) -> int:
        texts = [self.columns[index].title, *(cells[index].plain for _, cells in self.rows)]
        return max(cell_len(line) for text in texts for line in text.splitlines() or [""])


def bullets(sentences: Sequence[str]) -> Table:
    """Return sentences as a list with hanging indentation; a word longer than the line, such as a path, is divided."""
    table = Table.grid(padding=(0, 1))
    table.add_column()
    table.add_column(overflow="fold")
    for sentence in sentences:
        table.add_row("•", Text(sentence))
    return table


def bar(share: float, width: int) -> str:
    """Return a bar of blocks, to an eighth of a column; any share above 0 is visible.

    Args:
        share: The filled share, 0 to 1.
        width: Columns of a full bar.
    """
    eighths = max(round(share * width * 8), 1 if share > 0 else 0)
    whole, rest = divmod(min(eighths, width * 8), 8)
    return "█" * whole + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[rest]
