"""One training on several GPUs, a row for each GPU: with the best settings of each, or as it is.

Panels show memory or throughput, and the cost where prices are known.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trainatomy.reporters import settings
from trainatomy.reporters.charts.style import as_bytes, drawing
from trainatomy.reporters.labels import ALARM, AXES, HIGHLIGHT, INK, MUTED, PAPER, THROUGHPUT
from trainatomy.results.comparison import Comparison
from trainatomy.results.fit import FitAcross, GPUOption
from trainatomy.results.prediction import Prediction
from trainatomy.units import GIB, human_bytes, percent, rate, seconds

WIDTH, ABOVE, BELOW = 11.0, 0.85, 0.55
"""Inches: the width, and the space above and below the rows."""

BAR = 0.56
ASIDE = 44
"""Characters after which the settings of a GPU continue on a second line."""


def draw_gpus(across: FitAcross, ending: str) -> bytes:
    """Return the chart as a file of the format ``ending``: svg, png or pdf."""
    with drawing():
        return as_bytes(gpus_figure(across), ending)


def gpus_figure(across: FitAcross) -> Figure:
    """Return the throughput of the best settings on each GPU, the fastest first, and the cost."""
    options = across.options
    costs = _known([option.cost_per_million_samples for option in options])
    page, panels = _panels(len(options), 0.46, [2.6, 1] if costs else [2.6])
    _throughput(panels[0], options)
    if costs:
        _costs(panels[1], costs, _write_aside)
        _finish(panels[1], max(costs.values()) * 1.5, "cost", 4)
    names = [f"{option.gpu.name}\n{human_bytes(option.gpu.memory_bytes)}" for option in options]
    kept = f"{percent(across.headroom, 1, 0)} of the memory kept free"
    held = f"predicted without a GPU, effective batch size {across.effective_batch_size}, {kept}"
    _name(page, panels[0], names, across.name, held, linespacing=1.0)
    return page


def across_figure(comparison: Comparison) -> Figure:
    """Return the memory and the time of a step of one training as it is on each GPU, and the cost."""
    rows = comparison.fastest_first()
    costs = _known([comparison.cost_per_million_samples(row) for row in rows])
    page, panels = _panels(len(rows), 0.40, [1, 1, 1] if costs else [1, 1])
    predictions = [row.prediction for row in rows if row.prediction is not None]
    _memory(panels[0], predictions)
    _times(panels[1], predictions)
    if costs:
        _costs(panels[2], costs, lambda *place, aside: _write(*place, aside=f", {aside}" if aside else ""))
        _finish(panels[2], max(costs.values()) * 1.7, "cost", 5)
    fitting = sum(each.fits for each in predictions)
    title = f"Fits on {fitting} of {len(rows)} GPUs"
    setup = "one training as it is, predicted without a GPU; frames: memory of the GPU"
    _name(page, panels[0], [each.gpu.name for each in predictions], title, setup)
    return page


def _known(costs: Sequence[float | None]) -> dict[int, float]:
    """Return the costs that are known, by the place of their row."""
    return {place: cost for place, cost in enumerate(costs) if cost is not None}


def _panels(count: int, row: float, ratios: Sequence[float]) -> tuple[Figure, Sequence[Axes]]:
    """Return a page with panels side by side for some rows, each of so many inches."""
    height = ABOVE + BELOW + row * max(count, 3)
    page = Figure(figsize=(WIDTH, height))
    box = {"top": 1 - ABOVE / height, "bottom": BELOW / height, "left": 0.19, "right": 0.975, "wspace": 0.06}
    panels = page.subplots(1, len(ratios), sharey=True, squeeze=False, width_ratios=ratios, gridspec_kw=box)
    return page, panels[0]


def _name(page: Figure, axes: Axes, names: Sequence[str], title: str, setup: str, **style: Any) -> None:
    """Name the rows from top to bottom, in a style, and write the title and the setup above them."""
    axes.set_yticks(range(len(names)), names, size=8.5, **style)
    axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
    height = page.get_figheight()
    page.text(0.018, 1 - 0.14 / height, title, size=13.5, weight="bold", va="top")
    page.text(0.018, 1 - 0.45 / height, setup, size=9, color=MUTED, va="top")


def _throughput(axes: Axes, options: tuple[GPUOption, ...]) -> None:
    """Draw the throughput with its interval, and write the settings below the figure."""
    furthest = 0.0
    for place, option in enumerate(options):
        best = option.fit.best
        if best is None:
            _write_aside(axes, 0, place, "does not fit", ALARM, aside=_missing(option))
            continue
        low, high = best.samples_per_second_interval
        axes.barh(place, best.samples_per_second, BAR, color=THROUGHPUT)
        axes.plot([low, high], [place] * 2, color=INK, linewidth=1.1, solid_capstyle="butt")
        _write_aside(axes, high, place, rate(best.samples_per_second), INK, aside=settings.settings_of(best))
        furthest = max(furthest, high)
    _finish(axes, furthest * 2.0, "throughput", 7)


def _missing(option: GPUOption) -> str:
    """Return how much memory is missing for the smallest settings."""
    fit = option.fit
    missing = fit.too_large[0].device_bytes - fit.usable_bytes if fit.too_large else 0
    return f"{human_bytes(missing)} short" if missing > 0 else ""


def _memory(axes: Axes, predictions: Sequence[Prediction]) -> None:
    """Draw what the training needs in a frame as long as the GPU's memory."""
    furthest = 0.0
    for place, each in enumerate(predictions):
        needed, there = each.memory.device_bytes / GIB, each.gpu.memory_bytes / GIB
        axes.barh(place, there, BAR, facecolor=PAPER, edgecolor=MUTED, linewidth=0.8)
        axes.barh(place, needed, BAR * 0.6, color=THROUGHPUT if each.fits else ALARM)
        text = human_bytes(each.memory.device_bytes) + ("" if each.fits else ": does not fit")
        _write(axes, max(needed, there), place, text, INK if each.fits else ALARM)
        furthest = max(furthest, needed, there)
    _finish(axes, furthest * 1.7, "memory", 5)


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
    _finish(axes, furthest * 1.7, "step_time", 5)


