"""The memory breakdown as tables: of one peak, measured and predicted together, over time, and by module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from trainatomy.reporters.document import Bar, Cell, Column, Swatch, Table, grid, styled, words
from trainatomy.reporters.labels import (
    COLUMNS,
    COUNTERS,
    DEVICE_AT_LEAST,
    DEVICE_TOTAL,
    LOADED_AT_LEAST,
    LOADED_TOTAL,
    LOGITS_AND_LOSS,
    ROOT_MODULE,
    component,
)
from trainatomy.reporters.text.rendering import bar
from trainatomy.results.memory import Line, Memory, ModuleActivations, TimelinePoint
from trainatomy.units import difference, exact_bytes, human_bytes, many, percent, signed_percent

TOP_MODULES = 10
_BREAKDOWN_COLUMNS = 72
_TIMELINE_COLUMNS = 34
"""Columns that the numbers take; bars get the rest."""

_WIDE = 100
"""Columns from which on both rounded sizes and the gap in bytes are shown."""


def breakdown(memory: Memory) -> Table:
    """Return components with their parts: sizes, shares of the total, and bars."""
    columns = (
        words(COLUMNS["component"], min_width=28),
        Column(COLUMNS["size"]),
        Column(COLUMNS["bytes"]),
        Column(COLUMNS["of_total"]),
        words(wraps=False, bars=(_BREAKDOWN_COLUMNS, 0, 40)),
    )
    return Table(columns, tuple(_breakdown_rows(memory)), is_headed=False)


def _breakdown_rows(memory: Memory) -> Iterator[tuple[Cell, ...] | None]:
    components, total = memory.components.as_dict(), memory.components.total_bytes
    largest = max(components.values()) or 1
    for name, count in components.items():
        yield (_named(name), human_bytes(count), exact_bytes(count), percent(count, total), _bar(name, count / largest))
        lines = _lines(memory, name)
        for line in lines if [line.name for line in lines] != [component(name).title] else []:
            yield styled("dim", f"  {line.name}", human_bytes(line.bytes), exact_bytes(line.bytes))
    yield None
    title = DEVICE_TOTAL if components["context"] else DEVICE_AT_LEAST
    yield (*styled("bold", title, human_bytes(total)), exact_bytes(total), "100.0 %")
    if logits := sum(memory.logits_and_loss.values()):
        yield (*styled("dim", LOGITS_AND_LOSS, human_bytes(logits), exact_bytes(logits)), percent(logits, total))


def _named(name: str) -> Swatch:
    return Swatch(component(name).title, component(name).colour)


def _bar(name: str, share: float) -> Bar:
    label = component(name)
    return Bar(lambda width: Text(bar(share, width), style=label.style), share, label.colour)


def measured_breakdown(measured: Memory, predicted: Memory | None) -> Table:
    """Return components with their parts: measured, predicted, and the gap as a share of the measured total."""
    compared = predicted is not None
    columns = (
        words(min_width=22),
        Column(COLUMNS["measured"], since=_WIDE),
        Column(COLUMNS["bytes"], since=_WIDE),
        Column(COLUMNS["measured"], until=_WIDE),
        Column(COLUMNS["predicted"], is_shown=compared),
        Column(COLUMNS["gap"], is_shown=compared, since=_WIDE),
        Column(COLUMNS["of_total"], is_shown=compared, since=_WIDE),
        Column(COLUMNS["gap_of_total"], is_shown=compared, until=_WIDE),
    )
    shown = tuple(column for column in columns if column.is_shown)
    return Table(shown, tuple(_measured_rows(measured, predicted)))


def _measured_rows(measured: Memory, predicted: Memory | None) -> Iterator[tuple[Cell, ...] | None]:
    total = measured.components.total_bytes

    def cells(held: int, known: int) -> tuple[str, ...]:
        sizes = (human_bytes(held), exact_bytes(held), exact_bytes(held))
        if predicted is None:
            return sizes
        share = signed_percent(known - held, total)
        return (*sizes, exact_bytes(known), difference(known - held), share, share)

    for name, count in measured.components.as_dict().items():
        yield (component(name).title, *cells(count, predicted.components[name] if predicted else 0))
        sides = [{line.name: line.bytes for line in _lines(side, name)} for side in (measured, predicted)]
        titles = list(dict.fromkeys([*sides[0], *sides[1]]))
        for title in titles if titles != [component(name).title] else []:
            yield styled("dim", f"  {title}", *cells(*(side.get(title, 0) for side in sides)))
    yield None
    yield styled("bold", DEVICE_TOTAL, *cells(total, predicted.components.total_bytes if predicted else 0))
    logits = [sum(side.logits_and_loss.values()) if side else 0 for side in (measured, predicted)]
    if any(logits):
        yield styled("dim", LOGITS_AND_LOSS, *cells(*logits))


def _lines(memory: Memory | None, name: str) -> list[Line]:
    return [line for line in memory.lines if line.component == name] if memory else []


def counters(memory: Memory) -> Table:
    """Return PyTorch's own counters, under the names of the calls that return them on a GPU."""
    counts = {title: getattr(memory, name) for name, title in COUNTERS.items()}
    context = memory.components.context
    counts[LOADED_TOTAL if context else LOADED_AT_LEAST] = memory.model_bytes + context
    return sizes_table(counts, words(min_width=28))


