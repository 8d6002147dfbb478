"""The report of a step's operations: groups by phase, and the roofline."""

from __future__ import annotations

from trainatomy.catalog.gpus import GPU, find_gpu
from trainatomy.errors import TrainatomyError
from trainatomy.reporters.html.charts import bars, scatter
from trainatomy.reporters.html.from_text import sections_of
from trainatomy.reporters.html.labels import REPORT
from trainatomy.reporters.html.values import Block, KeyFigure, Page, Section, TextBlock
from trainatomy.reporters.labels import GROUPS, LIMITS, PHASES, PLANS, ROOT_MODULE
from trainatomy.reporters.text.operations import operations_page
from trainatomy.results.operation_breakdown import HeavyOperation, OperationBreakdown
from trainatomy.units import human_bytes, many, percent, seconds, whole_flop

_COLOURS = dict(zip(GROUPS, PLANS, strict=False))
_ROOFS = {"bf16": "bf16", "fp16": "fp16", "tf32": "TF32", "fp32": "fp32"}
"""Precisions whose peak rates are drawn, the highest first; of two with the same rate the first."""
_SMALLEST, _LARGEST = 7, 40
"""Diameters of points, in pixels."""


def operations_report(breakdown: OperationBreakdown) -> Page:
    """Return the report of an operation breakdown."""
    first, *others = sections_of(operations_page(breakdown))
    charts = (*group_chart("groups", breakdown), *roofline("roofline", breakdown))
    return Page(
        title=breakdown.name,
        kind=REPORT["operation_breakdown"],
        verdict="",
        tone="",
        answer=[block.text for block in first.blocks if isinstance(block, TextBlock)],
        figures=_figures(breakdown),
        sections=[Section(REPORT["operations"], charts), *others],
    )


def _figures(breakdown: OperationBreakdown) -> list[KeyFigure]:
    found = [
        KeyFigure(REPORT["operation_count"], f"{breakdown.operations:,}", breakdown.gpu),
        KeyFigure(REPORT["flop"], whole_flop(breakdown.flop), REPORT["per_step"]),
        KeyFigure(REPORT["traffic"], human_bytes(breakdown.bytes), REPORT["per_step"]),
    ]
    for title, spent in (("gpu_time", breakdown.seconds), ("gpu_time_measured", breakdown.measured_seconds)):
        if spent is not None:
            found.append(KeyFigure(REPORT[title], seconds(spent), REPORT["per_step"]))
    return found


def group_chart(name: str, breakdown: OperationBreakdown) -> tuple[Block, ...]:
    """Return GPU time by phase and group, or FLOP where no times are known."""
    timed = breakdown.seconds is not None
    rows = [row for row in breakdown.groups if row.phase != "step"]
    phases = list(dict.fromkeys(row.phase for row in rows))
    if not phases:
        return ()
    values = {(row.phase, row.group): row.seconds if timed else row.flop for row in rows}
    series = [
        {
            "name": GROUPS[group],
            "colour": _COLOURS[group],
            "values": [values.get((phase, group)) or 0 for phase in phases],
        }
        for group in GROUPS
        if any(values.get((phase, group)) for phase in phases)
    ]
    titles = [PHASES.get(phase, phase) for phase in phases]
    summary = REPORT["groups_timed" if timed else "groups_flop"]
    return (bars(name, titles, series, summary, unit="seconds" if timed else "flop"),)


def roofline(name: str, breakdown: OperationBreakdown) -> tuple[Block, ...]:
    """Return the heaviest operations below the peak rates of their GPU; nothing without times or rates."""
    try:
        gpu = find_gpu(breakdown.gpu)
    except TrainatomyError:
        return ()
    heavy = [one for one in breakdown.heaviest if one.flop and one.bytes and one.seconds]
    if not heavy or not gpu.bandwidth_bytes_per_second:
        return ()
    most = max(one.seconds or 0.0 for one in heavy)
    series = [
        {
            "name": GROUPS[group],
            "colour": _COLOURS[group],
            "points": [_point(one, most) for one in heavy if one.group == group],
        }
        for group in GROUPS
        if any(one.group == group for one in heavy)
    ]
    intensities = [one.flop / one.bytes for one in heavy if one.flop]
    axes = (
        {"title": REPORT["intensity"], "unit": "", "log": True},
        {"title": REPORT["rate"], "unit": "flop_rate", "log": True},
    )
    span = (min(intensities) / 3, max(*intensities, 1000.0) * 2)
    return (scatter(name, series, _roofs(gpu, span), axes, REPORT["roofline"].format(gpu.name)),)


def _point(one: HeavyOperation, most: float) -> dict[str, object]:
    assert one.flop and one.seconds
    size = _SMALLEST + (_LARGEST - _SMALLEST) * (one.seconds / most) ** 0.5
    text = [
        f"{one.module or ROOT_MODULE}, {PHASES.get(one.phase, one.phase)}",
        f"{many(one.calls, 'call')}, {seconds(one.seconds)}"
        + ("" if one.seconds_share is None else f" ({percent(one.seconds_share, 1)})"),
        f"{whole_flop(one.flop)}, {human_bytes(one.bytes)}",
    ]
    if one.bound_by:
        text.append(f"{REPORT['bound_by']} {LIMITS.get(one.bound_by, one.bound_by)}")
    return {"x": one.flop / one.bytes, "y": one.flop / one.seconds, "size": size, "label": one.operation, "text": text}


def _roofs(gpu: GPU, span: tuple[float, float]) -> list[dict[str, object]]:
    """Return the lines of memory bandwidth and of the peak rate of each precision."""
    low, high = span
    found: list[dict[str, object]] = []
    drawn: set[float] = set()
    for precision, title in _ROOFS.items():
        peak = gpu.rates.get(precision)
        if peak and peak not in drawn:
            drawn.add(peak)
            knee = peak / gpu.bandwidth_bytes_per_second
            points = [[low, low * gpu.bandwidth_bytes_per_second], [knee, peak], [max(high, knee * 2), peak]]
            found.append({"name": f"{title}: {whole_flop(peak)}/s", "points": points})
    return found