def _costs(axes: Axes, costs: Mapping[int, float], write: Callable[..., None]) -> None:
    cheapest = min(costs.values())
    for place, cost in costs.items():
        axes.barh(place, cost, BAR, color=HIGHLIGHT, edgecolor=INK if cost == cheapest else "none")
        write(axes, cost, place, f"{cost:,.2f}", INK, aside="cheapest" if cost == cheapest else "")


def _write(axes: Axes, end: float, place: int, text: str, colour: str, *, aside: str = "") -> None:
    """Write a figure beyond the end of a bar."""
    beside: dict[str, Any] = {"textcoords": "offset points", "va": "center"}
    axes.annotate(f"{text}{aside}", (end, place), xytext=(5, 0), size=8, color=colour, **beside)


def _write_aside(axes: Axes, end: float, place: int, bold: str, colour: str, *, aside: str) -> None:
    """Write a figure beyond the end of a bar, and what belongs to it beside it."""
    beside: dict[str, Any] = {"textcoords": "offset points", "va": "center"}
    text = axes.annotate(bold, (end, place), xytext=(7, 0), size=9, weight="bold", color=colour, **beside)
    wrapped = "\n".join(textwrap.wrap(aside, ASIDE))
    axes.annotate(wrapped, (1, 0.5), xytext=(5, 0), xycoords=text, size=7.5, color=MUTED, linespacing=1.0, **beside)


def _finish(axes: Axes, end: float, label: str, ticks: int) -> None:
    axes.set_xlim(0, end or 1)
    axes.set_xlabel(AXES[label])
    axes.xaxis.set_major_locator(MaxNLocator(ticks))
