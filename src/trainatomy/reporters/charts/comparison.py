"""A chart of several training runs: memory by component on the left, throughput on the right.

Bars show the measured figures where there are any, with marks for the predicted and published figures.
"""

from __future__ import annotations

import textwrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from trainatomy.reporters.charts import scaling
from trainatomy.reporters.charts.gpus import across_figure
from trainatomy.reporters.charts.style import as_bytes, drawing
from trainatomy.reporters.labels import ALARM, AXES, INK, MARKS, MUTED, PAPER, THROUGHPUT, component
from trainatomy.results.comparison import Comparison, ComparisonRow
from trainatomy.results.measurement import Measurement
from trainatomy.results.memory import Memory
from trainatomy.results.prediction import total_rate
from trainatomy.units import GIB, human_bytes, signed_percent

WIDTH, ROW, ABOVE, BELOW = 11.0, 0.46, 1.30, 0.50
"""Inches: the width, the height of a row, and the space above and below the rows."""

NAME_WIDTH = 30
BAR = 0.56


def draw(comparison: Comparison, ending: str) -> bytes:
    """Return the chart as a file of the format ``ending``: svg, png or pdf."""
    with drawing():
        return as_bytes(_page(comparison), ending)


def _page(comparison: Comparison) -> Figure:
    if comparison.is_across_gpus and not comparison.measured:
        return across_figure(comparison)
    return scaling.figure(comparison) if scaling.is_by_gpus(comparison) else figure(comparison)


def figure(comparison: Comparison) -> Figure:
    """Return the chart, with rows from top to bottom and a panel for throughput if any row has one."""
    rows = comparison.rows
    with_rate = any(row.spread("samples_per_second") or _predicted_rate(row) for row in rows)
    height = ABOVE + BELOW + ROW * max(len(rows), 3)
    page = Figure(figsize=(WIDTH, height))
    box = {"top": 1 - ABOVE / height, "bottom": BELOW / height, "left": 0.235, "right": 0.975}
    panels = page.subplots(
        1, 1 + with_rate, sharey=True, squeeze=False, width_ratios=[2.6, 1][: 1 + with_rate], gridspec_kw=box
    )[0]
    page.subplots_adjust(wspace=0.06)
    _memory(panels[0], comparison)
    if with_rate:
        _throughput(panels[1], rows)
    panels[0].set_yticks(range(len(rows)), [_wrapped(row.name) for row in rows], linespacing=1.0)
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    _heading(page, comparison, height)
    return page


def _wrapped(name: str) -> str:
    lines = textwrap.wrap(name, NAME_WIDTH, break_long_words=True)
    return "\n".join(lines if len(lines) < 3 else [lines[0], f"{lines[1][: NAME_WIDTH - 1]}…"])


def _heading(page: Figure, comparison: Comparison, height: float) -> None:
    """Add the title, the setup, and a legend of what occurs."""
    title, setup = _title(comparison)
    left = 0.018
    page.text(left, 1 - 0.14 / height, title, size=13.5, weight="bold", va="top")
    page.text(left, 1 - 0.45 / height, setup, size=9, color=MUTED, va="top")
    page.legend(
        handles=_keys(comparison),
        loc="upper left",
        bbox_to_anchor=(left - 0.006, 1 - 0.64 / height),
        ncols=6,
        frameon=False,
        fontsize=8.5,
        handlelength=1.1,
        handleheight=1.0,
        columnspacing=1.4,
        handletextpad=0.5,
        borderpad=0.2,
        labelspacing=0.35,
    )


def _title(comparison: Comparison) -> tuple[str, str]:
    if comparison.measured:
        some = next((each for row in comparison.rows for each in row.measurements), None)
        runs = f"median of {comparison.repeats} runs" if comparison.repeats > 1 else "each in a fresh process"
        return f"Measured on {', '.join(comparison.gpus) or 'a GPU'}", f"{_software(some)}{runs}"
    gpus = dict.fromkeys(prediction.gpu.name for prediction in comparison.predictions)
    return f"Predicted for {', '.join(gpus)}", "one training step, predicted without a GPU; throughput where it fits"


