"""Samples of different lengths: what an epoch holds over several orders of the samples, and how long its steps take."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from trainatomy.reporters import task_sentences
from trainatomy.results.lengths import Distribution, LengthsPrediction
from trainatomy.units import human_bytes, seconds


def lengths_section(lengths: LengthsPrediction) -> list[RenderableType]:
    """Return the body of the section: the samples, the distributions, the tokens."""
    body: list[RenderableType] = [Text(task_sentences.samples_of_lengths(lengths))]
    if lengths.orders:
        body.append(_distributions(lengths))
        body.append(Text(task_sentences.worst_order(lengths)))
    body.append(Text(task_sentences.padding_of_lengths(lengths)))
    if (first := task_sentences.new_lengths(lengths)) is not None:
        body.append(Text(first))
    return body


def _distributions(lengths: LengthsPrediction) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=22)
    for _ in range(3):
        table.add_column(justify="right", no_wrap=True)
    table.add_row("", *(Text(title, style="dim") for title in ("median", "5 to 95 %", "worst")))
    if lengths.peak_allocated_bytes is not None:
        table.add_row("peak allocated", *_cells(lengths.peak_allocated_bytes, _bytes))
    if lengths.peak_reserved_bytes is not None:
        table.add_row("peak reserved", *_cells(lengths.peak_reserved_bytes, _bytes))
    if lengths.step_seconds is not None:
        table.add_row("step", *_cells(lengths.step_seconds, seconds))
    return table


def _cells(found: Distribution, written: Callable[[float], str]) -> tuple[str, str, str]:
    return written(found.median), f"{written(found.low)} to {written(found.high)}", written(found.worst)


def _bytes(count: float) -> str:
    return human_bytes(round(count))
