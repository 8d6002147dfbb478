"""The anatomy of a step's operations as a page."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainatomy.reporters.sentences import claim_sentence, padding_advice
from trainatomy.reporters.text.rendering import bullets, figures, section
from trainatomy.results.operation_breakdown import (
    TITLES,
    GroupShare,
    Joined,
    OperationBreakdown,
    Padding,
    PublishedShares,
    WastefulShape,
)
from trainatomy.units import flop_of, human_bytes, percent, times

_LEAST_GAIN = 0.5e-6
"""Seconds below which a padding would be shown to gain nothing."""
PHASES = {
    "step": "the whole step",
    "recompute": "recomputation",
    "zero_grad": "zeroing of gradients",
    "other": "between",
}


def anatomy_page(anatomy: OperationBreakdown) -> Group:
    """Everything that an anatomy says, for a reader."""
    parts: list[RenderableType] = [Text(_title(anatomy), style="bold")]
    parts.append(section("What the operations do", _groups(anatomy.groups)))
    if anatomy.seconds is not None or anatomy.measured_seconds is not None:
        parts.append(section("What they cost the GPU", _times(anatomy.groups)))
    if anatomy.published is not None:
        parts.append(section("Beside what was published", _published(anatomy, anatomy.published)))
    parts.append(section("The heaviest operations", _heaviest(anatomy)))
    if anatomy.modules:
        parts.append(section("The heaviest modules", _modules(anatomy)))
    if anatomy.claims:
        parts.append(
            section("What the guides say, for this model", bullets([claim_sentence(claim) for claim in anatomy.claims]))
        )
    if anatomy.shapes:
        parts.append(section("Shapes that waste the card", _shapes(anatomy.shapes)))
    if anatomy.paddings:
        parts.append(section("What to pad", *_paddings(anatomy)))
    parts.append(section("Not in these figures", bullets(_left_out(anatomy))))
    if anatomy.joined is not None:
        parts.append(section("How the profile was joined", bullets(_joined(anatomy.joined))))
    if anatomy.notes:
        parts.append(section("Notes", bullets(anatomy.notes)))
    return Group(*parts)


def _title(anatomy: OperationBreakdown) -> str:
    return (
        f"{anatomy.name} on {anatomy.gpu}: {anatomy.operations:,} operations in one step, "
        f"{flop_of(anatomy.flop)}FLOP, {human_bytes(anatomy.bytes)} moved"
    )


def _groups(groups: Sequence[GroupShare]) -> Table:
    table = figures(
        "", numbers=("\nruns", "\nFLOP", "\nbytes", "FLOP/\nbyte", "of\nFLOP", "of\nbytes", "held at\nthe peak")
    )
    phase = ""
    for row in groups:
        if row.phase != phase:
            phase = row.phase
            table.add_row(Text(PHASES.get(phase, phase), style="bold"))
        held = "" if row.peak_bytes is None else human_bytes(row.peak_bytes)
        table.add_row(
            f" {_short(row.group)}",
            f"{row.operations:,}",
            flop_of(row.flop),
            human_bytes(row.bytes),
            "-"
            if row.intensity is None
            else f"{row.intensity:.3g}"
            if row.intensity < 1000
            else f"{row.intensity:.0f}",
            _share(row.flop_share),
            _share(row.bytes_share),
            held,
        )
    return table


def _times(groups: Sequence[GroupShare]) -> Table:
    measured = any(row.measured_seconds is not None for row in groups)
    more = ("\nmeasured", "of its\ntime") if measured else ()
    table = figures("", numbers=("\npredicted", "of its\ntime", *more))
    table.add_column("\nbound by")
    phase = ""
    for row in groups:
        if row.phase != phase:
            phase = row.phase
            whole = [_duration(_together(groups, phase, "seconds")), ""]
            whole += [_duration(_together(groups, phase, "measured_seconds")), ""] if measured else []
            table.add_row(*(Text(cell, style="bold") for cell in (PHASES.get(phase, phase), *whole)))
        profiled = [_duration(row.measured_seconds), _share(row.measured_share)] if measured else []
        predicted = [_duration(row.seconds), _share(row.seconds_share)]
        table.add_row(f" {_short(row.group)}", *predicted, *profiled, row.bound_by or "")
    return table


def _published(anatomy: OperationBreakdown, published: PublishedShares) -> Group:
    timed = _timed(anatomy)
    table = figures("", numbers=("FLOP,\npublished", "\nhere", "time,\npublished", *timed.values()))
    for row in anatomy.groups:
        if row.phase == "step":
            table.add_row(
                TITLES[row.group],
                f"{published.flop_percent[row.group]:.2f} %",
                f"{100 * row.flop_share:.2f} %",
                f"{published.time_percent[row.group]:.1f} %",
                *(_share(row.seconds_share if name == "seconds" else row.measured_share) for name in timed),
            )
    return Group(table, Text(f"Published: {published.source}.", style="dim"))


def _together(groups: Sequence[GroupShare], phase: str, name: str) -> float | None:
    """A phase's time: of its groups, where it is known."""
    known = [getattr(row, name) for row in groups if row.phase == phase]
    return None if None in known else sum(known)


def _timed(anatomy: OperationBreakdown) -> dict[str, str]:
    """Columns of times: fields of a row with their titles."""
    titles = {"seconds": "\npredicted", "measured_seconds": "\nmeasured"}
    return {name: title for name, title in titles.items() if getattr(anatomy, name) is not None}


