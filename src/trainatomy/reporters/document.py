"""Documents: everything there is to say about a result, as sections of tables, lists and sentences.

``text/rendering.py`` draws a document on a terminal, ``html/`` in a report.  Sentences and cells are strings, or texts
of rich where parts of them stand out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from trainatomy.reporters.text import rendering


@dataclass(frozen=True, slots=True)
class Bar:
    """A cell that takes the width that other columns leave.

    Attributes:
        draw: Returns the bar for a number of columns of a terminal.
        share: Its length in a report, 0 to 1; None for one that is written as it is drawn.
        colour: Its colour in a report.
    """

    draw: Callable[[int], Text]
    share: float | None = None
    colour: str = ""


@dataclass(frozen=True, slots=True)
class Swatch:
    """A name with its colour in charts."""

    text: str
    colour: str

    def draw(self, width: int) -> Text:
        """Return the name."""
        return Text(self.text)


Cell = str | Text | Bar | Swatch
Justify = Literal["left", "right"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        title: Its title.
        cell: Returns its cell in the row of a value, for ``table``.
        justify: Its side.
        rank: Where the page is too narrow for the names, columns with the highest rank are left out; 0 never.
        is_shown: Whether the table has it.
        wraps: Whether its cells may take several lines.
        since: Width of a page from which on it is shown.
        until: Width of a page from which on it is not shown.
        bars: Of a column of bars: the columns that the others take, and the fewest and most that a bar takes.
    """

    title: str = ""
    cell: Callable[[Any], Cell] = str
    justify: Justify = "right"
    rank: int = 0
    is_shown: bool = True
    wraps: bool = False
    min_width: int | None = None
    max_width: int | None = None
    ratio: int | None = None
    style: str = ""
    since: int = 0
    until: int = sys.maxsize
    bars: tuple[int, int, int] | None = None


def words(title: str = "", cell: Callable[[Any], Cell] = str, *, wraps: bool = True, **options: Any) -> Column:
    """Return a column of text; the options are those of ``Column``."""
    return Column(title, cell, "left", wraps=wraps, **options)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows below the titles of their columns; the first cell names a row, and a row of None is a line.

    Attributes:
        columns: The columns.
        rows: The rows; cells that one does not have are empty.
        is_headed: Whether a terminal shows the titles.
        name_width: Width of names for which columns are left out on narrow pages.  Names of a sweep, ``a=1, b=2``,
            are shortened to what differs.
        caption: What stands above it in a report.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...] | None, ...]
    is_headed: bool = True
    name_width: int | None = None
    caption: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from rendering.draw_table(self, options.max_width)

    def shortened(self) -> tuple[str, Table]:
        """Return the settings that all names of a sweep state, and the table without them."""
        if self.name_width is None:
            return "", self
        shared, names = swept([str(row[0]) for row in self.rows if row])
        rows = tuple((name, *row[1:]) for name, row in zip(names, filter(None, self.rows), strict=True))
        return shared, replace(self, rows=rows)


def table(values: Iterable[Any], *columns: Column, name_width: int | None = None) -> Table:
    """Return a table with a row for each value, and the columns that are shown."""
    shown = tuple(column for column in columns if column.is_shown)
    rows = tuple(tuple(column.cell(value) for column in shown) for value in values)
    return Table(shown, rows, name_width=name_width)


def grid(rows: Iterable[tuple[Cell, ...] | None], *columns: Column | Justify) -> Table:
    """Return a table without titles; a column may be the side of its cells."""
    made = (Column(wraps=each == "left", justify=each) if isinstance(each, str) else each for each in columns)
    return Table(tuple(made), tuple(rows), is_headed=False)


def figures(rows: Iterable[tuple[Cell, ...] | None], *titles: str, numbers: Sequence[str], folded: int = 0) -> Table:
    """Return a table of given rows, with columns of text, of which one may take several lines, then of numbers."""
    texts = (words(title, wraps=index == folded) for index, title in enumerate(titles))
    return Table((*texts, *map(Column, numbers)), tuple(rows))


def styled(style: str, *cells: str) -> tuple[Text, ...]:
    """Return the cells of a row in one style."""
    return tuple(Text(cell, style=style) for cell in cells)


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


@dataclass(frozen=True, slots=True)
class Bullets:
    """Sentences as a list."""

    items: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield rendering.draw_bullets(self.items)


@dataclass(frozen=True, slots=True)
class Subject:
    """What was predicted, in a line, and what was decided for the user."""

    line: str
    assumed: tuple[str, ...] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.line:
            yield Text(self.line)
        if self.assumed:
            yield rendering.draw_bullets(self.assumed)


@dataclass(frozen=True, slots=True)
class Code:
    """Text to paste."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text()
        yield Text(self.text.rstrip("\n"))


@dataclass(frozen=True, slots=True)
class Section:
    """A titled part of a document.

    Attributes:
        title: Its title.
        blocks: Its contents; empty texts are empty lines of a terminal.
        indent: By how many columns they are indented.
        is_folded: Whether a report shows them only to those who open it.
    """

    title: str
    blocks: tuple[Any, ...] = ()
    indent: int = 2
    is_folded: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield rendering.draw_section(self.title, *self.blocks, indent=self.indent)


def section(title: str, *blocks: Any, indent: int = 2) -> Section:
    """Return a section of blocks."""
    return Section(title, blocks, indent)


def listed(title: str, sentences: Sequence[str]) -> list[Section]:
    """Return a section of sentences; none without sentences."""
    return [Section(title, (Bullets(sentences),))] if sentences else []


@dataclass(frozen=True, slots=True)
class Document:
    """A whole page: blocks and sections.  ``title`` stands above them."""

    parts: tuple[Part, ...]
    title: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(self.title, style="bold")
        yield from self.parts

    @property
    def subject(self) -> list[str]:
        """What was predicted, and what was decided for the user."""
        subject = next((part for part in self.parts if isinstance(part, Subject)), Subject(""))
        return [line for line in (subject.line, *subject.assumed) if line]

    @property
    def sections(self) -> list[Section]:
        """The sections, those of documents in it included; what precedes the first title is one without a title.

        They do not repeat the subject.
        """
        found: list[tuple[str, list[Any]]] = [("", [])]
        for part in _flat(self):
            if isinstance(part, str):
                found.append((part, []))
            elif not isinstance(part, Subject):
                found[-1][1].append(part)
        return [Section(title, tuple(blocks)) for title, blocks in found if blocks]


def _flat(part: Any) -> Iterator[Any]:
    """Yield titles as strings, and blocks."""
    if isinstance(part, Document | Section):
        if part.title:
            yield part.title
        for each in part.parts if isinstance(part, Document) else part.blocks:
            yield from _flat(each)
    elif not isinstance(part, Text) or part.plain.strip():
        yield part


Part = Text | Table | Bullets | Subject | Code | Section | Document
"""What a document consists of."""
