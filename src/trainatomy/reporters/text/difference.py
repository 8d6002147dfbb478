"""Two records and what lies between them: the answer in one sentence, then its parts."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainatomy.reporters.text.answer import answer, changes_phrase, shown
from trainatomy.reporters.text.bill import STYLES, TITLES
from trainatomy.reporters.text.history import STATUS_STYLES
from trainatomy.reporters.text.rendering import section
from trainatomy.reporters.text.verdict import instant_phrase
from trainatomy.results.difference import Difference, MemoryChange, SpeedChange
from trainatomy.results.memory import Instant
from trainatomy.results.record import Summary
from trainatomy.units import difference as signed
from trainatomy.units import human_bytes, rate, seconds, signed_percent

_FIGURES = {
    "device_bytes": "device memory, as nvidia-smi shows it",
    "peak_reserved_bytes": "peak reserved",
    "peak_allocated_bytes": "peak allocated",
    "model_bytes": "the model, once loaded",
    "process_bytes": "NVML's figure for the process",
    "nvml_used_bytes": "used, by the first version of the call",
    "idle_bytes": "of it before the first tensor (the driver's own)",
    "context_bytes": "what the first tensor cost (the context)",
}
_TITLES = {
    "measured": "Where the memory went: the measured bill at the peak",
    "predicted": "Where the memory went, as predicted: not both records have a measured bill",
}
_PACES = {
    "step_seconds": "time of a step",
    "samples_per_second": "samples per second",
    "tokens_per_second": "tokens per second",
}


def difference_page(difference: Difference) -> Group:
    """The answer first, then what changed, where the memory went, and time."""
    parts: list[RenderableType] = [Text(answer(difference), style="bold"), Text(), _sides(difference)]
    if difference.changes:
        parts.append(section("What changed", _changes(difference)))
    if difference.source is not None:
        parts.append(section(_TITLES[difference.source], _bill(difference), Text(), _peaks(difference.peaks)))
    parts.append(section("As measured", _shifts(difference.figures)))
    if any(_known(pace) for pace in difference.paces):
        parts.append(section("Time and throughput", _times(difference.paces)))
    if any(_known(shift) for shift in difference.nvml):
        parts.append(section("What NVML said", _shifts(difference.nvml)))
    return Group(*parts)


def _sides(difference: Difference) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    for letter, side in (("A", difference.before), ("B", difference.after)):
        table.add_row(letter, _side(side))
    return table


def _side(side: Summary) -> Text:
    line = Text(f"{side.name}: ")
    line.append(side.status, style=STATUS_STYLES[side.status])
    return line.append(f" on {side.gpu}, {side.created[:16].replace('T', ' ')} UTC ({side.id})")


def _changes(difference: Difference) -> Table:
    table = _columns("", "A", "B", justify="left")
    for change in difference.changes:
        name = change.name if change.about == "workload" else changes_phrase(change)
        table.add_row(name, shown(change.before), shown(change.after))
    return table


def _bill(difference: Difference) -> Table:
    table = _columns("", "A", "B", "B - A")
    for shift in difference.components:
        name = shift.component
        table.add_row(Text(TITLES[name], style=STYLES[name]), *_bytes(shift))
        for line in _parts(difference, shift):
            table.add_row(*(Text(cell, style="dim") for cell in (f"  {line.name}", *_bytes(line))))
    both = [(shift.before or 0, shift.after or 0) for shift in difference.components]
    total = MemoryChange("", "total", *map(sum, zip(*both, strict=True)))
    table.add_row(*(Text(cell, style="bold") for cell in ("together", *_bytes(total))))
    return table


def _parts(difference: Difference, component: MemoryChange) -> list[MemoryChange]:
    """The lines of a component that differ, unless one of them is the whole difference."""
    lines = [line for line in difference.lines if line.component == component.component]
    return [] if [line.change for line in lines] == [component.change] else lines


def _peaks(peaks: Sequence[Instant]) -> Text:
    """Where the two bills were drawn up: of different instants, they differ by what happens between these too."""
    before, after = map(instant_phrase, peaks)
    if before == after:
        return Text(f"Both peaks are {before}.", style="dim")
    return Text(f"The peak of A is {before}; the peak of B {after}.", style="dim")


def _shifts(shifts: Sequence[MemoryChange]) -> Table:
    table = _columns("", "A", "B", "B - A", "")
    for shift in filter(_known, shifts):
        relative = signed_percent(shift.change, shift.before, 1) if shift.change and shift.before else ""
        table.add_row(_FIGURES[shift.name], *_bytes(shift), relative)
    return table


def _times(paces: Sequence[SpeedChange]) -> Table:
    table = _columns("", "A", "B", "B / A")
    for pace in filter(_known, paces):
        cells = (_pace(pace.name, pace.before), _pace(pace.name, pace.after))
        table.add_row(_PACES[pace.name], *cells, "-" if pace.ratio is None else f"{pace.ratio:.2f}")
    return table


def _known(figure: MemoryChange | SpeedChange) -> bool:
    return figure.before is not None or figure.after is not None


def _pace(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return seconds(value) if name == "step_seconds" else rate(value)


def _bytes(shift: MemoryChange) -> tuple[str, str, str]:
    sides = ("-" if count is None else human_bytes(count) for count in (shift.before, shift.after))
    return (*sides, "-" if shift.change is None else signed(shift.change))  # type: ignore[return-value]


def _columns(first: str, *rest: str, justify: str = "right") -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(first, min_width=28, overflow="fold")
    for title in rest:
        table.add_column(title, justify=justify, overflow="fold")  # type: ignore[arg-type]
    return table
