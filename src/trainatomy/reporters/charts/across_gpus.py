"""A chart of one training, as it is, on GPUs of several kinds: memory, time of a step and, with prices, cost."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trainatomy.reporters.labels import ALARM, AXES, HIGHLIGHT, INK, MUTED, PAPER, THROUGHPUT
from trainatomy.results.comparison import Comparison, ComparisonRow
from trainatomy.results.prediction import Prediction
from trainatomy.units import GIB, human_bytes, rate, seconds

WIDTH, ROW, ABOVE, BELOW = 11.0, 0.40, 0.85, 0.55
"""Inches: the width, the height of a row, and the space above and below the rows."""

BAR = 0.56


def figure(comparison: Comparison) -> Figure:
    """Return a row for each GPU, the fastest first, with a panel for the cost if any GPU has a price."""
    rows = comparison.fastest_first()
    costs = [comparison.cost_per_million_samples(row) for row in rows]
    with_cost = any(cost is not None for cost in costs)
    height = ABOVE + BELOW + ROW * max(len(rows), 3)
    page = Figure(figsize=(WIDTH, height))
    box = {"top": 1 - ABOVE / height, "bottom": BELOW / height, "left": 0.19, "right": 0.975, "wspace": 0.06}
    panels = page.subplots(1, 2 + with_cost, sharey=True, squeeze=False, gridspec_kw=box)[0]
    predictions = [row.prediction for row in rows if row.prediction is not None]
    _memory(panels[0], predictions)
    _times(panels[1], predictions)
    if with_cost:
        _costs(panels[2], costs)
    panels[0].set_yticks(range(len(rows)), [each.gpu.name for each in predictions], size=8.5)
    panels[0].set_ylim(max(len(rows), 1) - 0.5, -0.5)
    page.text(0.018, 1 - 0.14 / height, _title(rows), size=13.5, weight="bold", va="top")
    page.text(0.018, 1 - 0.45 / height, "one training as it is, predicted without a GPU; frames: memory of the GPU",
              size=9, color=MUTED, va="top")  # fmt: skip
    return page


def _title(rows: Sequence[ComparisonRow]) -> str:
    fitting = sum(row.prediction is not None and row.prediction.fits for row in rows)
    return f"Fits on {fitting} of {len(rows)} GPUs"


def _memory(axes: Axes, predictions: Sequence[Prediction]) -> None:
    """Draw what the training needs in a frame as long as the GPU's memory."""
    furthest = 0.0
    for place, each in enumerate(predictions):
        needed, there = each.memory.device_bytes / GIB, each.gpu.memory_bytes / GIB
        colour = THROUGHPUT if each.fits else ALARM
        axes.barh(place, there, BAR, facecolor=PAPER, edgecolor=MUTED, linewidth=0.8)
        axes.barh(place, needed, BAR * 0.6, color=colour)
        text = human_bytes(each.memory.device_bytes) + ("" if each.fits else ": does not fit")
        _write(axes, max(needed, there), place, text, INK if each.fits else ALARM)
        furthest = max(furthest, needed, there)
    _finish(axes, furthest, "memory")


def _times(axes: Axes, predictions: Sequence[Prediction]) -> None:
    """Draw the time of a step with its interval, where the training fits."""
    furthest = 0.0
    for place, each in enumerate(predictions):
        if each.time is None or not each.fits:
            continue
        low, high = (1e3 * end for end in each.time.interval_seconds)
        axes.barh(place, 1e3 * each.time.step_seconds, BAR, color=THROUGHPUT)
        axes.plot([low, high], [place] * 2, color=INK, linewidth=1.1, solid_capstyle="butt")
        pace = f"{seconds(each.time.step_seconds)}, {rate(each.time.samples_per_second)}/s"
        _write(axes, high, place, pace, INK)
        furthest = max(furthest, high)
    _finish(axes, furthest, "step_time")


def _costs(axes: Axes, costs: Sequence[float | None]) -> None:
    known = {place: cost for place, cost in enumerate(costs) if cost is not None}
    cheapest = min(known.values())
    for place, cost in known.items():
        axes.barh(place, cost, BAR, color=HIGHLIGHT, edgecolor=INK if cost == cheapest else "none")
        _write(axes, cost, place, f"{cost:,.2f}{', cheapest' if cost == cheapest else ''}", INK)
    _finish(axes, max(known.values()), "cost")


def _write(axes: Axes, end: float, place: int, text: str, colour: str) -> None:
    axes.annotate(text, (end, place), xytext=(5, 0), textcoords="offset points", va="center", size=8, color=colour)


def _finish(axes: Axes, furthest: float, label: str) -> None:
    axes.set_xlim(0, furthest * 1.7 or 1)
    axes.set_xlabel(AXES[label])
    axes.xaxis.set_major_locator(MaxNLocator(5))
