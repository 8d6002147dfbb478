"""Contents of a report, as plain values: the template and the script of the page only draw them.

Titles and texts of HTML reports that no other page has; ``{}`` stands for a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.text import Text

from trainatomy.reporters.document import Bar, Cell, Code, Section, Swatch, Table

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
    "size": "size",
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
class ChartBlock:
    """A chart: its figures, a sentence that says what it shows, and its height in pixels."""

    name: str
    chart: ChartKind
    summary: str
    data: Mapping[str, Any]
    height: int = 260
    packed: str = ""


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
"""Columns of a terminal on which all columns of a table are shown."""
_MOST_BAR = 60
_TONES: dict[str, Tone] = {"red": "bad", "yellow": "warn", "green": "good", "dim": "muted", "bold": "strong"}


@dataclass(frozen=True, slots=True)
class DrawnCell:
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
class DrawnTable:
    """A table; the first cell of each row names it, and ``shared`` says what all names have in common."""

    caption: str

    head: tuple[DrawnCell, ...]
    rows: tuple[tuple[DrawnCell, ...], ...]
    shared: str


def drawn_table(table: Table) -> DrawnTable:
    """Return a table as the template draws it."""
    shared, table = table.shortened()
    shown = [place for place, column in enumerate(table.columns) if column.since <= _WIDTH < column.until]
    sides = {place: table.columns[place].justify == "right" for place in shown}
    titles = tuple(DrawnCell(" ".join(table.columns[place].title.split()), is_number=sides[place]) for place in shown)
    rows = tuple(
        tuple(_cell(row[place] if place < len(row) else "", sides[place]) for place in shown)
        for row in table.rows
        if row is not None
    )
    head = titles if any(each.text for each in titles) else ()
    return DrawnTable(table.caption, head, rows, f"Rows: {shared}" if shared else "")


def _cell(cell: Cell, is_number: bool) -> DrawnCell:
    if isinstance(cell, Bar) and cell.share is not None:
        return DrawnCell("", bar=cell.share, colour=cell.colour) if cell.share else DrawnCell("")
    colour = cell.colour if isinstance(cell, Swatch) else ""
    content = cell if isinstance(cell, str | Text) else cell.draw(_MOST_BAR)
    plain = str(content)
    depth = (len(plain) - len(plain.lstrip(" "))) // 2 or int(plain.startswith(" "))
    text = "\n".join(line.strip() for line in plain.splitlines())
    return DrawnCell(text, tone_of(content), is_number, colour=colour, depth=depth)


def tone_of(content: str | Text) -> Tone:
    """Return how a text stands out, by its own style or by that of its beginning."""
    if isinstance(content, str):
        return ""
    style = str(content.style) or next((str(span.style) for span in content.spans if span.start == 0), "")
    return next((tone for name, tone in _TONES.items() if name in style), "")


def kind_of(block: object) -> str:
    """Return which part of the template draws a block."""
    kinds = {Table: "table", Text: "text", Code: "code", ChartBlock: "chart"}
    return kinds.get(type(block), "list")
