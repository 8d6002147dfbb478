"""The operations of a step as a page: by group and phase, heaviest operators and modules, shapes worth padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainatomy.reporters import subject_sentences
from trainatomy.reporters.labels import GROUPS, LIMITS, PHASES, SECTIONS, SHORT_GROUPS
from trainatomy.reporters.sentences import claim_sentence, padding_advice
from trainatomy.reporters.text.rendering import bullets, figures, section
from trainatomy.results.operations import (
    CollectiveShare,
    GroupShare,
    Joined,
    OperationBreakdown,
    Padding,
    PublishedShares,
    WastefulShape,
)
from trainatomy.units import flop_of, human_bytes, percent, times, whole_flop

_LEAST_GAIN = 0.5e-6
"""Seconds below which the gain of a padding is not shown."""

_MOST_SHAPES = 12


def operations_page(breakdown: OperationBreakdown) -> Group:
    """Return everything in an operation breakdown as a page."""
    parts: list[RenderableType] = [Text(_title(breakdown), style="bold")]
    parts.append(section(SECTIONS["groups"], _groups(breakdown.groups)))
    if breakdown.seconds is not None or breakdown.measured_seconds is not None:
        parts.append(section(SECTIONS["group_times"], _times(breakdown.groups)))
    if breakdown.published is not None:
        parts.append(section(SECTIONS["published_shares"], _published(breakdown, breakdown.published)))
    if breakdown.collectives:
        parts.append(section(SECTIONS["operation_collectives"], _collectives(breakdown.collectives)))
    if breakdown.experts is not None:
        parts.append(section(SECTIONS["experts"], bullets(subject_sentences.experts(breakdown.experts))))
    parts.append(section(SECTIONS["operations"], _heaviest(breakdown)))
    if breakdown.modules:
        parts.append(section(SECTIONS["heavy_modules"], _modules(breakdown)))
    if breakdown.claims:
        rules = [claim_sentence(claim) for claim in breakdown.claims]
        parts.append(section(SECTIONS["rules"], bullets(rules)))
    if breakdown.shapes:
        padded = {one.size: one.padded for one in breakdown.paddings}
        parts.append(section(SECTIONS["shapes"], _shapes(breakdown.shapes, padded)))
    if breakdown.paddings:
        parts.append(section(SECTIONS["paddings"], *_paddings(breakdown)))
    parts.append(section(SECTIONS["left_out"], bullets(_left_out(breakdown))))
    if breakdown.joined is not None:
        parts.append(section(SECTIONS["match"], bullets(_joined(breakdown.joined))))
    if breakdown.notes:
        parts.append(section(SECTIONS["notes"], bullets(breakdown.notes)))
    return Group(*parts)


def _title(breakdown: OperationBreakdown) -> str:
    return (
        f"{breakdown.name} on {breakdown.gpu_name or breakdown.gpu}: {breakdown.operations:,} operations in one step, "
        f"{whole_flop(breakdown.flop)}, {human_bytes(breakdown.bytes)} moved"
    )


def _groups(groups: Sequence[GroupShare]) -> Table:
    table = figures(
        "", numbers=("\ncalls", "\nFLOP", "\nbytes", "FLOP/\nbyte", "of\nFLOP", "of\nbytes", "held at\nthe peak")
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
    more = ("\nmeasured", "share of\nphase") if measured else ()
    table = figures("", numbers=("\npredicted", "share of\nphase", *more))
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
        table.add_row(
            f" {_short(row.group)}", *predicted, *profiled, LIMITS.get(row.bound_by or "", row.bound_by or "")
        )
    return table


def _published(breakdown: OperationBreakdown, published: PublishedShares) -> Group:
    timed = _timed(breakdown)
    table = figures("", numbers=("FLOP,\npublished", "\npredicted", "time,\npublished", *timed.values()))
    for row in breakdown.groups:
        if row.phase == "step":
            table.add_row(
                GROUPS[row.group],
                f"{published.flop_percent[row.group]:.2f} %",
                f"{100 * row.flop_share:.2f} %",
                f"{published.time_percent[row.group]:.1f} %",
                *(_share(row.seconds_share if name == "seconds" else row.measured_share) for name in timed),
            )
    return Group(table, Text(f"Published: {published.source}.", style="dim"))


def _collectives(collectives: Sequence[CollectiveShare]) -> Table:
    table = figures("", numbers=("\nGPUs", "\ncalls", "\nmessages", "\npredicted", "bus\nbandwidth"))
    for row in collectives:
        speed = "" if row.bus_bytes_per_second is None else f"{row.bus_bytes_per_second / 1e9:.1f} GB/s"
        kind = "copy between GPUs" if row.kind == "copy" else row.kind.replace("_", "-")
        table.add_row(kind, str(row.ranks), f"{row.calls:,}", human_bytes(row.bytes), _duration(row.seconds), speed)
    return table


def _together(groups: Sequence[GroupShare], phase: str, name: str) -> float | None:
    """Return the time of a phase's groups together; ``None`` where one is not known."""
    known = [getattr(row, name) for row in groups if row.phase == phase]
    return None if None in known else sum(known)


def _timed(breakdown: OperationBreakdown) -> dict[str, str]:
    """Return the columns of times: fields of a row with their titles."""
    titles = {"seconds": "\npredicted", "measured_seconds": "\nmeasured"}
    return {name: title for name, title in titles.items() if getattr(breakdown, name) is not None}


def _heaviest(breakdown: OperationBreakdown) -> Table:
    timed = _timed(breakdown)
    table = figures("operation", numbers=("\ncalls", "of\nFLOP", "of\nbytes", *timed.values()), folded=0)
    for row in breakdown.heaviest:
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


