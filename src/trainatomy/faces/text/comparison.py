"""Several predictions side by side, with the difference to the first and, where there is one, the published figure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainatomy.faces.text.rendering import figures
from trainatomy.faces.text.verdict import STYLES
from trainatomy.facts.published import PublishedTable
from trainatomy.results.bill import Prediction
from trainatomy.units import difference, human_bytes, mebibytes, signed_percent


def comparison_page(predictions: Sequence[Prediction], published: PublishedTable | None = None) -> Group:
    """One row a prediction.  ``published``: what others measured of the same trainings, in the same order."""
    cards = {prediction.card.name: prediction.card.memory_bytes for prediction in predictions}
    several = len(cards) > 1
    where = "" if several else "".join(f" on {name} ({human_bytes(memory)})" for name, memory in cards.items())
    table = _published_table(predictions, published) if published else _table(predictions, with_card=several)
    parts: list[RenderableType] = [Text(f"Memory at the peak{where}", style="bold"), Text(), table]
    if published:
        parts += [
            Text(),
            Text(f"MiB throughout, as the source counts (its MB). Published: {published.source}.", style="dim"),
        ]
    return Group(*parts)


def _table(predictions: Sequence[Prediction], *, with_card: bool) -> Table:
    table = figures("training", "verdict", numbers=("device\nmemory", "to the\nfirst", "\nallocated", "\nreserved"))
    if with_card:
        table.add_column("\ncard", no_wrap=True)
    first = predictions[0].memory.device_bytes
    for index, prediction in enumerate(predictions):
        memory = prediction.memory
        change = difference(memory.device_bytes - first) if index else ""
        sizes = (memory.peak_allocated_bytes, memory.peak_reserved_bytes)
        cells: list[RenderableType] = [
            prediction.name,
            _verdict(prediction),
            human_bytes(memory.device_bytes),
            change,
            *map(human_bytes, sizes),
        ]
        table.add_row(*cells, *([prediction.card.id] if with_card else []))
    return table


def _published_table(predictions: Sequence[Prediction], published: PublishedTable) -> Table:
    """With MiB throughout, the unit of the published figures."""
    table = figures("training", "verdict", numbers=("\npredicted", "\npublished", "\nerror", "to the\nfirst"))
    first = mebibytes(predictions[0].memory.device_bytes)
    for index, (prediction, run) in enumerate(zip(predictions, published.rows, strict=True)):
        known = mebibytes(run.memory_bytes)
        predicted = mebibytes(prediction.memory.device_bytes)
        error, change = signed_percent(predicted - known, known), f"{predicted - first:+d}" if index else ""
        table.add_row(prediction.name, _verdict(prediction), str(predicted), str(known), error, change)
    return table


def _verdict(prediction: Prediction) -> Text:
    return Text(prediction.verdict, style=STYLES[prediction.verdict])
