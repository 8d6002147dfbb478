"""Turn the pages for terminals into sections of a report: the same tables, lists and sentences."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from trainatomy.reporters.html.values import Block, Cell, CodeBlock, ListBlock, Section, TableBlock, TextBlock, Tone
from trainatomy.reporters.labels import SECTIONS

_WIDTH = 240
"""Columns of the page that tables adapt to: all of their columns are wanted."""
_BULLET = "•"
_BLOCKS = frozenset("█▏▎▍▌▋▊▉ ")
_CODE = frozenset(SECTIONS[name] for name in ("fit_python", "fit_launch", "fit_yaml", "fit_flags"))
"""Titles of sections whose text is to be pasted."""


def sections_of(page: RenderableType) -> list[Section]:
    """Return a page as sections; what precedes the first title is a section without one."""
    sections: list[tuple[str, list[Block]]] = [("", [])]
    is_after_gap = True
    for item in _flat(page):
        if isinstance(item, Text) and not item.plain.strip():
            is_after_gap = True
            continue
        if is_after_gap and isinstance(item, Text) and _tone(item) == "strong" and "\n" not in item.plain:
            sections.append((item.plain, []))
        else:
            title, blocks = sections[-1]
            blocks += [block] if (block := _block(item, is_code=title in _CODE)) else []
        is_after_gap = False
    return [Section(title, tuple(blocks)) for title, blocks in sections if blocks]


def _flat(item: RenderableType) -> Iterator[RenderableType]:
    """Yield the texts and tables of a page in order."""
    if isinstance(item, Group):
        for part in item.renderables:
            yield from _flat(part)
    elif isinstance(item, Padding):
        yield from _flat(item.renderable)
    elif isinstance(item, Text | Table):
        yield item
    elif isinstance(item, str):
        yield Text(item)
    else:
        paper = Console(file=io.StringIO(), width=_WIDTH)
        parts: Iterable[Any] = item.__rich_console__(paper, paper.options)  # type: ignore[union-attr]
        for each in parts:
            yield from _flat(each)


def _block(item: RenderableType, *, is_code: bool) -> Block | None:
    if isinstance(item, Text):
        if is_code:
            return CodeBlock(item.plain.rstrip("\n"))
        return TextBlock(item.plain.strip(), _tone(item))
    assert isinstance(item, Table)
    return _table(item)


def _table(table: Table) -> Block | None:
    columns = [[_cell(each, column.justify == "right") for each in column.cells] for column in table.columns]
    if not columns or not columns[0]:
        return None
    if len(columns) == 2 and all(cell.text == _BULLET for cell in columns[0]):
        return ListBlock(tuple(cell.text for cell in columns[1]))
    ruled = {place for place, cell in enumerate(table.columns[0]._cells) if isinstance(cell, Rule)}
    rows = tuple(row for place, row in enumerate(zip(*columns, strict=True)) if place not in ruled)
    head: tuple[Cell, ...] = ()
    if table.show_header:
        head = tuple(
            Cell(" ".join(_text(column.header).plain.split()), is_number=column.justify == "right")
            for column in table.columns
        )
        rows = tuple(row[1:] if len(row) > len(head) else row for row in rows)
    return TableBlock(rows, head)


def _cell(content: RenderableType, is_number: bool) -> Cell:
    if isinstance(content, Rule):
        return Cell("")
    text = _text(content)
    plain = text.plain
    if plain.strip() and set(plain) <= _BLOCKS:
        return Cell("")  # a bar of characters; the charts show the same
    depth = (len(plain) - len(plain.lstrip(" "))) // 2 or int(plain.startswith(" "))
    return Cell("\n".join(line.strip() for line in plain.splitlines()), _tone(text), is_number, depth=depth)


def _text(content: RenderableType) -> Text:
    return content if isinstance(content, Text) else Text(str(content))


def _tone(text: Text) -> Tone:
    """Return how a text stands out, by its own style or by that of its beginning."""
    style = str(text.style) or next((str(span.style) for span in text.spans if span.start == 0), "")
    for name, tone in _TONES.items():
        if name in style:
            return tone
    return ""


_TONES: dict[str, Tone] = {"red": "bad", "yellow": "warn", "green": "good", "dim": "muted", "bold": "strong"}
