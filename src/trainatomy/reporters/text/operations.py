"""The operations of a step as a page: by group and phase, heaviest operators and modules, shapes worth padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.text import Text

from trainatomy.reporters import subject_sentences
from trainatomy.reporters.document import (
    Bullets,
    Cell,
    Column,
    Document,
    Part,
    Table,
    figures,
    listed,
    section,
    styled,
    table,
    words,
)
from trainatomy.reporters.labels import GROUPS, LIMITS, PHASES, SECTIONS, SHORT_GROUPS
from trainatomy.reporters.sentences import claim_sentence, padding_advice
from trainatomy.results.operations import (
    CollectiveShare,
    GroupShare,
    HeavyOperation,
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


def operations_page(breakdown: OperationBreakdown) -> Document:
    """Return everything in an operation breakdown as a page."""
    return Document(tuple(_parts(breakdown)), _title(breakdown))


def _parts(breakdown: OperationBreakdown) -> Iterator[Part]:
    yield section(SECTIONS["groups"], _groups(breakdown.groups))
    if breakdown.seconds is not None or breakdown.measured_seconds is not None:
        yield section(SECTIONS["group_times"], _times(breakdown.groups))
    if breakdown.published is not None:
        source = Text(f"Published: {breakdown.published.source}.", style="dim")
        yield section(SECTIONS["published_shares"], _published(breakdown, breakdown.published), source)
    if breakdown.collectives:
        yield section(SECTIONS["operation_collectives"], _collectives(breakdown.collectives))
    if breakdown.experts is not None:
        yield from listed(SECTIONS["experts"], subject_sentences.experts(breakdown.experts))
    yield section(SECTIONS["operations"], _heaviest(breakdown))
    if breakdown.modules:
        yield section(SECTIONS["heavy_modules"], _modules(breakdown))
    yield from listed(SECTIONS["rules"], [claim_sentence(claim) for claim in breakdown.claims])
    if breakdown.shapes:
        yield section(SECTIONS["shapes"], *_shapes(breakdown))
    if breakdown.paddings:
        yield section(SECTIONS["paddings"], *_paddings(breakdown))
    yield from listed(SECTIONS["left_out"], _left_out(breakdown))
    if breakdown.joined is not None:
        yield from listed(SECTIONS["match"], _joined(breakdown.joined))
    yield from listed(SECTIONS["notes"], breakdown.notes)


def _title(breakdown: OperationBreakdown) -> str:
    return (
        f"{breakdown.name} on {breakdown.gpu_name or breakdown.gpu}: {breakdown.operations:,} operations in one step, "
        f"{whole_flop(breakdown.flop)}, {human_bytes(breakdown.bytes)} moved"
    )


def _groups(groups: Sequence[GroupShare]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    phase = ""
    for row in groups:
        if row.phase != phase:
            phase = row.phase
            rows.append(styled("bold", PHASES.get(phase, phase)))
        held = "" if row.peak_bytes is None else human_bytes(row.peak_bytes)
        moved = (human_bytes(row.bytes), _intensity(row.intensity))
        shares = (_share(row.flop_share), _share(row.bytes_share))
        rows.append((_short(row), f"{row.operations:,}", flop_of(row.flop), *moved, *shares, held))
    heads = ("\ncalls", "\nFLOP", "\nbytes", "FLOP/\nbyte", "of\nFLOP", "of\nbytes", "held at\nthe peak")
    return figures(rows, "", numbers=heads)


def _intensity(intensity: float | None) -> str:
    if intensity is None:
        return "-"
    return f"{intensity:.3g}" if intensity < 1000 else f"{intensity:.0f}"


def _times(groups: Sequence[GroupShare]) -> Table:
    measured = any(row.measured_seconds is not None for row in groups)
    more = ("\nmeasured", "share of\nphase") if measured else ()
    rows: list[tuple[Cell, ...]] = []
    phase = ""
    for row in groups:
        if row.phase != phase:
            phase = row.phase
            whole = [_duration(_together(groups, phase, "seconds")), ""]
            whole += [_duration(_together(groups, phase, "measured_seconds")), ""] if measured else []
            rows.append(styled("bold", PHASES.get(phase, phase), *whole))
        profiled = [_duration(row.measured_seconds), _share(row.measured_share)] if measured else []
        predicted = [_duration(row.seconds), _share(row.seconds_share)]
        rows.append((_short(row), *predicted, *profiled, LIMITS.get(row.bound_by or "", row.bound_by or "")))
    numbers = map(Column, ("\npredicted", "share of\nphase", *more))
    return Table((words(), *numbers, words("\nbound by")), tuple(rows))


def _published(breakdown: OperationBreakdown, published: PublishedShares) -> Table:
    return table(
        [row for row in breakdown.groups if row.phase == "step"],
        words(cell=lambda row: GROUPS[row.group]),
        Column("FLOP,\npublished", lambda row: f"{published.flop_percent[row.group]:.2f} %"),
        Column("\npredicted", lambda row: f"{100 * row.flop_share:.2f} %"),
        Column("time,\npublished", lambda row: f"{published.time_percent[row.group]:.1f} %"),
        Column("\npredicted", lambda row: _share(row.seconds_share), is_shown=breakdown.seconds is not None),
        Column("\nmeasured", lambda row: _share(row.measured_share), is_shown=breakdown.measured_seconds is not None),
    )


def _collectives(collectives: Sequence[CollectiveShare]) -> Table:
    def bandwidth(row: CollectiveShare) -> str:
        return "" if row.bus_bytes_per_second is None else f"{row.bus_bytes_per_second / 1e9:.1f} GB/s"

    return table(
        collectives,
        words(cell=lambda row: "copy between GPUs" if row.kind == "copy" else row.kind.replace("_", "-")),
        Column("\nGPUs", lambda row: str(row.ranks)),
        Column("\ncalls", lambda row: f"{row.calls:,}"),
        Column("\nmessages", lambda row: human_bytes(row.bytes)),
        Column("\npredicted", lambda row: _duration(row.seconds)),
        Column("bus\nbandwidth", bandwidth),
    )


def _together(groups: Sequence[GroupShare], phase: str, name: str) -> float | None:
    """Return the time of a phase's groups together; ``None`` where one is not known."""
    known = [getattr(row, name) for row in groups if row.phase == phase]
    return None if None in known else sum(known)


