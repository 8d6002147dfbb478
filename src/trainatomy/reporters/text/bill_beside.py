"""The bill of a measured run with the predicted one beside it, line by line, and the gap."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderResult
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from trainatomy.reporters.text.bill import TITLES
from trainatomy.results.memory import Line, Memory
from trainatomy.units import difference, exact_bytes, human_bytes, signed_percent

WIDE = 100
"""Columns from which on there is room for sizes in words, and for the gap in bytes."""


class BillBeside:
    """Components with their parts: measured, predicted, and predicted less measured, also as a share of what was
    measured in all."""

    def __init__(self, measured: Memory, predicted: Memory | None) -> None:
        self.measured = measured
        self.predicted = predicted

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= WIDE
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        table.add_column("", min_width=22, overflow="fold")
        for title in self._titles(wide):
            table.add_column(title, justify="right", no_wrap=True)
        self._fill(table, wide)
        yield table

    def _titles(self, wide: bool) -> list[str]:
        titles = ["measured", "bytes"] if wide else ["measured"]
        if self.predicted is None:
            return titles
        return [*titles, "predicted", "gap", "of total"] if wide else [*titles, "predicted", "gap, of total"]

    def _fill(self, table: Table, wide: bool) -> None:
        theirs = self.predicted.components.as_dict() if self.predicted else {}
        for name, count in self.measured.components.as_dict().items():
            table.add_row(TITLES[name], *self._cells(count, theirs.get(name), wide))
            for title, (measured, predicted) in self._parts(name).items():
                cells = (f"  {title}", *self._cells(measured, predicted, wide))
                table.add_row(*(Text(cell, style="dim") for cell in cells))
        table.add_row(*([Rule(style="dim", characters="─")] * (1 + len(self._titles(wide)))))
        total = self.predicted.components.total_bytes if self.predicted else None
        cells = self._cells(self.measured.components.total_bytes, total, wide)
        table.add_row(*(Text(cell, style="bold") for cell in ("as nvidia-smi shows it", *cells)))

    def _cells(self, measured: int, predicted: int | None, wide: bool) -> tuple[str, ...]:
        sizes = (human_bytes(measured), exact_bytes(measured)) if wide else (exact_bytes(measured),)
        if self.predicted is None:
            return sizes
        known = predicted or 0
        share = signed_percent(known - measured, self.measured.components.total_bytes)
        more = (difference(known - measured),) if wide else ()
        return (*sizes, exact_bytes(known), *more, share)

    def _parts(self, component: str) -> dict[str, tuple[int, int]]:
        """Lines that either bill has, unless the only one says no more than the component itself."""
        sides = [_lines(side, component) for side in (self.measured, self.predicted)]
        names = list(dict.fromkeys([*sides[0], *sides[1]]))
        if names == [TITLES[component]]:
            return {}
        return {name: (sides[0].get(name, 0), sides[1].get(name, 0)) for name in names}


def _lines(memory: Memory | None, component: str) -> dict[str, int]:
    found: tuple[Line, ...] = memory.lines if memory else ()
    return {line.name: line.bytes for line in found if line.component == component}
