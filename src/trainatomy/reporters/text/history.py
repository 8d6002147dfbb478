"""The records of a folder as a table, the newest last."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from trainatomy.reporters.labels import STATUS_STYLES
from trainatomy.reporters.text.rendering import bullets, figures
from trainatomy.results.record import History, Summary
from trainatomy.units import human_bytes, many, rate, seconds, signed_percent

_WIDE = 112
"""Columns from which on GPU, status and group have columns of their own."""

_MEDIUM = 76
"""Columns from which on the time of day and samples per second are shown."""

_SHARED: dict[str, Callable[[Summary], str]] = {
    "GPU": lambda row: gpu_name(row.gpu),
    "status": lambda row: row.status,
    "group": lambda row: row.group,
}

_CLOSING = (
    "Gap: predicted against measured device memory. "
    "`trainatomy show RECORD` prints a record again, `trainatomy diff A B` compares two."
)


def history_page(history: History) -> Group:
    """Return a table with one row for each record.

    GPU, status and group have a column where they differ, and are in the headline where they do not.
    """
    rows = history.records
    parts: list[RenderableType] = [_headline(history)]
    if rows:
        parts += [Text(), _Table(rows), Text(), Text(_CLOSING, style="dim")]
    if history.skipped:
        parts += [Text(f"\nNot read: {many(len(history.skipped), 'file')} in the folder", style="bold yellow")]
        parts.append(bullets([f"{each.file}: {each.reason}" for each in history.skipped]))
    return Group(*parts)


def gpu_name(name: str) -> str:
    """Return a short product name: ``NVIDIA H200`` -> ``H200``."""
    return name.removeprefix("NVIDIA ").removeprefix("GeForce ")


def short_id(identity: str) -> str:
    """Return the hash at the end of an id, which also names the record."""
    return identity.rpartition("-")[2]


def _headline(history: History) -> Text:
    rows = history.records
    if not rows:
        none = f"No matching records in {history.folder}"
        return Text(f"{none}; `trainatomy measure` writes them.", style="bold")
    line = Text(f"{many(len(rows), 'record')} in {history.folder}", style="bold")
    shared = [value_of(rows[0]) for value_of in _SHARED.values() if not _differ(rows, value_of)]
    return line.append("".join(f", {value}" for value in shared if value))


def _differ(rows: tuple[Summary, ...], value_of: Callable[[Summary], str]) -> bool:
    return len(set(map(value_of, rows))) > 1


class _Table:
    """The rows, as wide as the page; what does not fit beside the name stands below it."""

    def __init__(self, rows: tuple[Summary, ...]) -> None:
        self.rows = rows
        self.shown = {title: value_of for title, value_of in _SHARED.items() if _differ(rows, value_of)}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide, medium = options.max_width >= _WIDE, options.max_width >= _MEDIUM
        numbers = ("device\nmemory", "\ngap", "step\ntime", "samples\n/s")[: 4 if medium else 3]
        table = figures("\nrecord", "\ndate, UTC", "\nname", numbers=(), folded=2)
        for title in self.shown if wide else ():
            table.add_column(f"\n{title}", overflow="fold", no_wrap=title == "status")
        for title in numbers:
            table.add_column(title, justify="right", no_wrap=True)
        for row in self.rows:
            date = row.created[: 16 if medium else 10].replace("T", " ")
            identity = Text(short_id(row.id), style="cyan")
            table.add_row(identity, date, *self._names(row, wide=wide), *_figures(row)[: len(numbers)])
        yield table

    def _names(self, row: Summary, *, wide: bool) -> list[Text]:
        name = Text(row.name + (f" #{row.repeat + 1}" if row.repeat else ""))
        values = [Text(value_of(row), style=STATUS_STYLES.get(value_of(row), "")) for value_of in self.shown.values()]
        if wide:
            return [name, *values]
        return [Text("\n").join(filter(None, [name, Text(", ").join(filter(None, values))]))]


def _figures(row: Summary) -> tuple[str, ...]:
    return (
        "-" if row.device_bytes is None else human_bytes(row.device_bytes),
        "-" if row.gap is None else signed_percent(row.gap, 1),
        "-" if row.step_seconds is None else seconds(row.step_seconds),
        "-" if row.samples_per_second is None else rate(row.samples_per_second),
    )
