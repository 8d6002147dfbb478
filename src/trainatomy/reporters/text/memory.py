"""The memory breakdown as tables: of one peak, measured and predicted together, over time, and by module."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from trainatomy.reporters.labels import COLUMNS, COUNTERS, DEVICE_TOTAL, LOADED_TOTAL, ROOT_MODULE, component
from trainatomy.reporters.text.rendering import bar, grid
from trainatomy.results.memory import Line, Memory, ModuleActivations, TimelinePoint
from trainatomy.units import difference, exact_bytes, human_bytes, many, percent, signed_percent

TOP_MODULES = 10
_BREAKDOWN_COLUMNS = 72
_TIMELINE_COLUMNS = 34
"""Columns that the numbers take; bars get the rest."""

_WIDE = 100
"""Columns from which on both rounded sizes and the gap in bytes are shown."""


class Breakdown:
    """Components with their parts: sizes, shares of the total, and bars that take the width the numbers leave."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        bars = max(0, min(options.max_width - _BREAKDOWN_COLUMNS, 40))
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(min_width=28)
        for _ in range(3):
            table.add_column(justify="right", no_wrap=True)
        table.add_column(no_wrap=True)
        self._fill(table, bars)
        yield table

    def _fill(self, table: Table, bars: int) -> None:
        components = self.memory.components.as_dict()
        total = self.memory.components.total_bytes
        largest = max(components.values()) or 1
        for name, count in components.items():
            label = component(name)
            drawn = Text(bar(count / largest, bars), style=label.style)
            table.add_row(label.title, human_bytes(count), exact_bytes(count), percent(count, total), drawn)
            for line in _parts(self.memory, name):
                cells = (f"  {line.name}", human_bytes(line.bytes), exact_bytes(line.bytes))
                table.add_row(*(Text(cell, style="dim") for cell in cells))
        table.add_row(*([Rule(style="dim", characters="─")] * 4))
        sizes = (Text(human_bytes(total), style="bold"), exact_bytes(total), "100.0 %")
        table.add_row(Text(DEVICE_TOTAL, style="bold"), *sizes)


class MeasuredBreakdown:
    """Components with their parts: measured, predicted, and the gap as a share of the measured total."""

    def __init__(self, measured: Memory, predicted: Memory | None) -> None:
        self.measured = measured
        self.predicted = predicted

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= _WIDE
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        table.add_column("", min_width=22, overflow="fold")
        for title in self._titles(wide):
            table.add_column(title, justify="right", no_wrap=True)
        self._fill(table, wide)
        yield table

    def _titles(self, wide: bool) -> list[str]:
        names = ["measured", "bytes"] if wide else ["measured"]
        if self.predicted is not None:
            names += ["predicted", "gap", "of_total"] if wide else ["predicted", "gap_of_total"]
        return [COLUMNS[name] for name in names]

    def _fill(self, table: Table, wide: bool) -> None:
        predicted = self.predicted.components if self.predicted else None
        for name, count in self.measured.components.as_dict().items():
            known = None if predicted is None else predicted[name]
            table.add_row(component(name).title, *self._cells(count, known, wide))
            for title, sizes in self._parts(name).items():
                cells = (f"  {title}", *self._cells(*sizes, wide))
                table.add_row(*(Text(cell, style="dim") for cell in cells))
        table.add_row(*([Rule(style="dim", characters="─")] * (1 + len(self._titles(wide)))))
        total = None if predicted is None else predicted.total_bytes
        cells = self._cells(self.measured.components.total_bytes, total, wide)
        table.add_row(*(Text(cell, style="bold") for cell in (DEVICE_TOTAL, *cells)))

    def _cells(self, measured: int, predicted: int | None, wide: bool) -> tuple[str, ...]:
        sizes = (human_bytes(measured), exact_bytes(measured)) if wide else (exact_bytes(measured),)
        if self.predicted is None:
            return sizes
        known = predicted or 0
        share = signed_percent(known - measured, self.measured.components.total_bytes)
        more = (difference(known - measured),) if wide else ()
        return (*sizes, exact_bytes(known), *more, share)

    def _parts(self, name: str) -> dict[str, tuple[int, int]]:
        """Return the parts that either side has; none if the only one repeats the component."""
        measured, predicted = (
            {line.name: line.bytes for line in _lines(side, name)} for side in (self.measured, self.predicted)
        )
        names = list(dict.fromkeys([*measured, *predicted]))
        if names == [component(name).title]:
            return {}
        return {each: (measured.get(each, 0), predicted.get(each, 0)) for each in names}


