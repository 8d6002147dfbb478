"""Memory over the steps: one line for each phase of each step, at the instant in it when most is allocated."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from trainatomy.reporters.text.bill import STYLES, TITLES
from trainatomy.results.memory import TimelinePoint
from trainatomy.units import human_bytes

_COLUMNS_BESIDE_THE_BAR = 34


class Timeline:
    """Bars stacked by component, to one scale, with a legend below; in a phase, the point that holds most speaks for
    it.
    """

    def __init__(self, points: Sequence[TimelinePoint]) -> None:
        largest: dict[tuple[int, str], TimelinePoint] = {}
        for point in points:
            best = largest.setdefault((point.step, point.phase), point)
            if sum(point.components.values()) > sum(best.components.values()):
                largest[point.step, point.phase] = point
        self.peaks = list(largest.values())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(10, min(options.max_width - _COLUMNS_BESIDE_THE_BAR, 60))
        largest = max((sum(point.components.values()) for point in self.peaks), default=0) or 1
        table = Table.grid(padding=(0, 2, 0, 0))
        for justify in ("right", "left", "right", "left"):
            table.add_column(justify=justify, no_wrap=True)
        for point in self.peaks:
            total = human_bytes(sum(point.components.values()))
            table.add_row(*_when(point), total, _stacked(point.components, largest, width))
        yield table
        yield self._legend()

    def _legend(self) -> Text:
        held = {name for point in self.peaks for name, count in point.components.items() if count}
        legend = Text()
        for name in TITLES:
            if name in held:
                legend.append(f"{_LETTERS[name]} {TITLES[name]}  ", style=STYLES[name])
        return legend


def _when(point: TimelinePoint) -> tuple[str, str]:
    """Step, from 1, and phase; what comes before the first step belongs to none."""
    if point.phase == "load":
        return "", "load"
    return ("", "set-up") if point.step < 0 else (f"step {point.step + 1}", point.phase)


_LETTERS = {
    "weights": "W",
    "optimizer_states": "O",
    "gradients": "G",
    "activations": "A",
    "temporary": "T",
    "functionality": "F",
}
_LETTERS |= {"cache": "C", "context": "K"}


def _stacked(components: dict[str, int], largest: int, width: int) -> Text:
    """A bar of letters, which tell components apart without colour too; rounding never makes it longer."""
    drawn, held, columns = Text(), 0, 0
    for name in TITLES:
        held += components.get(name, 0)
        end = round(held / largest * width)
        drawn.append(_LETTERS[name] * (end - columns), style=STYLES[name])
        columns = end
    return drawn
