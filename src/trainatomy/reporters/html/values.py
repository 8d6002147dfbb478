"""Contents of a page, as plain values: the template and the script of the page only draw them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

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
