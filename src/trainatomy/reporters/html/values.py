"""Contents of a page, as plain values: the template and the script of the page only draw them.

Titles and texts of HTML reports that no other page has; ``{}`` stands for a value.

Turn the pages for terminals into sections of a report: the same tables, lists and sentences.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from trainatomy.reporters.labels import SECTIONS

REPORT = {
    "prediction": "Predicted training",
    "measurement": "Measured training",
    "comparison": "Comparison of training runs",
    "search": "Search for settings",
    "shortage": "Why it does not fit",
    "operation_breakdown": "Operations of a step",
    "timeline": "Memory over the steps",
    "operations": "Operations",
    "measured": "GPU memory, predicted and measured",
    "pareto": "Memory against throughput",
    "steps": "Time of each step",
    "gpus": "GPUs",
    "speeds": "Throughput",
    "device": "device memory",
    "headroom": "headroom",
    "shortfall": "shortfall",
    "allocator": "reserved by PyTorch",
    "reserved": "peak reserved",
    "allocated": "peak allocated",
    "step_time": "time per step",
    "throughput": "throughput",
    "bound": "bound by",
    "bound_by": "bound by",
    "operation_count": "operations",
    "flop": "arithmetic",
    "traffic": "bytes moved",
    "gpu_time": "GPU time",
    "gpu_time_measured": "measured GPU time",
    "per_step": "in one step",
    "least_memory": "least memory",
    "most_memory": "most memory",
    "fastest": "fastest that fits",
    "searched": "candidates",
    "usable": "usable: {}",
    "component": "component",
    "size": "size",
    "bytes": "bytes",
    "share": "of total",
    "holds": "holds",
    "module": "module",
    "operation": "operation",
    "made_in": "made in",
    "before": "load",
    "held_at_peak": "Held at the peak",
    "held_at": "Held after event",
    "intensity": "FLOP per byte",
    "rate": "FLOP per second",
    "groups_timed": "GPU time by phase and group of operations.",
    "groups_flop": "FLOP by phase and group of operations.",
    "roofline": (
        "The heaviest operations by FLOP per byte and rate, and the peak rates of {}; larger points take longer."
    ),
    "pareto_summary": "{} by device memory and throughput; the line joins those that no other beats in both.",
    "ranks_summary": "GPU memory at the peak of each rank.",
    "measured_summary": "GPU memory at the peak, measured and predicted.",
    "steps_summary": "Time of each measured step.",
    "comparison_summary": "GPU memory at the peak of each training.",
    "speed_summary": "Samples per second of all GPUs.",
    "across_memory": "GPU memory of the best settings on each GPU.",
    "across_speed": "Samples per second of the best settings on each GPU.",
    "fitting": "{} of {} predicted training runs fit.",
    "command": "The command that made this report",
    "contents": "Contents",
    "theme": "Switch between light and dark",
    "copy": "Copy",
    "skip": "Skip to the report",
    "no_script": "Charts need JavaScript; every table below is complete without it.",
    "no_unpack": "This browser cannot unpack the timeline; the tables are complete.",
    "timeline_keys": (
        "Left and right move the cursor by an event (with Shift: by a hundredth), plus and minus zoom, P goes to the "
        "peak, Home and End to the ends."
    ),
    "whole": "Whole run",
    "to_peak": "Peak",
    "last_step": "Last step",
    "reserved_line": "reserved",
    "event": "event",
    "total": "allocated",
    "made_with": "Made with trainatomy",
}
"""Titles and texts of HTML reports; ``{}`` stands for a value."""


Tone = Literal["", "muted", "strong", "good", "warn", "bad"]
ChartKind = Literal["stack", "timeline", "treemap", "scatter"]


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: Its text; line breaks are kept.
        tone: How it stands out.
        is_number: Whether it is aligned as a number.
        bar: Length of a bar in its place, 0 to 1.
        colour: Colour of the bar, or of a swatch before the text.
        depth: How far a name is indented.
    """

    text: str
    tone: Tone = ""
    is_number: bool = False
    bar: float | None = None
    colour: str = ""
    depth: int = 0


@dataclass(frozen=True, slots=True)
class TableBlock:
    """A table; the first cell of each row names it."""

    rows: tuple[tuple[Cell, ...], ...]
    head: tuple[Cell, ...] = ()
    caption: str = ""
    kind: str = "table"


@dataclass(frozen=True, slots=True)
class TextBlock:
    """A paragraph."""

    text: str
    tone: Tone = ""
    kind: str = "text"


@dataclass(frozen=True, slots=True)
class ListBlock:
    """Sentences as a list."""

    items: tuple[str, ...]
    kind: str = "list"


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """Text to paste."""

    text: str
    kind: str = "code"


@dataclass(frozen=True, slots=True)
class ChartBlock:
    """A chart: its figures, a sentence that says what it shows, and its height in pixels."""

    name: str
    chart: ChartKind
    summary: str
    data: Mapping[str, Any]
    height: int = 260
    packed: str = ""
    kind: str = "chart"


Block = TableBlock | TextBlock | ListBlock | CodeBlock | ChartBlock


@dataclass(frozen=True, slots=True)
class Section:
    """A titled part of a page; a folded one shows its title until it is opened."""

    title: str
    blocks: tuple[Block, ...]
    is_folded: bool = False


@dataclass(frozen=True, slots=True)
class KeyFigure:
    """A figure that stands out at the top of a page."""

    title: str
    value: str
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """A whole report.

    Attributes:
        title: Name of what is reported.
        kind: What it is: a prediction, a search, …
        verdict: The answer in a word or two, empty if there is none.
        tone: How the verdict stands out.
        answer: Sentences that follow it.
        subject: What was predicted, and what was decided for the user.
        figures: Figures that stand out.
        sections: The parts.
        command: The command that made it, empty if none did.
        origin: How, when and with which versions it was made.
    """

    title: str
    kind: str
    verdict: str
    tone: Tone
    answer: Sequence[str]
    subject: Sequence[str] = ()
    figures: Sequence[KeyFigure] = ()
    sections: Sequence[Section] = field(default_factory=tuple)
    command: str = ""
    origin: str = ""


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
