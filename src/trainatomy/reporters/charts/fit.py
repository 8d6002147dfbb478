"""A chart of a search: memory against throughput of every executed candidate, and the GPU's limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trainatomy.reporters import settings
from trainatomy.reporters.charts.style import as_bytes, drawing
from trainatomy.reporters.labels import ALARM, AXES, GRID, HIGHLIGHT, INK, MUTED, PAPER, THROUGHPUT
from trainatomy.reporters.settings import FIT_MARKS
from trainatomy.results.fit import Candidate, Fit
from trainatomy.units import GIB, human_bytes, percent, rate

WIDTH, PLOT, BELOW = 9.5, 4.7, 0.55
"""Inches: the width, the height of the plot, and the space below it."""

LINE = 0.19
"""Inches from one line of the heading to the next."""

NAMED = 4
"""Ties that are named; further ones are only marked."""

_BEYOND = 1.6
"""Candidates that need more than this many times the GPU's memory are left out of the plot, and counted."""

_AROUND = ((7, 6), (7, -12), (-12, 6), (-12, -12))
"""Offsets in points of the numbers of ties, so that neighbours do not cover each other."""


def draw(fit: Fit, ending: str) -> bytes:
    """Return the chart as a file of the format ``ending``: svg, png or pdf."""
    with drawing():
        return as_bytes(figure(fit), ending)


def figure(fit: Fit) -> Figure:
    """Return memory against throughput, with the Pareto front and the GPU's limit."""
    heading = _heading(fit)
    above = 0.9 + LINE * len(heading)
    height = above + PLOT + BELOW
    page = Figure(figsize=(WIDTH, height))
    box = {"top": 1 - above / height, "bottom": BELOW / height, "left": 0.075, "right": 0.97}
    axes = page.subplots(gridspec_kw=box)
    axes.grid(True, axis="both")
    timed = [each for each in (*fit.candidates, *fit.too_large) if each.prediction.time is not None]
    shown = [each for each in timed if each.device_bytes <= _BEYOND * fit.gpu.memory_bytes] or timed
    _points(axes, fit, shown)
    _limits(axes, fit, shown)
    _mark(axes, fit)
    if left_out := len(timed) - len(shown):
        note = f"{left_out} more need up to {human_bytes(max(each.device_bytes for each in timed))}"
        axes.text(0.995, 0.985, note, transform=axes.transAxes, ha="right", va="top", size=8, color=ALARM)
    axes.set_xlabel(AXES["memory"])
    axes.set_ylabel(AXES["throughput"])
    axes.xaxis.set_major_locator(MaxNLocator(9))
    _write(page, fit, heading, height)
    return page


def _points(axes: Axes, fit: Fit, shown: Sequence[Candidate]) -> None:
    """Draw every candidate with its interval, and the front."""
    for each in shown:
        low, high = each.samples_per_second_interval
        axes.plot([each.device_bytes / GIB] * 2, [low, high], color=GRID, linewidth=2, zorder=1.5)
    front = [each for each in fit.front if any(each is one for one in shown)]
    axes.plot(*_places(front), color=MUTED, linewidth=1.1, zorder=2.2, label=FIT_MARKS["front"])
    mark: dict[str, Any] = {"linestyle": "", "markeredgecolor": PAPER, "markersize": 7, "zorder": 3}
    fitting, others = [each for each in shown if each.fits], [each for each in shown if not each.fits]
    if fitting:
        axes.plot(*_places(fitting), marker="o", color=THROUGHPUT, label=FIT_MARKS["fits"], **mark)
    if others:
        axes.plot(*_places(others), marker="X", color=ALARM, label=FIT_MARKS["too_large"], **{**mark, "markersize": 9})
    axes.plot([], [], color=GRID, linewidth=2.2, label=FIT_MARKS["interval"])
    axes.set_ylim(0, max((each.samples_per_second_interval[1] for each in shown), default=1.0) * 1.04)


