"""Several predictions side by side, with the difference to the first and, where there is one, the published figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from trainatomy.faces.text.verdict import STYLES
from trainatomy.results.bill import Prediction
from trainatomy.units import difference, human_bytes, mebibytes, signed_percent


def comparison_page(predictions: Sequence[Prediction], published: Mapping[str, int] | None = None) -> Group:
    """One row a prediction.  ``published``: MiB by name of the row, as somebody else measured them."""
    cards = {prediction.card.name: prediction.card for prediction in predictions}
    on_one = f" on {next(iter(cards))} ({human_bytes(next(iter(cards.values())).memory_bytes)})" if len(cards) == 1 else ""
    title = Text(f"Memory at the peak{on_one}", style="bold")
    table = _published_table(predictions, published) if published else _table(predictions, with_card=len(cards) > 1)
    return Group(title, table)


def _table(predictions: Sequence[Prediction], *, with_card: bool) -> Table:
    table = _frame("device memory", "to the first", "allocated", "reserved")
    if with_card:
        table.add_column("card", overflow="fold")
    first = predictions[0].memory.device_bytes
    for index, prediction in enumerate(predictions):
        memory = prediction.memory
        change = difference(memory.device_bytes - first) if index else ""
        sizes = (memory.peak_allocated_bytes, memory.peak_reserved_bytes)
        cells = [prediction.name, _verdict(prediction), human_bytes(memory.device_bytes), change, *map(human_bytes, sizes)]
        table.add_row(*cells, *([prediction.card.name] if with_card else []))
    return table


def _published_table(predictions: Sequence[Prediction], published: Mapping[str, int]) -> Table:
    """With MiB throughout, the unit of the published figures."""
    table = _frame("predicted MiB", "published", "error", "to the first", "allocated")
    first = predictions[0].memory.device_bytes
    for index, prediction in enumerate(predictions):
        memory = prediction.memory
        predicted = mebibytes(memory.device_bytes)
        known = published.get(prediction.name)
        error = "-" if known is None else signed_percent(predicted - known, known)
        change = f"{mebibytes(memory.device_bytes) - mebibytes(first):+d}" if index else ""
        cells = (str(predicted), "-" if known is None else str(known), error, change, str(mebibytes(memory.peak_allocated_bytes)))
        table.add_row(prediction.name, _verdict(prediction), *cells)
    return table


def _frame(*numbers: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="dim")
    table.add_column("training", overflow="fold", ratio=1)
    table.add_column("verdict", no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _verdict(prediction: Prediction) -> Text:
    return Text(prediction.verdict, style=STYLES[prediction.verdict])
