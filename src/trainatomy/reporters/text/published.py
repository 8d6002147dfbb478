"""Predictions beside what was published: memory, and the time of as many samples as the source took."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from trainatomy.reporters.text.rendering import figures, section
from trainatomy.reporters.text.verdict import verdict_cell
from trainatomy.units import mebibytes, seconds, signed_percent

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from trainatomy.results.comparison import Comparison


def published_memory(comparison: Comparison) -> Table:
    """With MiB throughout, the unit of the published figures."""
    table = figures("training", "verdict", numbers=("\npredicted", "\npublished", "\nerror", "to the\nfirst"))
    first = mebibytes(comparison.predictions[0].memory.device_bytes)
    for index, row in enumerate(comparison.rows):
        if row.prediction is None or row.published is None:
            continue
        known = mebibytes(row.published.memory_bytes)
        predicted = mebibytes(row.prediction.memory.device_bytes)
        error, change = signed_percent(predicted - known, known), f"{predicted - first:+d}" if index else ""
        table.add_row(row.name, verdict_cell(row.prediction), str(predicted), str(known), error, change)
    return table


def published_times(comparison: Comparison) -> list[RenderableType]:
    """A section with the time of as many samples as the source took; nothing where it gives no times."""
    samples = comparison.samples
    rows = [
        (row.name, row.prediction.time, row.published.seconds)
        for row in comparison.rows
        if row.prediction is not None and row.prediction.time is not None and row.published and row.published.seconds
    ]
    if not samples or not rows:
        return []
    table = figures("training", numbers=("predicted", "9 in 10", "published", "error"))
    for name, time, known in rows:
        ours = samples / time.samples_per_second
        least, most = (ours * end / time.step_seconds for end in time.interval_seconds)
        between = f"{least:.0f} to {most:.0f} s"
        table.add_row(name, seconds(ours), between, seconds(known), signed_percent(ours - known, known, 0))
    priced = "; ".join(dict.fromkeys(time.priced_by for _, time, _ in rows))
    return [section(f"Time of {samples} samples", table, Text(), Text(f"Priced by: {priced}.", style="dim"))]
