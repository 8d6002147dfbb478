"""A chart of a search on several GPUs: throughput and, with prices, cost of the best settings of each."""

from __future__ import annotations

import textwrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trainatomy.reporters import settings
from trainatomy.reporters.charts.style import as_bytes, drawing
from trainatomy.reporters.labels import ALARM, AXES, HIGHLIGHT, INK, MUTED, THROUGHPUT
from trainatomy.results.fit import FitAcross, GPUOption
from trainatomy.units import human_bytes, percent, rate

WIDTH, ROW, ABOVE, BELOW = 11.0, 0.46, 0.85, 0.55
"""Inches: the width, the height of a row, and the space above and below the rows."""

BAR = 0.56
ASIDE = 44
"""Characters of a line beside a bar."""


def draw_gpus(across: FitAcross, ending: str) -> bytes:
    """Return the chart as a file of the format ``ending``: svg, png or pdf."""
    with drawing():
        return as_bytes(gpus_figure(across), ending)


def gpus_figure(across: FitAcross) -> Figure:
    """Return a row for each GPU, the fastest first, with a panel for the cost if any GPU has a price."""
    options = across.options
    with_cost = any(option.cost_per_million_samples is not None for option in options)
    height = ABOVE + BELOW + ROW * max(len(options), 3)
    page = Figure(figsize=(WIDTH, height))
    box = {"top": 1 - ABOVE / height, "bottom": BELOW / height, "left": 0.19, "right": 0.975, "wspace": 0.06}
    ratios = [2.6, 1][: 1 + with_cost]
    panels = page.subplots(1, 1 + with_cost, sharey=True, squeeze=False, width_ratios=ratios, gridspec_kw=box)[0]
    _throughput(panels[0], options)
    if with_cost:
        _cost(panels[1], options)
    names = [f"{option.gpu.name}\n{human_bytes(option.gpu.memory_bytes)}" for option in options]
    panels[0].set_yticks(range(len(options)), names, linespacing=1.0, size=8.5)
    panels[0].set_ylim(max(len(options), 1) - 0.5, -0.5)
    page.text(0.018, 1 - 0.14 / height, across.name, size=13.5, weight="bold", va="top")
    kept = f"{percent(across.headroom, 1, 0)} of the memory kept free"
    held = f"predicted without a GPU, effective batch size {across.effective_batch_size}, {kept}"
    page.text(0.018, 1 - 0.45 / height, held, size=9, color=MUTED, va="top")
    return page


def _throughput(axes: Axes, options: tuple[GPUOption, ...]) -> None:
    """Draw the throughput with its interval, and write the settings below the figure."""
    furthest = 0.0
    for place, option in enumerate(options):
        best = option.fit.best
        if best is None:
            _write(axes, 0, place, "does not fit", _missing(option), ALARM)
            continue
        low, high = best.samples_per_second_interval
        axes.barh(place, best.samples_per_second, BAR, color=THROUGHPUT)
        axes.plot([low, high], [place] * 2, color=INK, linewidth=1.1, solid_capstyle="butt")
        _write(axes, high, place, rate(best.samples_per_second), settings.settings_of(best), INK)
        furthest = max(furthest, high)
    axes.set_xlim(0, furthest * 2.0 or 1)
    axes.set_xlabel(AXES["throughput"])
    axes.xaxis.set_major_locator(MaxNLocator(7))


def _missing(option: GPUOption) -> str:
    """Return how much memory is missing for the smallest settings."""
    fit = option.fit
    missing = fit.too_large[0].device_bytes - fit.usable_bytes if fit.too_large else 0
    return f"{human_bytes(missing)} short" if missing > 0 else ""


def _cost(axes: Axes, options: tuple[GPUOption, ...]) -> None:
    costs = {
        place: cost for place, option in enumerate(options) if (cost := option.cost_per_million_samples) is not None
    }
    cheapest = min(costs.values())
    for place, cost in costs.items():
        axes.barh(place, cost, BAR, color=HIGHLIGHT, edgecolor=INK if cost == cheapest else "none")
        _write(axes, cost, place, f"{cost:,.2f}", "cheapest" if cost == cheapest else "", INK)
    axes.set_xlim(0, max(costs.values()) * 1.5)
    axes.set_xlabel(AXES["cost"])
    axes.xaxis.set_major_locator(MaxNLocator(4))


def _write(axes: Axes, end: float, place: int, bold: str, aside: str, colour: str) -> None:
    """Write a figure beyond the end of a bar, and what belongs to it beside it."""
    beside: dict[str, Any] = {"textcoords": "offset points", "va": "center"}
    text = axes.annotate(bold, (end, place), xytext=(7, 0), size=9, weight="bold", color=colour, **beside)
    wrapped = "\n".join(textwrap.wrap(aside, ASIDE))
    axes.annotate(wrapped, (1, 0.5), xytext=(5, 0), xycoords=text, size=7.5, color=MUTED, linespacing=1.0, **beside)
