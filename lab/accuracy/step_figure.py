"""The picture of predicted step times, lab/pages/accuracy-time.svg, from errors.json."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import steps
from outcomes import Run
from step_tables import BOUND_TITLES, Timed, percent, timed
from steps import CLOSE, QUICKEST

from trainatomy.reporters.charts.style import as_bytes, drawing
from trainatomy.reporters.labels import INK, MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BOUNDS = {"arithmetic": "#2f5d8c", "memory bandwidth": "#6cae5c", "host": "#d9775f"}
"""Colours of the predicted bounds of a step."""
SHORT = {
    "held out": "Held out",
    "tuning": "Tuned on",
    "notebook": "Notebook",
    "unseen": "Unseen",
    "fresh": "Fresh",
    "H100": "H100",
}
FIRST = "held out"
"""The set whose rows are drawn one by one, each in its fastest session."""
MILLISECONDS = (5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
DOT, SPREAD = 12, 0.25


def draw(run: Run) -> bytes:
    """Draw the SVG: measured against predicted time of held-out rows, and the errors by set and session."""
    from matplotlib.figure import Figure

    found = timed(run.outcomes)
    with drawing():
        figure = Figure(figsize=(11, 5.2), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
        _against(left, found.get((FIRST, QUICKEST)) or [])
        _errors(right, found)
        return as_bytes(figure, "svg")


def _against(axes: Axes, rows: Sequence[Timed]) -> None:
    """Plot predicted against measured milliseconds, coloured by what bounds the step."""
    every = [time for one in rows for time in _times(one)]
    if not every:
        return
    ends = min(every) * 0.8, max(every) * 1.25
    for bound, colour in BOUNDS.items():
        pairs = [_times(one) for one in rows if one.step.bound_by == bound]
        if pairs:
            measured, predicted = zip(*pairs, strict=True)
            axes.scatter(measured, predicted, s=16, color=colour, alpha=0.75, linewidths=0, zorder=3)
    low, high = ([end / (1 + share) for end in ends] for share in (CLOSE, -CLOSE))
    axes.fill_between(ends, low, high, color=MUTED, alpha=0.13, linewidth=0)
    axes.plot(ends, ends, color=MUTED, linewidth=0.8, zorder=1)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured ms", ylabel="predicted ms")
    ticks = [tick for tick in MILLISECONDS if ends[0] <= tick <= ends[1]]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="both")
    axes.set_aspect("equal")
    axes.set_title(
        f"Held-out rows, fastest session; band: ±{CLOSE:.0%}",
        loc="left",
        color=INK,
        fontsize=10,
    )
    _legend(axes)


def _times(one: Timed) -> tuple[float, float]:
    return 1e3 * one.step.measured[one.occasion], 1e3 * one.step.seconds


def _legend(axes: Axes) -> None:
    from matplotlib.lines import Line2D

    style: dict[str, Any] = {"linestyle": "", "markersize": 4.5}
    marks = [
        Line2D([], [], marker="o", color=colour, label=BOUND_TITLES[bound], **style) for bound, colour in BOUNDS.items()
    ]
    axes.legend(handles=marks, loc="upper left", fontsize=8.5, frameon=False, handletextpad=0.1)


def _errors(axes: Axes, found: Mapping[tuple[str, str], Sequence[Timed]]) -> None:
    """Plot every row's error by set and session, with a bar at the median and a summary in words."""
    moved = random.Random(0)
    widest = 0.0
    for place, rows in enumerate(found.values()):
        errors = [100 * one.error for one in rows]
        widest = max(widest, *map(abs, errors))
        heights = [place + moved.uniform(-SPREAD, SPREAD) for _ in rows]
        colours = [BOUNDS[one.step.bound_by] for one in rows]
        axes.scatter(errors, heights, s=DOT, color=colours, alpha=0.75, linewidths=0, zorder=3)
        axes.plot([median(errors)], [place], marker="|", markersize=16, markeredgewidth=2, color=INK, zorder=4)
        middle = percent(median(abs(one.error) for one in rows))
        inside = sum(one.step.holds(one.occasion) for one in rows)
        axes.annotate(
            f"{len(rows)} rows, median {middle};\n{inside} in their interval",
            (1.01, place), xycoords=("axes fraction", "data"), annotation_clip=False,
            va="center", color=MUTED, fontsize=8.5,
        )  # fmt: skip
    axes.axvspan(-100 * CLOSE, 100 * CLOSE, color=MUTED, alpha=0.13, linewidth=0, zorder=0)
    axes.axvline(0, color=MUTED, linewidth=0.8, zorder=1)
    axes.set_yticks(range(len(found)), [f"{SHORT[kind]}:\n{steps.title(occasion)}" for kind, occasion in found])
    axes.set_ylim(len(found) - 0.4, -0.6)
    edge = 5 * (widest // 5 + 1)
    axes.set_xlim(-edge, edge)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:+.0f} %" if value else "0")
    axes.tick_params(labelsize=8.5)
    axes.set_title(
        "Error of the predicted time, by set and session; bars mark medians", loc="left", color=INK, fontsize=10
    )
