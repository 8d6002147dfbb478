"""The records of a folder as a table, the newest last.

The difference of two records as a page: the answer in one sentence, then its parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

from rich.text import Text

from trainatomy.reporters import sentences
from trainatomy.reporters.document import (
    Bullets,
    Cell,
    Column,
    Document,
    Part,
    Table,
    grid,
    section,
    styled,
    table,
    words,
)
from trainatomy.reporters.labels import FIGURES, SECTIONS, SETUP, STATUS_STYLES, component
from trainatomy.results.memory import Instant
from trainatomy.results.record import Difference, History, MemoryChange, SetupChange, SpeedChange, Summary
from trainatomy.units import difference as signed
from trainatomy.units import human_bytes, many, rate, seconds, signed_percent

_WIDE = 112
"""Columns from which on GPU, status and group have columns of their own."""

_MEDIUM = 76
"""Columns from which on the time of day and samples per second are shown."""

_SHARED: dict[str, Callable[[Summary], Text]] = {
    "GPU": lambda row: Text(gpu_name(row.gpu)),
    "status": lambda row: Text(row.status, style=STATUS_STYLES.get(row.status, "")),
    "group": lambda row: Text(row.group),
}

_CLOSING = (
    "Gap: predicted against measured device memory. "
    "`trainatomy show RECORD` prints a record again, `trainatomy diff A B` compares two."
)


def history_page(history: History) -> Document:
    """Return a table with one row for each record.

    GPU, status and group have a column where they differ, and are in the headline where they do not.
    """
    parts: list[Part] = [_headline(history)]
    if history.records:
        parts += [Text(), _records_table(history.records), Text(), Text(_CLOSING, style="dim")]
    if history.skipped:
        parts.append(Text(f"\nNot read: {many(len(history.skipped), 'file')} in the folder", style="bold yellow"))
        parts.append(Bullets([f"{each.file}: {each.reason}" for each in history.skipped]))
    return Document(tuple(parts))


def gpu_name(name: str) -> str:
    """Return a short product name: ``NVIDIA H200`` -> ``H200``."""
    return name.removeprefix("NVIDIA ").removeprefix("GeForce ")


def short_id(identity: str) -> str:
    """Return the hash at the end of an id, which also names the record."""
    return identity.rpartition("-")[2]


def _headline(history: History) -> Text:
    rows = history.records
    if not rows:
        none = f"No matching records in {history.folder}"
        return Text(f"{none}; `trainatomy measure` writes them.", style="bold")
    line = Text(f"{many(len(rows), 'record')} in {history.folder}", style="bold")
    shared = [value_of(rows[0]) for value_of in _SHARED.values() if not _differ(rows, value_of)]
    return line.append("".join(f", {value}" for value in shared if value))


def _differ(rows: tuple[Summary, ...], value_of: Callable[[Summary], Text]) -> bool:
    return len({value_of(row).plain for row in rows}) > 1


def _records_table(rows: tuple[Summary, ...]) -> Table:
    """Return the rows, as wide as the page; what does not fit beside the name stands below it."""
    differing = {title: value_of for title, value_of in _SHARED.items() if _differ(rows, value_of)}

    def name(row: Summary) -> Text:
        return Text(row.name + (f" #{row.repeat + 1}" if row.repeat else ""))

    def name_and_more(row: Summary) -> Text:
        values = (value_of(row) for value_of in differing.values())
        return Text("\n").join(filter(None, [name(row), Text(", ").join(filter(None, values))]))

    return table(
        rows,
        words("\nrecord", lambda row: Text(short_id(row.id), style="cyan"), wraps=False),
        words("\ndate, UTC", lambda row: row.created[:16].replace("T", " "), wraps=False, since=_MEDIUM),
        words("\ndate, UTC", lambda row: row.created[:10], wraps=False, until=_MEDIUM),
        words("\nname", name, since=_WIDE),
        words("\nname", name_and_more, until=_WIDE),
        *(words(f"\n{title}", of, wraps=title != "status", since=_WIDE) for title, of in differing.items()),
        Column("device\nmemory", lambda row: "-" if row.device_bytes is None else human_bytes(row.device_bytes)),
        Column("\ngap", lambda row: "-" if row.gap is None else signed_percent(row.gap, 1)),
        Column("step\ntime", lambda row: _speed_cell("step_seconds", row.step_seconds)),
        Column("samples\n/s", lambda row: _speed_cell("rate", row.samples_per_second), since=_MEDIUM),
    )


_NAMED = 4
"""Components and settings that the answer names at most."""

_SMALL_SHARE = 0.05
"""Components that changed by less than this share of the largest change are not named."""

_SAME_SPEED = 0.01
_LARGE_RATIO = 2
"""Ratio from which it is shown itself, because it is easier to read than a percentage."""

_SOURCE_SECTIONS = {"measured": "measured_peak", "predicted": "predicted_peak"}


def difference_page(difference: Difference) -> Document:
    """Return the page of a difference: the answer, changes of the setup, memory and time."""
    return Document((Text(), *_difference(difference)), answer(difference))


def _difference(difference: Difference) -> Iterator[Part]:
    sides = {"A": difference.before, "B": difference.after}
    yield grid([(letter, _record(side)) for letter, side in sides.items()], words(wraps=False, style="bold"), "left")
    if difference.changes:
        yield section(SECTIONS["changes"], _setup(difference))
    if difference.source is not None:
        title = SECTIONS[_SOURCE_SECTIONS[difference.source]]
        yield section(title, _breakdown(difference), Text(), _peaks(difference.peaks))
    yield section(SECTIONS["measured_totals"], _changed_figures(difference.figures))
    if any(_known(change) for change in difference.paces):
        yield section(SECTIONS["speed"], _speeds(difference.paces))
    if any(_known(change) for change in difference.nvml):
        yield section(SECTIONS["nvml"], _changed_figures(difference.nvml))


def answer(difference: Difference) -> str:
    """Return the difference in one sentence.

    ``B uses 2.31 GiB less: activations -2.50 GiB, temporary buffers +205 MiB; 12 % more time per step; the only
    change: train.gradient_checkpointing: false → true.``
    """
    parts = [_memory(difference) + _largest_changes(difference), _speed(difference), _changes(difference)]
    return f"{'; '.join(part for part in parts if part)}."


def _memory(difference: Difference) -> str:
    """Compare device memory as measured, else reserved memory; a failed run's memory says little."""
    for letter, side in (("A", difference.before), ("B", difference.after)):
        if side.status == "out of memory":
            both = difference.before.status == difference.after.status
            return "Both ran out of memory" if both else f"{letter} ran out of memory"
    figures = {change.name: change for change in difference.figures}
    device, reserved = figures["device_bytes"], figures["peak_reserved_bytes"]
    figure, verb = (device, "uses") if device.change is not None else (reserved, "reserves")
    if not figure.change:
        return f"B {verb} as much memory as A"
    return f"B {verb} {human_bytes(abs(figure.change))} {'less' if figure.change < 0 else 'more'}"


