"""A chart of epochs whose samples differ in length: reserved memory over the steps of some orders of the samples."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trainatomy.reporters.charts.style import as_bytes, drawing
from trainatomy.reporters.labels import ALARM, AXES, HIGHLIGHT, MUTED, THROUGHPUT
from trainatomy.reporters.subject_sentences import samples_of_lengths
from trainatomy.results.lengths import LengthsPrediction, OrderPrediction
from trainatomy.results.prediction import Prediction
from trainatomy.units import GIB

WIDTH, HEIGHT = 9.5, 5.0
"""Inches."""
SHOWN = 6
"""Orders that are drawn: the worst one and others."""
_NEAR = 1.25
"""The limit is drawn if it is at most this many times the largest value."""


def draw(prediction: Prediction, ending: str) -> bytes:
    """Return the chart as a file of the format ``ending``: svg, png or pdf."""
    with drawing():
        return as_bytes(figure(prediction), ending)


def figure(prediction: Prediction) -> Figure:
    """Return reserved memory, and the allocated memory of the worst order, over the steps."""
    lengths = prediction.lengths
    assert lengths is not None
    page = Figure(figsize=(WIDTH, HEIGHT))
    axes = page.subplots(gridspec_kw={"top": 0.78, "bottom": 0.11, "left": 0.075, "right": 0.97})
    axes.grid(True, axis="both")
    for order in _others(lengths):
        axes.step(*_series(order, order.reserved_bytes), where="post", color=MUTED, linewidth=1, alpha=0.6)
    axes.plot([], [], color=MUTED, linewidth=1, label="reserved, other orders")
    worst = next(order for order in lengths.orders if order.seed == lengths.worst_seed)
    label = f"reserved, worst order (seed {worst.seed})"
    axes.step(*_series(worst, worst.reserved_bytes), where="post", color=HIGHLIGHT, linewidth=2.2, label=label)
    axes.plot(
        *_series(worst, worst.allocated_bytes), color=THROUGHPUT, linewidth=0.9, label="allocated, the same order"
    )
    _limit(axes, prediction, max(worst.reserved_bytes))
    axes.set_xlabel(AXES["steps"])
    axes.set_ylabel(AXES["reserved"])
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(9, integer=True))
    page.text(0.018, 0.965, f"{prediction.name} on {prediction.gpu.name}", size=13.5, weight="bold", va="top")
    page.text(0.018, 0.905, samples_of_lengths(lengths), size=9, color=MUTED, va="top")
    page.legend(loc="upper left", bbox_to_anchor=(0.01, 0.875), ncols=4, frameon=False, fontsize=8.5)
    return page


def _others(lengths: LengthsPrediction) -> list[OrderPrediction]:
    return [order for order in lengths.orders if order.seed != lengths.worst_seed][: SHOWN - 1]


def _series(order: OrderPrediction, values: tuple[int, ...]) -> tuple[list[int], list[float]]:
    return [step + 1 for step in order.steps], [value / GIB for value in values]


def _limit(axes: Axes, prediction: Prediction, largest: int) -> None:
    """Draw what the context leaves of the GPU's memory, if it is near."""
    limit = prediction.gpu.memory_bytes - prediction.memory.components.context
    if limit <= _NEAR * largest:
        axes.axhline(limit / GIB, color=ALARM, linewidth=1.2, label="what the GPU offers")