def sizes_table(sizes: dict[str, int], first: Column | None = None) -> Table:
    """Return titles with rounded and exact sizes."""
    rows = [(title, human_bytes(count), exact_bytes(count)) for title, count in sizes.items()]
    return grid(rows, first or words(), "right", "right")


def modules_table(modules: Sequence[ModuleActivations], activations: int, top: int = TOP_MODULES) -> Table:
    """Return the modules that hold most activations at the peak, with the rest in one line."""
    ranked = sorted(modules, key=lambda each: -each.activation_bytes)
    rows: list[tuple[str | Text, int, int]] = [
        (each.module or ROOT_MODULE, each.activation_bytes, each.tensors) for each in ranked[:top]
    ]
    if rest := ranked[top:]:
        held = sum(each.activation_bytes for each in rest)
        rows.append((Text(f"{len(rest)} more", style="dim"), held, sum(each.tensors for each in rest)))
    cells = (
        (name, human_bytes(held), percent(held, activations), Text(many(tensors, "tensor"), style="dim"))
        for name, held, tensors in rows
    )
    return grid(cells, "left", "right", "right", "right")


def timeline(points: Sequence[TimelinePoint]) -> list[Table | Text]:
    """Return memory over the steps: a stacked bar for each phase of each step, at the instant when it holds most."""
    largest: dict[tuple[int, str], TimelinePoint] = {}
    for point in points:
        best = largest.setdefault((point.step, point.phase), point)
        if sum(point.components.values()) > sum(best.components.values()):
            largest[point.step, point.phase] = point
    peaks = list(largest.values())
    most = max((sum(point.components.values()) for point in peaks), default=0) or 1
    names = list(dict.fromkeys(name for point in peaks for name in point.components))
    rows = [
        (*_when(point), human_bytes(sum(point.components.values())), _stacked(point.components, names, most))
        for point in peaks
    ]
    bars = words(wraps=False, bars=(_TIMELINE_COLUMNS, 10, 60))
    legend = Text()
    for label in (component(name) for name in names if any(point.components.get(name) for point in peaks)):
        legend.append(f"{label.letter} {label.title}  ", style=label.style)
    return [grid(rows, "right", words(wraps=False), "right", bars), legend]


def _stacked(components: dict[str, int], names: Sequence[str], largest: int) -> Bar:
    """Return a bar of letters, readable without colour; rounding never makes it longer than its total."""

    def draw(width: int) -> Text:
        drawn, held, columns = Text(), 0, 0
        for name in names:
            held += components.get(name, 0)
            end = round(held / largest * width)
            label = component(name)
            drawn.append(label.letter * (end - columns), style=label.style)
            columns = end
        return drawn

    return Bar(draw)


def _when(point: TimelinePoint) -> tuple[str, str]:
    """Return the step, counted from 1, and the phase; what precedes the first step belongs to none."""
    if point.phase == "load":
        return "", "load"
    return ("", "set-up") if point.step < 0 else (f"step {point.step + 1}", point.phase)
