"""How documents become characters on a terminal or in a string."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from trainatomy.units import CONTROLS, printable

if TYPE_CHECKING:
    from trainatomy.reporters.document import Cell, Column, Table

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


def draw_section(title: str, *body: RenderableType, indent: int = _GAP) -> Group:
    """Return a titled part of a page: an empty line, the title, and the body indented by two columns."""
    return Group(Text(), Text(title, style="bold"), *(Padding(part, (0, 0, 0, indent)) for part in body))


def draw_table(table: Table, width: int) -> Iterator[RenderableType]:
    """Yield a table as wide as its page, with what names of rows share above it, and left out columns below it."""
    shared, table = table.shortened()
    if shared:
        yield Text(f"Rows: {shared}", style="dim")
    columns = table.columns
    shown = [place for place, column in enumerate(columns) if column.since <= width < column.until]
    kept = shown if table.name_width is None else _fitting(table, width)
    drawn = RichTable(
        box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim", show_header=table.is_headed
    )
    for column in (columns[place] for place in kept):
        is_cut = column.justify == "right" and not column.wraps
        drawn.add_column(
            column.title,
            justify=column.justify,
            no_wrap=not column.wraps,
            overflow="ellipsis" if is_cut else "fold",
            **{name: getattr(column, name) for name in ("min_width", "max_width", "ratio", "style")},
        )
    for row in table.rows:
        if row is None:
            drawn.add_row(*[Rule(style="dim", characters="─") for place in kept if columns[place].bars is None])
        else:
            drawn.add_row(*(_drawn_cell(row[place], columns[place], width) for place in kept if place < len(row)))
    yield drawn
    if len(kept) < len(shown):
        titles = [" ".join(columns[place].title.split()) for place in shown if place not in kept]
        yield Text(f"\nOn a wider terminal, also: {', '.join(titles)}.", style="dim")


def _drawn_cell(cell: Cell, column: Column, width: int) -> str | Text:
    if isinstance(cell, str | Text):
        return cell
    taken, least, most = column.bars or (0, 0, width)
    return cell.draw(max(least, min(width - taken, most)))


def _fitting(table: Table, width: int) -> list[int]:
    """Return the indices of the columns that leave enough width for the names."""
    longest = max((cell_len(str(row[0])) for row in table.rows if row), default=0)
    needed = min(table.name_width or 0, max(longest, cell_len(table.columns[0].title)))
    shown = list(range(len(table.columns)))
    while needed + sum(_GAP + _width(table, index) for index in shown[1:]) > width:
        worst = max(shown, key=lambda index: (table.columns[index].rank, index))
        if not table.columns[worst].rank:
            break
        shown.remove(worst)
    return shown


def _width(table: Table, index: int) -> int:
    texts = [table.columns[index].title, *(str(row[index]) for row in table.rows if row)]
    return max(cell_len(line) for text in texts for line in text.splitlines() or [""])


def draw_bullets(sentences: Sequence[str]) -> RichTable:
    """Return sentences as a list with hanging indentation; a word longer than the line, such as a path, is divided."""
    drawn = RichTable.grid(padding=(0, 1))
    drawn.add_column()
    drawn.add_column(overflow="fold")
    for sentence in sentences:
        drawn.add_row("•", Text(sentence))
    return drawn


def bar(share: float, width: int) -> str:
    """Return a bar of blocks, to an eighth of a column; any share above 0 is visible.

    Args:
        share: The filled share, 0 to 1.
        width: Columns of a full bar.
    """
    eighths = max(round(share * width * 8), 1 if share > 0 else 0)
    whole, rest = divmod(min(eighths, width * 8), 8)
    return "█" * whole + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[rest]