def _software(measurement: Measurement | None) -> str:
    if measurement is None:
        return ""
    names = [name for name in ("torch", "transformers") if name in measurement.versions]
    versions = [f"{name} {measurement.versions[name]}" for name in names]
    return "".join(f"{part}, " for part in (*versions, f"driver {measurement.driver}"))


def _keys(comparison: Comparison) -> list[Any]:
    """Return the entries of the legend: components that occur, then marks that occur."""
    shown = [memory for row in comparison.rows if (memory := _shown(row)) is not None]
    names = dict.fromkeys(name for memory in shown for name in memory.components.as_dict())
    labels = [component(name) for name in names if any(memory.components[name] for memory in shown)]
    mark: dict[str, Any]
    keys: list[Any] = [Patch(color=label.colour, label=label.title) for label in labels]
    if any(row.typical and not row.typical.memory for row in comparison.rows):
        keys.append(Patch(color=MUTED, label=MARKS["total"]))
    if comparison.measured:
        if comparison.predictions:
            mark = {"color": PAPER, "marker": "D", "markersize": 6, "markeredgecolor": INK}
            keys.append(Line2D([], [], label=MARKS["predicted"], linestyle="", **mark))
        if any(row.ran_out for row in comparison.rows):
            keys.append(Patch(facecolor=PAPER, edgecolor=ALARM, hatch="////", label=MARKS["out_of_memory"]))
    if any(row.published and row.published.memory_bytes for row in comparison.rows):
        mark = {"color": ALARM, "marker": "|", "markersize": 10, "markeredgewidth": 2}
        keys.append(Line2D([], [], label=MARKS["published"], linestyle="", **mark))
    return keys


def _shown(row: ComparisonRow) -> Memory | None:
    """Return the breakdown that the row's bar shows: measured, or predicted where nothing was run."""
    if row.status == "not measured":
        return row.prediction.memory if row.prediction else None
    return row.typical.memory if row.typical else None


def _memory(axes: Axes, comparison: Comparison) -> None:
    ends = []
    for place, row in enumerate(comparison.rows):
        ends.append(max(_bar(axes, place, row), _marks(axes, place, row)))
        _label(axes, place, row, ends[-1])
    inches = axes.get_position().width * WIDTH
    widest = max(end * inches / (inches - _label_inches(row)) for row, end in zip(comparison.rows, ends, strict=True))
    axes.set_xlim(0, widest or 1)
    axes.set_xlabel(AXES["memory"])
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=widest > 7))


def _bar(axes: Axes, place: int, row: ComparisonRow) -> float:
    """Draw the row's bar, stacked by component, and return its end in GiB."""
    if (memory := _shown(row)) is not None:
        end = 0.0
        for name, count in memory.components.as_dict().items():
            axes.barh(place, count / GIB, BAR, left=end, color=component(name).colour, edgecolor=PAPER, linewidth=0.4)
            end += count / GIB
        return end
    if (some := row.typical) is not None:
        end = (some.device_bytes or some.peak_reserved_bytes) / GIB
        axes.barh(place, end, BAR, color=MUTED)
        return end
    if (failed := row.ran_out) is not None:
        end = _held(failed) / GIB
        axes.barh(place, end, BAR, facecolor=PAPER, edgecolor=ALARM, hatch="////", linewidth=1)
        return end
    return 0.0


def _held(failed: Measurement) -> int:
    """Return the bytes held when a run ran out of memory: by its process, or reserved by PyTorch."""
    point = failed.out_of_memory
    return max(failed.device_bytes or 0, point.reserved_bytes if point else failed.peak_reserved_bytes)


def _marks(axes: Axes, place: int, row: ComparisonRow) -> float:
    """Mark the predicted and the published total, and return the larger one in GiB."""
    furthest = 0.0
    if row.prediction and row.status != "not measured":
        furthest = row.prediction.memory.device_bytes / GIB
        axes.plot(furthest, place, "D", color=PAPER, markeredgecolor=INK, markersize=5.5, zorder=4, clip_on=False)
    if row.published and row.published.memory_bytes:
        published = row.published.memory_bytes / GIB
        axes.plot([published] * 2, [place - BAR / 2, place + BAR / 2], color=ALARM, linewidth=2, zorder=4)
        furthest = max(furthest, published)
    return furthest


