"""The figures of charts as plain values; the page's script turns them into options of the charting library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainatomy.reporters.html.values import ChartBlock
from trainatomy.reporters.labels import component
from trainatomy.results.memory import Components, ModuleActivations

_ROW_PIXELS = 34
_FRAME_PIXELS = 110
"""Height of a row of bars, and of axis and legend together."""
_ITSELF = "(itself)"


def component_bars(
    name: str,
    rows: Mapping[str, Components],
    summary: str,
    limits: Sequence[tuple[str, int]] = (),
    marks: Sequence[Mapping[str, Any]] = (),
) -> ChartBlock:
    """Return stacked bars of memory by component, one for each row.

    Args:
        name: Name of the chart, unique in its page.
        rows: Components by the row's name.
        summary: What it shows, in a sentence.
        limits: Lines across all bars: names and bytes.
        marks: Figures of others beside the bars, as those of ``bars``.
    """
    names = list(dict.fromkeys(each for components in rows.values() for each in components.as_dict()))
    series = [
        {
            "name": component(each).title,
            "colour": component(each).colour,
            "values": [components[each] for components in rows.values()],
        }
        for each in names
        if any(components[each] for components in rows.values())
    ]
    return bars(name, list(rows), series, summary, unit="bytes", limits=limits, marks=marks)


def bars(
    name: str,
    rows: Sequence[str],
    series: Sequence[Mapping[str, Any]],
    summary: str,
    *,
    unit: str,
    limits: Sequence[tuple[str, float]] = (),
    is_stacked: bool = True,
    axis: str = "",
    marks: Sequence[Mapping[str, Any]] = (),
) -> ChartBlock:
    """Return horizontal bars.

    Args:
        name: Name of the chart, unique in its page.
        rows: Names of the rows.
        series: ``name``, ``colour`` and ``values`` (one for each row, or None) of each part of the bars.
        summary: What it shows, in a sentence.
        unit: ``bytes``, ``seconds``, ``share`` or ``rate``.
        limits: Lines across all bars: names and values.
        is_stacked: Whether the parts of a row are stacked, or lie side by side.
        axis: Title of the axis of figures; empty where their units say it.
        marks: ``name`` and ``values`` of figures that are marked beside the bars.
    """
    data = {
        "rows": list(rows),
        "series": list(series),
        "unit": unit,
        "limits": [{"name": title, "value": value} for title, value in limits],
        "stacked": is_stacked,
        "axis": axis,
        "marks": list(marks),
    }
    lines = 1 if is_stacked else max(len(series), 1)
    return ChartBlock(name, "stack", summary, data, _FRAME_PIXELS + _ROW_PIXELS * len(rows) * min(lines, 2))


def module_tree(name: str, modules: Iterable[ModuleActivations], summary: str) -> ChartBlock:
    """Return activations by module as a treemap that follows the paths of the modules."""
    root: dict[str, Any] = {"children": {}, "bytes": 0, "tensors": 0}
    for each in modules:
        node = root
        for part in each.module.split(".") if each.module else [_ITSELF]:
            node = node["children"].setdefault(part, {"children": {}, "bytes": 0, "tensors": 0})
        node["bytes"] += each.activation_bytes
        node["tensors"] += each.tensors
    return ChartBlock(name, "treemap", summary, {"nodes": _nodes(root, "")}, 420)


def _nodes(parent: Mapping[str, Any], path: str) -> list[dict[str, Any]]:
    """Return the children of a node with their totals; a chain of only children becomes one node."""
    found = []
    for part, node in parent["children"].items():
        name, here = part, f"{path}.{part}" if path else part
        while len(node["children"]) == 1 and not node["bytes"]:
            (part, node) = next(iter(node["children"].items()))
            name, here = f"{name}.{part}", f"{here}.{part}"
        children = _nodes(node, here)
        if children and node["bytes"]:
            children.append({"name": _ITSELF, "path": here, "value": node["bytes"], "tensors": node["tensors"]})
        value = node["bytes"] + sum(child["value"] for child in children if child["name"] != _ITSELF)
        made = {"name": name, "path": here, "value": value, "tensors": node["tensors"]}
        found.append({**made, "children": children} if children else made)
    return found


def scatter(
    name: str,
    series: Sequence[Mapping[str, Any]],
    lines: Sequence[Mapping[str, Any]],
    axes: tuple[Mapping[str, Any], Mapping[str, Any]],
    summary: str,
) -> ChartBlock:
    """Return points with lines between some.

    Args:
        name: Name of the chart, unique in its page.
        series: ``name``, ``colour`` and ``points`` of each kind of points; a point has ``x``, ``y``, ``label`` and
            may have ``size`` (pixels) and ``text`` (lines of a tooltip).
        lines: ``name``, ``colour`` and ``points`` (pairs) of each line.
        axes: ``title``, ``unit`` and ``log`` of the horizontal and the vertical axis.
        summary: What it shows, in a sentence.
    """
    data = {"series": list(series), "lines": list(lines), "x": dict(axes[0]), "y": dict(axes[1])}
    return ChartBlock(name, "scatter", summary, data, 420)