def _modules(breakdown: OperationBreakdown) -> Table:
    timed = _timed(breakdown)
    table = figures("module", numbers=("\ncalls", "of\nFLOP", "of\nbytes", *timed.values()), folded=0)
    for row in breakdown.modules:
        times_of_it = (_duration(getattr(row, name)) for name in timed)
        shares = _share(row.flop_share), _share(row.bytes_share)
        table.add_row(row.module or "-", f"{row.operations:,}", *shares, *times_of_it)
    return table


def _paddings(breakdown: OperationBreakdown) -> list[RenderableType]:
    """Return a sentence for each size, and a command that compares one before and after."""
    parts: list[RenderableType] = [bullets([_padding(one, breakdown.seconds) for one in breakdown.paddings])]
    known = next((one for one in breakdown.paddings if one.setting), None)
    if known is not None:
        both = f"trainatomy compare WORKLOAD.yaml --sweep {known.setting}={known.value},{known.padded_value}"
        parts.append(Text(f"To compare: {both}", style="dim"))
    return parts


def _padding(one: Padding, step_seconds: float | None) -> str:
    """Return the setting to change, the size it decides and the predicted gain."""
    gain = ""
    if one.gain_seconds is not None and step_seconds:
        gain = f", predicted to save {_duration(one.gain_seconds)} ({percent(one.gain_seconds, step_seconds)})"
    modules = ", ".join(module or "-" for module in one.modules)
    setting = f"{one.setting}: {one.padded_value}" if one.setting else "no setting"
    return (
        f"{setting}: {one.size:,} becomes {one.padded:,} in {one.products:,} "
        f"product{'s' if one.products > 1 else ''} of {modules}{gain}; {padding_advice(one)}"
    )


def _shapes(shapes: Sequence[WastefulShape], padded: Mapping[int, int], most: int = _MOST_SHAPES) -> Group:
    """Return the products; ``padded``: what sizes are best padded to, where padding them pays."""
    costly = [shape for shape in shapes if shape.gain_seconds is None or shape.gain_seconds >= _LEAST_GAIN]
    idle, shapes = len(shapes) - len(costly), costly
    with_gain = any(shape.gain_seconds is not None for shape in shapes)
    table = figures("product", "where and why", numbers=("used", "of FLOP", *(["gain"] if with_gain else [])), folded=1)
    for shape in shapes[:most]:
        batch, m, n, k = shape.shape
        product = f"{shape.operation.removeprefix('aten::')} {f'{batch}×' if batch > 1 else ''}[{m},{k}]×[{k},{n}]"
        what = f"{shape.module or '-'}, {shape.phase}, {times(shape.calls)}: {_remark(shape, padded)}"
        gain = [_duration(shape.gain_seconds)] if with_gain else []
        table.add_row(product, what, f"{100 * shape.used:.0f} %", _share(shape.flop_share), *gain)
    left = len(shapes) - most
    more = [f"{left} more"] if left > 0 else []
    more += [f"{idle} that padding would speed up by less than a microsecond"] if idle else []
    parts: list[RenderableType] = [table] if shapes else []
    if more:
        parts.append(Text(f"{'and ' if shapes else ''}{' and '.join(more)} (--json lists them)", style="dim"))
    return Group(*parts)


def _remark(shape: WastefulShape, padded: Mapping[int, int]) -> str:
    if shape.kind in ("alignment", "best alignment"):
        better = f"; pad it to {padded[shape.size]:,}" if shape.size in padded else ""
        return f"{shape.dimension} = {shape.size:,} is not a multiple of {shape.multiple}{better}"
    if shape.kind == "waves":
        return (
            f"{shape.size} tiles of {shape.dimension} for {shape.multiple} multiprocessors: the last wave is not full"
        )
    return f"tiles of {shape.dimension} extend beyond the result"


def _left_out(breakdown: OperationBreakdown) -> list[str]:
    aside = breakdown.aside
    lines = [
        f"{aside['views']:,} views and allocations, which run no kernel; {aside['host']:,} operations on the CPU; "
        f"{aside['reads_by_host']:,} values that the CPU reads; {aside['transfers']:,} copies between CPU and GPU."
    ]
    if breakdown.unformulated:
        named = ", ".join(
            f"{row.operation} ({times(row.calls)}, {percent(row.bytes_share, 1)} of the bytes)"
            for row in breakdown.unformulated
        )
        lines.append(f"There is no FLOP formula for {named}.")
    if breakdown.by_rule:
        lines.append(f"Not in the table of operators, grouped by their signature: {', '.join(breakdown.by_rule)}.")
    return lines


def _joined(joined: Joined) -> list[str]:
    lines = [
        f"{joined.operations:,} of {joined.of:,} predicted operations were found in the profile, with "
        f"{percent(joined.seconds, joined.of_seconds)} of its {_duration(joined.of_seconds)} on the GPU."
    ]
    for title, names in (("only predicted", joined.only_predicted), ("only measured", joined.only_measured)):
        if names:
            lines.append(f"{title}: " + ", ".join(f"{name} ({times(count)})" for name, count in names.items()))
    return lines


def _short(group: str) -> str:
    return SHORT_GROUPS[group]


def _share(share: float | None) -> str:
    if share is None:
        return ""
    return percent(share, 1.0, 2 if 0 < share < 0.01 or 0.99 < share < 1 else 1)


def _duration(duration: float | None) -> str:
    if duration is None:
        return ""
    return f"{round(duration * 1e6)} µs" if abs(duration) < 1e-3 else f"{duration * 1e3:.2f} ms"
