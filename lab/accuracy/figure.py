"""Draw lab/pages/accuracy.svg from errors.json and the answers of other tools."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from outcomes import FIGURES, Line, Outcome, Run, family
from rivalry import US, Contender, contenders
from tables import errors
from techniques import PLAIN, TECHNIQUES, techniques

from trainatomy.reporters.charts.style import as_bytes, drawing
from trainatomy.reporters.labels import GRID, INK, MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"allocated": "#2f5d8c", "reserved": "#d9775f", "device": "#6cae5c"}
RIVAL = "#9aa4b1"
LINEAR_PERCENT = 0.01
"""Below this the axis is linear, so that exact predictions can be shown."""
TOOLS_RANGE, TOOLS_TICKS = (-160, 300), (-100, -10, -1, -0.1, 0, 0.1, 1, 10, 100)
GROUPS_RANGE, GROUPS_TICKS = (-40, 40), (-10, -1, -0.1, 0, 0.1, 1, 10)
DOT = 9
"""Area of a dot, square points."""
SPREAD = 0.28
"""Jitter of the dots, in lines."""


def draw(run: Run, lines: Sequence[Line]) -> bytes:
    """Draw the figure as SVG: the tools above, trainatomy's rows by family and by technique below."""
    from matplotlib.figure import Figure

    by_name = {line["name"]: line for line in lines}
    tools = [one for one in contenders(run) if one.errors and "same rows" not in one.name]
    families = _members(run, lambda one: [family(by_name[one.name])], [], "families")
    order = [PLAIN, *TECHNIQUES]
    methods = _members(run, lambda one: techniques(by_name[one.name]["workload"]), order, "techniques")
    heights = [0.34 * len(tools) + 0.7, 0.3 * max(len(families), len(methods)) + 0.8]
    with drawing():
        figure = Figure(figsize=(11, sum(heights)), layout="constrained")
        panels: Any = figure.subfigures(2, 1, height_ratios=heights, hspace=0.03)
        top, below = panels
        _tools(top.subplots(), tools)
        left, right = below.subplots(1, 2)
        _groups(left, families, "trainatomy, by family (rows)")
        _groups(right, methods, "trainatomy, by technique (rows)")
        _legend(left)
        return as_bytes(figure, "svg")


def _members(
    run: Run, groups_of: Callable[[Outcome], list[str]], order: Sequence[str], kind: str
) -> list[tuple[str, list[Outcome]]]:
    """Group the rows, large groups first; groups that are exact throughout share the last line."""
    found: dict[str, list[Outcome]] = {name: [] for name in order}
    for one in run.outcomes:
        for name in groups_of(one):
            found.setdefault(name, []).append(one)
    known = [(name, rows) for name, rows in found.items() if rows]
    known.sort(key=lambda item: 0 if order else -len(item[1]))
    inexact = [(name, rows) for name, rows in known if any(errors_of(rows))]
    exact = [rows for _, rows in known if not any(errors_of(rows))]
    return [*inexact, (f"{len(exact)} other {kind}", [one for rows in exact for one in rows])] if exact else inexact


def errors_of(rows: Sequence[Outcome]) -> list[float]:
    """Return the errors of all figures."""
    return [error for figure in FIGURES for error in errors(rows, figure)]


def _tools(axes: Axes, tools: Sequence[Contender]) -> None:
    """Plot every row's error by tool, with a bar at the median and a summary in words."""
    for place, one in enumerate(tools):
        colour = COLOURS[one.figure] if one.name == US else RIVAL
        values = [100 * error for error in one.errors]
        _dots(axes, place, values, colour, SPREAD)
        axes.plot([median(values)], [place], marker="|", markersize=14, markeredgewidth=2, color=INK, zorder=4)
        middle = median(abs(value) for value in values)
        text = f"{len(values)} of {one.asked} rows, {values.count(0)} exact; median {_percent(middle)}"
        axes.annotate(
            text, (1.01, place), xycoords=("axes fraction", "data"), va="center", color=MUTED, annotation_clip=False
        )
    _axis(axes, [f"{one.name}: {one.figure}" for one in tools], TOOLS_RANGE, TOOLS_TICKS)
    axes.set_title("Error of every prediction; bars mark medians", loc="left", color=INK, fontsize=10)


def _groups(axes: Axes, groups: Sequence[tuple[str, list[Outcome]]], title: str) -> None:
    """Draw a line for each group, with the three figures below each other."""
    for place, (_, rows) in enumerate(groups):
        for index, figure in enumerate(FIGURES):
            values = [100 * error for error in errors(rows, figure)]
            _dots(axes, place + (index - 1) * 0.26, values, COLOURS[figure], 0.04)
    _axis(axes, [f"{name}  ({len(rows)})" for name, rows in groups], GROUPS_RANGE, GROUPS_TICKS)
    axes.set_title(title, loc="left", color=INK, fontsize=10)


def _dots(axes: Axes, place: float, values: Sequence[float], colour: str, spread: float) -> None:
    """Draw a dot for each value with reproducible jitter; exact ones share one dot that grows with their number."""
    moved = random.Random(0)
    inexact = [value for value in values if value]
    heights = [place + moved.uniform(-spread, spread) for _ in inexact]
    axes.scatter(inexact, heights, s=DOT, color=colour, alpha=0.6, linewidths=0, zorder=3)
    if exact := len(values) - len(inexact):
        axes.scatter([0], [place], s=DOT * exact**0.5, color=colour, linewidths=0, zorder=3)


def _axis(axes: Axes, names: Sequence[str], limits: tuple[float, float], ticks: Sequence[float]) -> None:
    axes.set_xscale("symlog", linthresh=LINEAR_PERCENT, linscale=0.6)
    axes.set_xlim(*limits)
    axes.set_xticks(ticks, [_tick(value) for value in ticks])
    axes.minorticks_off()
    axes.axvline(0, color=MUTED, linewidth=0.8, zorder=1)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", labelsize=8.5)
    axes.tick_params(axis="x", labelsize=8)
    for place in range(1, len(names)):
        axes.axhline(place - 0.5, color=GRID, linewidth=0.5, zorder=0)


def _legend(axes: Axes) -> None:
    from matplotlib.lines import Line2D

    marks: list[Any] = [
        Line2D([], [], marker="o", linestyle="", markersize=4, color=colour, label=figure)
        for figure, colour in COLOURS.items()
    ]
    axes.legend(handles=marks, loc="upper right", fontsize=8.5, frameon=False, handletextpad=0.1)


def _tick(value: float) -> str:
    return "exact" if value == 0 else f"{'−' if value < 0 else '+'}{abs(value):g} %"


def _percent(value: float) -> str:
    return "0" if value == 0 else f"{value:.2g} %" if value < 10 else f"{value:.0f} %"