def _largest_changes(difference: Difference) -> str:
    ranked = sorted((each for each in difference.components if each.change), key=_size, reverse=True)
    named = [each for each in ranked if _size(each) >= _SMALL_SHARE * _size(ranked[0])][:_NAMED]
    if not named:
        return ""
    listed = ", ".join(f"{component(each.component).title} {signed(each.change or 0)}" for each in named)
    return f"{':' if difference.source == 'measured' else '; predicted changes:'} {listed}"


def _size(change: MemoryChange) -> int:
    return abs(change.change or 0)


def _speed(difference: Difference) -> str:
    """Compare throughput where known, which does not depend on the samples per step; else the time per step."""
    changes = {change.name: change for change in difference.paces}
    rates, steps = changes.get("samples_per_second"), changes.get("step_seconds")
    if rates is not None and rates.ratio is not None:
        ratio, figure, more, less = rates.ratio, "samples per second", "more", "fewer"
    elif steps is not None and steps.ratio is not None:
        ratio, figure, more, less = steps.ratio, "time per step", "more", "less"
    else:
        return ""
    if abs(ratio - 1) < _SAME_SPEED:
        return f"the same {figure}"
    if ratio >= _LARGE_RATIO:
        return f"{ratio:.1f} times the {figure}"
    return f"{100 * abs(ratio - 1):.0f} % {more if ratio > 1 else less} {figure}"


