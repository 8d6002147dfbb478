"""A record: the page of its measurement, with how and when it was asked for."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from trainatomy.reporters.text.measurement import measurement_page
from trainatomy.results.record import Record


def record_page(record: Record) -> Group:
    """What was typed and when, then the page as it was drawn on the day."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_row("record", record.id)
    table.add_row("made", record.created.replace("T", " ").replace("Z", " UTC"))
    if record.command:
        table.add_row("command", Text(record.command))
    if record.group:
        table.add_row("group", Text(f"{record.group}, run {record.repeat + 1}"))
    return Group(table, Text(), measurement_page(record.measurement, record.prediction))
