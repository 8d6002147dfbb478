"""The figures of charts as plain values; the page's script turns them into options of the charting library.

The memory of a predicted training over its events, packed so that a page can draw any part of it.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from rich.text import Text

from trainatomy.analysis.memory import fold_layers
from trainatomy.reporters.document import Column, Part, Swatch, Table, words
from trainatomy.reporters.html.values import REPORT, ChartBlock
from trainatomy.reporters.labels import COMPONENTS, PHASES, component
from trainatomy.results.memory import Components, ModuleActivations
from trainatomy.results.trace import Allocation, Detail, Source
from trainatomy.units import human_bytes, many, percent

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
        marks: ``name`` and ``values`` of figures of others, which are marked beside the bars.
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
    block = bars(name, list(rows), series, summary, unit="bytes")
    lines = [{"name": title, "value": value} for title, value in limits]
    return replace(block, data={**block.data, "limits": lines, "marks": list(marks)})


def bars(
    name: str,
    rows: Sequence[str],
    series: Sequence[Mapping[str, Any]],
    summary: str,
    *,
    unit: str,
    is_stacked: bool = True,
    axis: str = "",
) -> ChartBlock:
    """Return horizontal bars.

    Args:
        name: Name of the chart, unique in its page.
        rows: Names of the rows.
        series: ``name``, ``colour`` and ``values`` (one for each row, or None) of each part of the bars.
        summary: What it shows, in a sentence.
        unit: ``bytes``, ``seconds``, ``share`` or ``rate``.
        is_stacked: Whether the parts of a row are stacked, or lie side by side.
        axis: Title of the axis of figures; empty where their units say it.
    """
    data = {
        "rows": list(rows),
        "series": list(series),
        "unit": unit,
        "limits": [],
        "stacked": is_stacked,
        "axis": axis,
        "marks": [],
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


MOST_ALLOCATIONS = 60_000
"""Allocations that are drawn; each has two events.  Of more, the smallest are left out, and the page says so."""
LISTED = 25
"""Rows of the table of what is held."""
_MOST_BANDS = 80
_MERGED = {"recompute": "backward", "zero_grad": "optimizer", "other": ""}
"""Phases that are drawn as part of another, or of the one before."""


def timeline(name: str, detail: Detail, summary: str) -> tuple[ChartBlock | Part, ...]:
    """Return the chart, the largest allocations at the peak, and what was left out."""
    kept = _largest(detail.allocations)
    left_out = _most_held(set(detail.allocations) - set(kept)) if len(kept) < len(detail.allocations) else 0
    data = {"events": detail.events, "peak": detail.peak_event}
    packed = base64.b64encode(gzip.compress(_columns(detail, kept), 9, mtime=0)).decode()
    chart = ChartBlock(name, "timeline", summary, data, 460, packed)
    blocks: list[ChartBlock | Part] = [chart, _held(detail)]
    if left_out:
        count = many(len(detail.allocations) - len(kept), "smaller allocation")
        text = f"{count} are not drawn; together they hold at most {human_bytes(left_out)}."
        blocks.append(Text(text, style="dim"))
    return tuple(blocks)


def _largest(allocations: Sequence[Allocation]) -> list[Allocation]:
    if len(allocations) <= MOST_ALLOCATIONS:
        return list(allocations)
    ranked = sorted(allocations, key=lambda one: -one.bytes)[:MOST_ALLOCATIONS]
    return sorted(ranked, key=lambda one: one.born)


def _most_held(allocations: set[Allocation]) -> int:
    """Return the most that some allocations hold together."""
    changes = [(one.born, one.bytes) for one in allocations]
    changes += [(one.died, -one.bytes) for one in allocations if one.died >= 0]
    held = most = 0
    for _, change in sorted(changes):
        held += change
        most = max(most, held)
    return most


def _columns(detail: Detail, kept: Sequence[Allocation]) -> bytes:
    """Return the data of the chart as JSON: a column for each field, with differences where they are small."""
    texts: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    used = sorted({one.source for one in kept})
    renumbered = {source: place for place, source in enumerate(used)}
    names = list(dict.fromkeys(detail.sources[source].component for source in used))
    ordered = _order(names)
    sources = [
        [
            ordered.index(each.component),
            number(each.line),
            number(each.operation),
            number(each.module),
            number(PHASES.get(each.phase, each.phase)),
            each.step,
        ]
        for each in (detail.sources[source] for source in used)
    ]
    born = [one.born for one in kept]
    content: dict[str, Any] = {
        "events": detail.events,
        "peak": detail.peak_event,
        "components": [{"title": component(name).title, "colour": component(name).colour} for name in ordered],
        "texts": list(texts),
        "sources": sources,
        "born": [born[0], *(later - earlier for earlier, later in pairwise(born))] if born else [],
        "life": [one.died - one.born if one.died >= 0 else 0 for one in kept],
        "bytes": [one.bytes for one in kept],
        "source": [renumbered[one.source] for one in kept],
        "bands": _bands(detail),
        "reserved": _reserved(detail),
    }
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()


def _order(names: Sequence[str]) -> list[str]:
    """Return components in display order: those of the memory breakdown first."""
    return sorted(names, key=lambda name: list(COMPONENTS).index(name) if name in COMPONENTS else len(COMPONENTS))


def _bands(detail: Detail) -> list[list[Any]]:
    """Return the first event, the step and the phase of each stretch; by step alone if there are many."""
    found: list[list[Any]] = []
    for one in detail.allocations:
        source = detail.sources[one.source]
        phase = _MERGED.get(source.phase, source.phase) or (found[-1][2] if found else "load")
        if not found or [source.step, phase] != found[-1][1:]:
            found.append([one.born, source.step, phase])
    if len(found) > _MOST_BANDS:
        steps: dict[int, list[Any]] = {}
        for born, step, _ in found:
            steps.setdefault(step, [born, step, ""])
        found = list(steps.values())
    return [
        [born, phase or REPORT["before"], ""] if step < 0 else [born, f"step {step + 1}", phase]
        for born, step, phase in found
    ]


def _reserved(detail: Detail) -> list[list[int]]:
    """Return the events at which reserved memory changes, with the bytes from then on."""
    found: list[list[int]] = []
    held = 0
    for one in detail.segment_events:
        held += one.bytes if one.action in ("segment_alloc", "segment_map") else -one.bytes
        if found and found[-1][0] == one.event:
            found[-1][1] = held
        else:
            found.append([one.event, held])
    return found


def _held(detail: Detail) -> Table:
    """Return what most memory goes into at the peak, layers folded; the page's script shows the same for any event."""
    peak = detail.peak_event
    held = [one for one in detail.allocations if one.born <= peak and (one.died < 0 or one.died > peak)]
    total = sum(one.bytes for one in held)
    alike: dict[tuple[Source, int], list[Source]] = {}
    for one in held:
        source = detail.sources[one.source]
        folded = source._replace(module=fold_layers(source.module))
        alike.setdefault((folded, one.bytes), []).append(source)
    ranked = sorted(alike.items(), key=lambda each: -each[0][1] * len(each[1]))[:LISTED]
    rows = tuple(_row(folded if len(some) > 1 else some[0], size, len(some), total) for (folded, size), some in ranked)
    caption = f"{REPORT['held_at_peak']}: {many(len(held), 'allocation')}, {human_bytes(total)}"
    head = (REPORT[name] for name in ("holds", "size", "share", "module", "operation", "made_in"))
    columns = tuple(Column(title) if place in (1, 2) else words(title) for place, title in enumerate(head))
    return Table(columns, rows, caption=caption)


def _row(source: Source, size: int, count: int, total: int) -> tuple[str | Swatch, ...]:
    """Return the row of allocations of one kind."""
    label = component(source.component)
    phase = PHASES.get(source.phase, source.phase)
    return (
        Swatch(f"{label.title}: {source.line}" if source.line != label.title else label.title, label.colour),
        f"{count} × {human_bytes(size)}" if count > 1 else human_bytes(size),
        percent(size * count, total),
        source.module or "–",
        source.operation,
        phase if source.step < 0 else f"step {source.step + 1}, {phase}",
    )