def _durations(breakdown: OperationBreakdown) -> tuple[Column, Column]:
    """Return the columns of predicted and measured times, as far as they are known."""
    return (
        Column("\npredicted", lambda row: _duration(row.seconds), is_shown=breakdown.seconds is not None),
        Column(
            "\nmeasured",
            lambda row: _duration(row.measured_seconds),
            is_shown=breakdown.measured_seconds is not None,
        ),
    )


def _heaviest(breakdown: OperationBreakdown) -> Table:
    def name(row: HeavyOperation) -> Text:
        where = f"\n {row.module or '-'}, {PHASES.get(row.phase, row.phase)}"
        return Text(row.operation.removeprefix("aten::")).append(where, style="dim")

    return table(
        breakdown.heaviest,
        words("operation", name),
        Column("\ncalls", lambda row: f"{row.calls:,}"),
        Column("of\nFLOP", lambda row: "?" if row.flop is None else _share(row.flop_share)),
        Column("of\nbytes", lambda row: _share(row.bytes_share)),
        *_durations(breakdown),
    )


def _modules(breakdown: OperationBreakdown) -> Table:
    return table(
        breakdown.modules,
        words("module", lambda row: row.module or "-"),
        Column("\ncalls", lambda row: f"{row.operations:,}"),
        Column("of\nFLOP", lambda row: _share(row.flop_share)),
        Column("of\nbytes", lambda row: _share(row.bytes_share)),
        *_durations(breakdown),
    )


def _paddings(breakdown: OperationBreakdown) -> Iterator[Part]:
    """Yield a sentence for each size, and a command that compares one before and after."""
    yield Bullets([_padding(each, breakdown.seconds) for each in breakdown.paddings])
    known = next((each for each in breakdown.paddings if each.setting), None)
    if known is not None:
        both = f"trainatomy compare WORKLOAD.yaml --sweep {known.setting}={known.value},{known.padded_value}"
        yield Text(f"To compare: {both}", style="dim")


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


def _shapes(breakdown: OperationBreakdown) -> Iterator[Part]:
    """Yield the products whose padding gains time, and how many others there are."""
    padded = {each.size: each.padded for each in breakdown.paddings}
    shapes = breakdown.shapes
    costly = [shape for shape in shapes if shape.gain_seconds is None or shape.gain_seconds >= _LEAST_GAIN]
    idle, left = len(shapes) - len(costly), len(costly) - _MOST_SHAPES
    if costly:
        yield table(
            costly[:_MOST_SHAPES],
            words("product", _product, wraps=False),
            words(
                "where and why",
                lambda shape: f"{shape.module or '-'}, {shape.phase}, {times(shape.calls)}: {_remark(shape, padded)}",
            ),
            Column("used", lambda shape: f"{100 * shape.used:.0f} %"),
            Column("of FLOP", lambda shape: _share(shape.flop_share)),
            Column(
                "gain",
                lambda shape: _duration(shape.gain_seconds),
                is_shown=any(shape.gain_seconds is not None for shape in costly),
            ),
        )
    more = [f"{left} more"] if left > 0 else []
    more += [f"{idle} that padding would speed up by less than a microsecond"] if idle else []
    if more:
        yield Text(f"{'and ' if costly else ''}{' and '.join(more)} (--json lists them)", style="dim")


def _product(shape: WastefulShape) -> str:
    batch, m, n, k = shape.shape
    return f"{shape.operation.removeprefix('aten::')} {f'{batch}×' if batch > 1 else ''}[{m},{k}]×[{k},{n}]"


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


def _short(row: GroupShare) -> str:
    return f" {SHORT_GROUPS[row.group]}"


def _share(share: float | None) -> str:
    if share is None:
        return ""
    return percent(share, 1.0, 2 if 0 < share < 0.01 or 0.99 < share < 1 else 1)


def _duration(duration: float | None) -> str:
    if duration is None:
        return ""
    return f"{round(duration * 1e6)} µs" if abs(duration) < 1e-3 else f"{duration * 1e3:.2f} ms"
