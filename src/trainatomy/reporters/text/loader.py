"""Page of ``trainatomy data``: a DataLoader by its settings."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainatomy.reporters import loader_sentences
from trainatomy.reporters.labels import SECTIONS
from trainatomy.reporters.text.rendering import bullets, figures, section
from trainatomy.results.loader import LoaderReport, LoaderTiming
from trainatomy.units import human_bytes, seconds

_HEADS = ("per batch", "first batch", "fetching", "step", "memory", "/dev/shm")


def loader_page(report: LoaderReport) -> Group:
    """Return which settings suffice, the table of all, and what to know about them."""
    style = "bold" if report.step is None else "bold green" if report.best is not None else "bold yellow"
    parts: list[RenderableType] = [Text(loader_sentences.answer(report), style=style)]
    parts += [Text(line) for line in loader_sentences.setup(report)]
    parts.append(section(SECTIONS["loader"], _table(report)))
    if lines := loader_sentences.notes(report):
        parts.append(section(SECTIONS["notes"], bullets(lines)))
    return Group(*parts)


def _table(report: LoaderReport) -> Table:
    table = figures("workers", numbers=_HEADS)
    for place, one in enumerate(report.timings):
        mark = " ←" if place == report.best else ""
        table.add_row(f"{one.settings.num_workers}{mark}", *_cells(one))
    return table


def _cells(one: LoaderTiming) -> list[str]:
    if one.problem:
        return [loader_sentences.PROBLEMS[one.problem], *["-"] * (len(_HEADS) - 1)]
    times = (one.batch_seconds, one.first_batch_seconds, one.fetch_seconds, one.step_seconds)
    memory = "-" if one.worker_bytes is None else human_bytes(one.worker_bytes)
    return [*("-" if each is None else seconds(each) for each in times), memory, human_bytes(one.shared_bytes)]