def _changes(difference: Difference) -> str:
    """Name the settings that changed, else the hardware and versions; a single change is the reason."""
    settings = [change for change in difference.changes if change.about == "workload"]
    environment = [change for change in difference.changes if change.about != "workload"]
    changes = settings or environment
    if not changes:
        return "nothing in the records differs: equal runs vary this much"
    listed = ", ".join(f"{_name(each)}: {_value(each.before)} → {_value(each.after)}" for each in changes[:_NAMED])
    more = f" and {len(changes) - _NAMED} more" if len(changes) > _NAMED else ""
    others = ", ".join(dict.fromkeys(SETUP[change.about] for change in environment)) if settings else ""
    other = f"; also different: {others}" if others else ""
    return f"{'the only change' if len(difference.changes) == 1 else 'changed'}: {listed}{more}{other}"


def _name(change: SetupChange) -> str:
    return SETUP[change.about] if change.about in ("gpu", "driver") else change.name


def _value(value: object) -> str:
    """Format a setting as a workload file has it, and an absent one as a dash."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _record(side: Summary) -> Text:
    when = side.created[:16].replace("T", " ")
    status = Text(side.status, style=STATUS_STYLES[side.status])
    return Text.assemble(f"{side.name}: ", status, f" on {side.gpu}, {when} UTC ({side.id})")


def _setup(difference: Difference) -> Table:
    return table(
        difference.changes,
        words("", _name, min_width=28),
        words("A", lambda change: _value(change.before)),
        words("B", lambda change: _value(change.after)),
    )


def _breakdown(difference: Difference) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for change in difference.components:
        label = component(change.component)
        rows.append((Text(label.title, style=label.style), *_bytes(change)))
        rows += [styled("dim", f"  {line.name}", *_bytes(line)) for line in _parts(difference, change)]
    both = [(change.before or 0, change.after or 0) for change in difference.components]
    total = MemoryChange("", "total", *map(sum, zip(*both, strict=True)))
    return _columns([*rows, styled("bold", "total", *_bytes(total))], "A", "B", "B - A")


def _parts(difference: Difference, whole: MemoryChange) -> list[MemoryChange]:
    """Return the lines of a component that differ, unless one of them is the whole difference."""
    lines = [line for line in difference.lines if line.component == whole.component]
    return [] if [line.change for line in lines] == [whole.change] else lines


def _peaks(peaks: Sequence[Instant]) -> Text:
    """Return the instants of the two breakdowns: if they differ, so does what is held at them."""
    before, after = map(sentences.instant, peaks)
    if before == after:
        return Text(f"Both peaks are {before}.", style="dim")
    return Text(f"The peak of A is {before}; the peak of B is {after}.", style="dim")


def _changed_figures(changes: Sequence[MemoryChange]) -> Table:
    rows = []
    for change in filter(_known, changes):
        relative = signed_percent(change.change, change.before, 1) if change.change and change.before else ""
        rows.append((FIGURES[change.name], *_bytes(change), relative))
    return _columns(rows, "A", "B", "B - A", "")


def _speeds(changes: Sequence[SpeedChange]) -> Table:
    rows = []
    for change in filter(_known, changes):
        sides = (_speed_cell(change.name, change.before), _speed_cell(change.name, change.after))
        rows.append((FIGURES[change.name], *sides, "-" if change.ratio is None else f"{change.ratio:.2f}"))
    return _columns(rows, "A", "B", "B / A")


def _known(change: MemoryChange | SpeedChange) -> bool:
    return change.before is not None or change.after is not None


def _speed_cell(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return seconds(value) if name == "step_seconds" else rate(value)


def _bytes(change: MemoryChange) -> tuple[str, str, str]:
    before, after = ("-" if count is None else human_bytes(count) for count in (change.before, change.after))
    return before, after, "-" if change.change is None else signed(change.change)


def _columns(rows: Sequence[tuple[Cell, ...]], *titles: str) -> Table:
    return Table((words(min_width=28), *(Column(title, wraps=True) for title in titles)), tuple(rows))