def _places(candidates: Sequence[Candidate]) -> tuple[list[float], list[float]]:
    return [each.device_bytes / GIB for each in candidates], [each.samples_per_second for each in candidates]


def _limits(axes: Axes, fit: Fit, shown: Sequence[Candidate]) -> None:
    """Draw the memory that may be used and the memory of the GPU as vertical lines."""
    usable, total = fit.usable_bytes / GIB, fit.gpu.memory_bytes / GIB
    axes.axvspan(usable, total, color=ALARM, alpha=0.07, linewidth=0, zorder=0.5)
    axes.axvline(usable, color=ALARM, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.axvline(total, color=ALARM, linewidth=1.4, zorder=1)
    sizes = [*(each.device_bytes / GIB for each in shown), usable, total]
    margin = 0.04 * (max(sizes) - min(sizes))
    axes.set_xlim(max(0.0, min(sizes) - margin), max(sizes) + 1.5 * margin)
    turned: dict[str, Any] = {"rotation": 90, "va": "bottom", "size": 8, "color": ALARM}
    places: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    kept = f"{percent(fit.headroom, 1, 0)} kept free"
    axes.annotate(kept, (usable, 0.015), xytext=(-11, 0), **places, **turned)
    axes.annotate(human_bytes(fit.gpu.memory_bytes), (total, 0.015), xytext=(4, 0), **places, **turned)


def _mark(axes: Axes, fit: Fit) -> None:
    """Mark the best candidate and the ties; the numbers of the ties are those of the heading."""
    if fit.best is None:
        return
    star: dict[str, Any] = {"marker": "*", "markersize": 17, "color": HIGHLIGHT, "markeredgecolor": INK}
    axes.plot(*_places([fit.best]), linestyle="", zorder=4, label=FIT_MARKS["best"], **star)
    if not fit.ties:
        return
    ring: dict[str, Any] = {"marker": "o", "markersize": 11, "markerfacecolor": "none", "markeredgecolor": INK}
    axes.plot(*_places(fit.ties), linestyle="", zorder=5, label=FIT_MARKS["tie"], **ring)
    for number, each in enumerate(fit.ties[:NAMED]):
        place = each.device_bytes / GIB, each.samples_per_second
        beside: dict[str, Any] = {"textcoords": "offset points", "size": 8.5, "weight": "bold", "zorder": 6}
        axes.annotate(str(number + 1), place, xytext=_AROUND[number], **beside)


def _heading(fit: Fit) -> list[str]:
    """Return the best settings and the ties, a line each."""
    if fit.best is None:
        return ["nothing fits"]
    figures = f"{rate(fit.best.samples_per_second)} samples/s, {human_bytes(fit.best.device_bytes)}"
    lines = [f"best: {settings.settings_of(fit.best)}: {figures}"]
    lines += [f"{number}: {settings.differences(each, fit.best)}" for number, each in enumerate(fit.ties[:NAMED], 1)]
    return [*lines, f"and {len(fit.ties) - NAMED} more may be as fast"] if len(fit.ties) > NAMED else lines


def _write(page: Figure, fit: Fit, heading: Sequence[str], height: float) -> None:
    """Write the title, the heading and the legend."""
    left = 0.018
    page.text(left, 1 - 0.14 / height, f"{fit.name} on {fit.gpu.name}", size=13.5, weight="bold", va="top")
    searched = f"predicted without a GPU, effective batch size {fit.effective_batch_size}"
    page.text(left, 1 - 0.42 / height, searched, size=9, color=MUTED, va="top")
    for number, line in enumerate(heading):
        style: dict[str, Any] = {"weight": "bold"} if number == 0 else {"color": MUTED}
        page.text(left, 1 - (0.64 + LINE * number) / height, line, size=9, va="top", **style)
    page.legend(
        loc="upper left",
        bbox_to_anchor=(left - 0.008, 1 - (0.6 + LINE * len(heading)) / height),
        ncols=6,
        frameon=False,
        fontsize=8.5,
        columnspacing=1.4,
        handletextpad=0.5,
    )
