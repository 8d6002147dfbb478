"""The records of a folder as a table: the newest last, beside the prompt."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from trainatomy.reporters.text.rendering import bullets, figures
from trainatomy.results.record import History, Summary
from trainatomy.units import human_bytes, many, rate, seconds, signed_percent

STATUS_STYLES = {"completed": "green", "out of memory": "bold red"}

_BESIDE = 112
_WHOLE = 76

_SHARED: dict[str, Callable[[Summary], str]] = {
    "GPU": lambda row: gpu_name(row.gpu),
    "status": lambda row: row.status,
    "group": lambda row: row.group,
}


def history_page(history: History) -> Group:
    """One row a record.  GPU, status and group have a column where they differ, and are said once where they do not."""
    rows = history.records
    parts: list[RenderableType] = [_headline(history)]
    if rows:
        parts += [Text(), _Table(rows), Text(), Text(_CLOSING, style="dim")]
    if history.skipped:
        parts += [Text(f"\nNot read: {many(len(history.skipped), 'file')} in the folder", style="bold yellow")]
        parts.append(bullets([f"{each.file}: {each.reason}" for each in history.skipped]))
    return Group(*parts)


_CLOSING = (
    "Gap: predicted against measured device memory. "
    "`trainatomy show RECORD` draws one again, `trainatomy diff A B` says what changed."
)


def gpu_name(name: str) -> str:
    """``NVIDIA H200`` -> ``H200``."""
    return name.removeprefix("NVIDIA ").removeprefix("GeForce ")


def short_id(identity: str) -> str:
    """The hash at the end of an id, by which a record can be named too."""
    return identity.rpartition("-")[2]


def _headline(history: History) -> Text:
    rows = history.records
    if not rows:
        none = f"No records in {history.folder}, or none that meets the conditions"
        return Text(f"{none}; `trainatomy measure` writes them.", style="bold")
    line = Text(f"{many(len(rows), 'record')} in {history.folder}", style="bold")
    said = [
        value
        for value, differ in ((value_of(rows[0]), _differ(rows, value_of)) for value_of in _SHARED.values())
        if value and not differ
    ]
    return line.append("".join(f", {value}" for value in said))


def _differ(rows: tuple[Summary, ...], value_of: Callable[[Summary], str]) -> bool:
    return len(set(map(value_of, rows))) > 1


class _Table:
    """The rows, as wide as the page.  What does not fit beside the name stands below it; on the narrowest of pages the
    time of day and samples per second stay away."""

    def __init__(self, rows: tuple[Summary, ...]) -> None:
        self.rows = rows
        self.shown = {title: value_of for title, value_of in _SHARED.items() if _differ(rows, value_of)}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        beside, whole = options.max_width >= _BESIDE, options.max_width >= _WHOLE
        numbers = ("device\nmemory", "\ngap", "step\ntime", "samples\n/s")[: 4 if whole else 3]
        table = figures("\nrecord", "\ndate, UTC", "\nname", numbers=(), folded=2)
        for title in self.shown if beside else ():
            table.add_column(f"\n{title}", overflow="fold", no_wrap=title == "status")
        for title in numbers:
            table.add_column(title, justify="right", no_wrap=True)
        for row in self.rows:
            said = [Text(value_of(row), style=_style(value_of(row))) for value_of in self.shown.values()]
            name = Text(row.name + (f" #{row.repeat + 1}" if row.repeat else ""))
            date = row.created[: 16 if whole else 10].replace("T", " ")
            cells = (
                [name, *said]
                if beside
                else [Text("\n").join(filter(None, [name, Text(", ").join(filter(None, said))]))]
            )
            table.add_row(Text(short_id(row.id), style="cyan"), date, *cells, *_figures(row)[: len(numbers)])
        yield table


def _style(value: str) -> str:
    return STATUS_STYLES.get(value, "")


def _figures(row: Summary) -> tuple[str, ...]:
    return (
        "-" if row.device_bytes is None else human_bytes(row.device_bytes),
        "-" if row.gap is None else signed_percent(row.gap, 1),
        "-" if row.step_seconds is None else seconds(row.step_seconds),
        "-" if row.samples_per_second is None else rate(row.samples_per_second),
    )
