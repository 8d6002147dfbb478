"""A chart of one training on different numbers of GPUs: memory of the fullest GPU, and throughput of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from trainatomy.reporters.labels import ALARM, AXES, MARKS, MUTED, PAPER, PLANS
from trainatomy.reporters.settings import strategy_name
from trainatomy.results.comparison import Comparison, ComparisonRow
from trainatomy.results.prediction import Plan, Scaling, fullest_rank, trained
from trainatomy.units import GIB, human_bytes

WIDTH, HEIGHT = 11.0, 4.6
"""Inches."""

_MARKERS = "osD^vP"

Row = tuple[ComparisonRow, Scaling | None]


def is_by_gpus(comparison: Comparison) -> bool:
    """Return whether a comparison is best drawn against the number of GPUs: the same is trained, nothing measured."""
    counts = {Plan.of(prediction.workload).world_size for prediction in comparison.predictions}
    first, *others = [trained(prediction.workload) for prediction in comparison.predictions] or [{}]
    return len(counts) > 1 and all(other == first for other in others) and not comparison.measured


def figure(comparison: Comparison) -> Figure:
    """Return memory and throughput against the number of GPUs, one line for each strategy."""
    page = Figure(figsize=(WIDTH, HEIGHT))
    box = {"top": 0.76, "bottom": 0.125, "left": 0.065, "right": 0.975, "wspace": 0.17}
    memory, throughput = page.subplots(1, 2, gridspec_kw=box)
    lines = _lines(comparison)
    for number, (name, rows) in enumerate(lines.items()):
        style: dict[str, Any] = {
            "color": PLANS[number % len(PLANS)],
            "marker": _MARKERS[number % len(_MARKERS)],
            "markeredgecolor": PAPER,
            "markersize": 8,
            "linewidth": 1.8,
            "zorder": 4 - number / 100,
        }
        _draw_memory(memory, rows, name, style)
        _draw_throughput(throughput, rows, style)
    _limit(memory, comparison)
    _ideal(throughput, comparison)
    for axes, label in ((memory, AXES["fullest_rank"]), (throughput, AXES["total_throughput"])):
        _axes(axes, comparison, label)
    _heading(page, comparison)
    return page


def _lines(comparison: Comparison) -> Mapping[str, list[Row]]:
    """Return the rows of each strategy by the number of GPUs; a training on one GPU begins each line."""
    rows = [pair for pair in zip(comparison.rows, comparison.scaling(), strict=True) if pair[0].prediction is not None]
    alone = [pair for pair in rows if pair[0].plan.world_size == 1]
    lines: dict[str, list[Row]] = {}
    for pair in rows:
        if pair[0].plan.world_size > 1:
            lines.setdefault(strategy_name(pair[0].plan), [*alone]).append(pair)
    return {name: sorted(line, key=lambda pair: pair[0].plan.world_size) for name, line in lines.items()}


def _draw_memory(axes: Axes, rows: list[Row], name: str, style: dict[str, Any]) -> None:
    places = [
        (row.plan.world_size, fullest_rank(row.prediction).memory.device_bytes / GIB)
        for row, _ in rows
        if row.prediction is not None
    ]
    axes.plot(*zip(*places, strict=True), label=name, **style)


def _draw_throughput(axes: Axes, rows: list[Row], style: dict[str, Any]) -> None:
    """Draw the training runs that fit."""
    fitting = [(scaling.plan.world_size, scaling) for _, scaling in rows if scaling is not None]
    if not fitting:
        return
    axes.plot([count for count, _ in fitting], [each.samples_per_second for _, each in fitting], **style)


def _limit(axes: Axes, comparison: Comparison) -> None:
    """Draw the memory of the GPU, where it is near enough to matter."""
    total = comparison.predictions[0].gpu.memory_bytes
    most = max(fullest_rank(each).memory.device_bytes for each in comparison.predictions)
    axes.set_ylim(0, max(most, total if most > total / 3 else 0) / GIB * 1.1)
    if most > total / 3:
        axes.axhline(total / GIB, color=ALARM, linewidth=1.2, zorder=1)
        beside: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        text = f"{comparison.predictions[0].gpu.name}: {human_bytes(total)}"
        axes.annotate(text, (0.995, total / GIB), xytext=(0, 3), ha="right", size=8, color=ALARM, **beside)


def _ideal(axes: Axes, comparison: Comparison) -> None:
    """Draw the throughput of the fewest GPUs in proportion to their number."""
    known = [each for each in comparison.scaling() if each is not None]
    if not known:
        return
    fewest = min(each.plan.world_size for each in known)
    base = max(each.samples_per_second_per_gpu for each in known if each.plan.world_size == fewest)
    counts = [fewest, max(each.plan.world_size for each in known)]
    style: dict[str, Any] = {"color": MUTED, "linestyle": (0, (4, 3)), "linewidth": 1.2, "zorder": 1.5}
    axes.plot(counts, [count * base for count in counts], label=MARKS["ideal"], **style)
    axes.set_ylim(0, counts[1] * base * 1.08)


def _axes(axes: Axes, comparison: Comparison, label: str) -> None:
    counts = sorted({row.plan.world_size for row in comparison.rows})
    if counts[-1] > 16:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(counts[0] * 0.9, counts[-1] * 1.1)
    else:
        axes.set_xlim(0, counts[-1] * 1.04)
    axes.xaxis.set_major_locator(FixedLocator(counts))
    axes.set_xticklabels(list(map(str, counts)))
    axes.set_xlabel(AXES["gpus"])
    axes.set_title(label, loc="left", size=9.5, color=MUTED)
    axes.grid(True, axis="both")
    axes.yaxis.set_major_locator(MaxNLocator(7))


def _heading(page: Figure, comparison: Comparison) -> None:
    """Add the title, the setup and a legend."""
    prediction = comparison.predictions[0]
    page.text(0.018, 0.97, f"Predicted for {prediction.gpu.name}", size=13.5, weight="bold", va="top")
    setup = "one training step, predicted without GPUs; throughput where it fits"
    page.text(0.018, 0.9, setup, size=9, color=MUTED, va="top")
    handles = [handle for axes in page.axes for handle in axes.get_legend_handles_labels()[0]]
    where: dict[str, Any] = {"loc": "upper right", "bbox_to_anchor": (0.98, 0.985), "frameon": False, "fontsize": 9}
    page.legend(handles=handles, ncols=min(len(handles), 4), columnspacing=1.4, handletextpad=0.6, **where)