def _heaviest(anatomy: OperationBreakdown) -> Table:
    timed = _timed(anatomy)
    table = figures("operation", numbers=("\nruns", "of\nFLOP", "of\nbytes", *timed.values()), folded=0)
    for row in anatomy.heaviest:
        what = Text(row.operation.removeprefix("aten::"))
        what.append(f"\n {row.module or '-'}, {PHASES.get(row.phase, row.phase)}", style="dim")
        table.add_row(
            what,
            f"{row.calls:,}",
            "?" if row.flop is None else _share(row.flop_share),
            _share(row.bytes_share),
            *(_duration(getattr(row, name)) for name in timed),
        )
    return table


def _modules(anatomy: OperationBreakdown) -> Table:
    timed = _timed(anatomy)
    table = figures("module", numbers=("\nruns", "of\nFLOP", "of\nbytes", *timed.values()), folded=0)
    for row in anatomy.modules:
        times_of_it = (_duration(getattr(row, name)) for name in timed)
        shares = _share(row.flop_share), _share(row.bytes_share)
        table.add_row(row.module or "-", f"{row.operations:,}", *shares, *times_of_it)
    return table


def _paddings(anatomy: OperationBreakdown) -> list[RenderableType]:
    """Sentences, and how to see one before and after."""
    parts: list[RenderableType] = [bullets([_padding(one, anatomy.seconds) for one in anatomy.paddings])]
    known = next((one for one in anatomy.paddings if one.setting), None)
    if known is not None:
        both = f"trainatomy compare WORKLOAD.yaml --sweep {known.setting}={known.value},{known.padded_value}"
        parts.append(Text(f"Before and after: {both}", style="dim"))
    return parts


def _padding(one: Padding, step_seconds: float | None) -> str:
    """Which setting, which size, what it gains."""
    gain = ""
    if one.gain_seconds is not None and step_seconds:
        gain = f", predicted to save {_duration(one.gain_seconds)} ({percent(one.gain_seconds, step_seconds)})"
    modules = ", ".join(module or "-" for module in one.modules)
    setting = f"{one.setting}: {one.padded_value}" if one.setting else "no setting"
    return (
        f"{setting}: {one.size:,} becomes {one.padded:,} in {one.products:,} "
        f"product{'s' if one.products > 1 else ''} of {modules}{gain}; {padding_advice(one)}"
    )


def _shapes(shapes: Sequence[WastefulShape], most: int = 12) -> Group:
    costly = [shape for shape in shapes if shape.gain_seconds is None or shape.gain_seconds >= _LEAST_GAIN]
    idle, shapes = len(shapes) - len(costly), costly
    priced = any(shape.gain_seconds is not None for shape in shapes)
    table = figures("product", "what", numbers=("used", "of FLOP", *(["gain"] if priced else [])), folded=1)
    for shape in shapes[:most]:
        batch, m, n, k = shape.shape
        product = f"{shape.operation.removeprefix('aten::')} {f'{batch}×' if batch > 1 else ''}[{m},{k}]×[{k},{n}]"
        what = f"{shape.module or '-'}, {shape.phase}, {times(shape.calls)}: {_remark(shape)}"
        gain = [_duration(shape.gain_seconds)] if priced else []
        table.add_row(product, what, f"{100 * shape.used:.0f} %", _share(shape.flop_share), *gain)
    left = len(shapes) - most
    more = [f"{left} more"] if left > 0 else []
    more += [f"{idle} whose padding would gain less than a microsecond"] if idle else []
    parts: list[RenderableType] = [table] if shapes else []
    if more:
        parts.append(Text(f"{'and ' if shapes else ''}{' and '.join(more)} (--json lists them)", style="dim"))
    return Group(*parts)


def _remark(shape: WastefulShape) -> str:
    if shape.kind in ("alignment", "best alignment"):
        return f"{shape.dimension} = {shape.size} is no multiple of {shape.multiple}; pad it to {shape.padded}"
    if shape.kind == "waves":
        return f"{shape.size} tiles of {shape.dimension} for {shape.multiple} multiprocessors: the last wave is short"
    return f"tiles of {shape.dimension} reach beyond the result"


def _left_out(anatomy: OperationBreakdown) -> list[str]:
    aside = anatomy.aside
    lines = [
        f"{aside['views']:,} views and allocations run no kernel; {aside['host']:,} operations run on the CPU; "
        f"values that the host reads: {aside['reads_by_host']:,}; copies between host and GPU: {aside['transfers']:,}."
    ]
    if anatomy.unformulated:
        named = ", ".join(
            f"{row.operation} ({times(row.calls)}, {percent(row.bytes_share, 1)} of the bytes)"
            for row in anatomy.unformulated
        )
        lines.append(f"No FLOP formula is known for {named}.")
    if anatomy.by_rule:
        lines.append(f"Not in the table of operators, grouped by their form: {', '.join(anatomy.by_rule)}.")
    return lines


def _joined(joined: Joined) -> list[str]:
    lines = [
        f"{joined.operations:,} of {joined.of:,} predicted operations were found in the profile, with "
        f"{percent(joined.seconds, joined.of_seconds)} of its {_duration(joined.of_seconds)} on the GPU."
    ]
    for said, names in (("only predicted", joined.only_predicted), ("only measured", joined.only_measured)):
        if names:
            lines.append(f"{said}: " + ", ".join(f"{name} ({times(count)})" for name, count in names.items()))
    return lines


def _short(group: str) -> str:
    return TITLES[group].removeprefix("tensor ").removeprefix("statistical ").removesuffix(" operators")


def _share(share: float | None) -> str:
    if share is None:
        return ""
    return percent(share, 1.0, 2 if 0 < share < 0.01 or 0.99 < share < 1 else 1)


def _duration(duration: float | None) -> str:
    if duration is None:
        return ""
    return f"{round(duration * 1e6)} µs" if abs(duration) < 1e-3 else f"{duration * 1e3:.2f} ms"