def _label(axes: Axes, place: int, row: ComparisonRow, end: float) -> None:
    """Write the label to the right of the bar."""
    bold, aside, alarming = _words(row)
    text = axes.annotate(
        bold,
        (end, place),
        xytext=(9, 0),
        textcoords="offset points",
        va="center_baseline",
        size=9,
        weight="bold",
        color=ALARM if alarming else INK,
    )
    beside: dict[str, Any] = {"xycoords": text, "textcoords": "offset points", "va": "center"}
    axes.annotate(aside, (1, 0.5), xytext=(5, 0), size=8, color=MUTED, **beside)


def _label_inches(row: ComparisonRow) -> float:
    """Return about how wide the label is, from its characters (9 points bold, 8 points) and the gaps."""
    bold, aside, _ = _words(row)
    return 0.092 * len(bold) + 0.070 * len(aside) + 0.3


def _words(row: ComparisonRow) -> tuple[str, str, bool]:
    """Return the bold part of the label, the plain part, and whether to print it as an alarm."""
    if row.status == "failed":
        return "failed", "", True
    if row.status == "out of memory" and not row.completed:
        point = row.out_of_memory
        return "out of memory", f"{human_bytes(point.requested_bytes)} requested" if point else "", True
    if row.status == "not measured":
        prediction = row.prediction
        if prediction is None:
            return "not predicted", "", True
        aside = "" if prediction.fits else "does not fit"
        if row.published and row.published.memory_bytes:
            aside = f"published {human_bytes(row.published.memory_bytes)}"
        return human_bytes(prediction.memory.device_bytes), aside, not prediction.fits
    size = row.spread("device_bytes") or row.spread("peak_reserved_bytes")
    gap = row.gap("device_bytes")
    measured = human_bytes(round(size.median)) if size else ""
    return measured, "" if gap is None else f"predicted {signed_percent(gap, 1)}", False


def _predicted_rate(row: ComparisonRow) -> float | None:
    """Return the predicted samples per second, of all GPUs, of a training that fits."""
    return total_rate(row.prediction) if row.prediction and row.prediction.fits else None


def _throughput(axes: Axes, rows: tuple[ComparisonRow, ...]) -> None:
    """Draw samples per second: measured, with the range of the repeats as a line; predicted where nothing was run."""
    furthest = 0.0
    for place, row in enumerate(rows):
        measured, predicted = row.total_rate, _predicted_rate(row)
        if measured is None:
            shown = predicted if row.status == "not measured" else None
            end = shown or 0.0
        else:
            shown, end = measured.median, max(measured.most, predicted or 0.0)
        _rate_bar(axes, place, shown, end)
        if measured is not None and measured.most > measured.least:
            axes.plot([measured.least, measured.most], [place] * 2, color=INK, linewidth=1.2, solid_capstyle="butt")
        if measured is not None and predicted is not None:
            axes.plot(predicted, place, "D", color=PAPER, markeredgecolor=INK, markersize=5.5, zorder=4, clip_on=False)
        furthest = max(furthest, end)
    axes.set_xlim(0, furthest * 1.25 or 1)
    several = any(row.plan.world_size > 1 for row in rows)
    axes.set_xlabel(AXES["total_throughput" if several else "throughput"])
    axes.xaxis.set_major_locator(MaxNLocator(4))


def _rate_bar(axes: Axes, place: int, rate: float | None, end: float) -> None:
    """Draw one bar with its figure beyond ``end``; a dash where there is no rate."""
    beside: dict[str, Any] = {"textcoords": "offset points", "va": "center_baseline"}
    if rate is None:
        axes.annotate("–", (0, place), xytext=(6, 0), color=MUTED, **beside)
        return
    axes.barh(place, rate, BAR, color=THROUGHPUT)
    text = f"{rate:.1f}" if rate < 1000 else f"{rate:.0f}"
    axes.annotate(text, (end, place), xytext=(9, 0), size=9, weight="bold", **beside)