def _lines(memory: Memory | None, name: str) -> list[Line]:
    return [line for line in memory.lines if line.component == name] if memory else []


def _parts(memory: Memory, name: str) -> list[Line]:
    """Return the parts of a component; none if the only one repeats the component."""
    lines = _lines(memory, name)
    return [] if [line.name for line in lines] == [component(name).title] else lines


def counters(memory: Memory) -> Table:
    """Return PyTorch's own counters, under the names of the calls that return them on a GPU."""
    table = grid("left", "right", "right")
    table.columns[0].min_width = 28
    for name, title in COUNTERS.items():
        count = getattr(memory, name)
        table.add_row(title, human_bytes(count), exact_bytes(count))
    loaded = memory.model_bytes + memory.components.context
    table.add_row(LOADED_TOTAL, human_bytes(loaded), exact_bytes(loaded))
    return table


def modules_table(modules: Sequence[ModuleActivations], activations: int, top: int = TOP_MODULES) -> Table:
    """Return the modules that hold most activations at the peak, with the rest in one line."""
    table = grid("left", "right", "right", "right")
    ranked = sorted(modules, key=lambda each: -each.activation_bytes)
    for each in ranked[:top]:
        held, tensors = each.activation_bytes, Text(many(each.tensors, "tensor"), style="dim")
        table.add_row(each.module or ROOT_MODULE, human_bytes(held), percent(held, activations), tensors)
    if rest := ranked[top:]:
        held = sum(each.activation_bytes for each in rest)
        tensors = Text(many(sum(each.tensors for each in rest), "tensor"), style="dim")
        others = Text(f"{len(rest)} more", style="dim")
        table.add_row(others, human_bytes(held), percent(held, activations), tensors)
    return table


class Timeline:
    """Memory over the steps: a stacked bar for each phase of each step, at the instant when it holds most."""

    def __init__(self, points: Sequence[TimelinePoint]) -> None:
        largest: dict[tuple[int, str], TimelinePoint] = {}
        for point in points:
            best = largest.setdefault((point.step, point.phase), point)
            if sum(point.components.values()) > sum(best.components.values()):
                largest[point.step, point.phase] = point
        self.peaks = list(largest.values())
        self.names = list(dict.fromkeys(name for point in self.peaks for name in point.components))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(10, min(options.max_width - _TIMELINE_COLUMNS, 60))
        largest = max((sum(point.components.values()) for point in self.peaks), default=0) or 1
        table = Table.grid(padding=(0, 2, 0, 0))
        for justify in ("right", "left", "right", "left"):
            table.add_column(justify=justify, no_wrap=True)
        for point in self.peaks:
            total = human_bytes(sum(point.components.values()))
            table.add_row(*_when(point), total, self._stacked(point.components, largest, width))
        yield table
        yield self._legend()

    def _stacked(self, components: dict[str, int], largest: int, width: int) -> Text:
        """Return a bar of letters, readable without colour; rounding never makes it longer than its total."""
        drawn, held, columns = Text(), 0, 0
        for name in self.names:
            held += components.get(name, 0)
            end = round(held / largest * width)
            label = component(name)
            drawn.append(label.letter * (end - columns), style=label.style)
            columns = end
        return drawn

    def _legend(self) -> Text:
        legend = Text()
        for name in self.names:
            if any(point.components.get(name) for point in self.peaks):
                label = component(name)
                legend.append(f"{label.letter} {label.title}  ", style=label.style)
        return legend


def _when(point: TimelinePoint) -> tuple[str, str]:
    """Return the step, counted from 1, and the phase; what precedes the first step belongs to none."""
    if point.phase == "load":
        return "", "load"
    return ("", "set-up") if point.step < 0 else (f"step {point.step + 1}", point.phase)
