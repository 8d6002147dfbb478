"""The report of a predicted training.

The report of a measured training, beside its prediction.

The report of a step's operations: groups by phase, and the roofline.
"""

from __future__ import annotations

from dataclasses import replace

from rich.text import Text

from trainatomy.catalog.gpus import GPU, find_gpu
from trainatomy.errors import TrainatomyError
from trainatomy.reporters import sentences
from trainatomy.reporters.document import Part, Section
from trainatomy.reporters.html.charts import bars, component_bars, module_tree, scatter, timeline
from trainatomy.reporters.html.values import (
    REPORT,
    ChartBlock,
    KeyFigure,
    Page,
    Tone,
)
from trainatomy.reporters.labels import (
    COLUMNS,
    GROUPS,
    LIMITS,
    PHASES,
    PLANS,
    ROOT_MODULE,
    SECTIONS,
    THROUGHPUT,
    component,
)
from trainatomy.reporters.settings import rank_name
from trainatomy.reporters.text.measurement import measurement_page
from trainatomy.reporters.text.memory import breakdown as breakdown_table
from trainatomy.reporters.text.operations import operations_page
from trainatomy.reporters.text.prediction import prediction_page
from trainatomy.results.measurement import Measurement
from trainatomy.results.memory import Memory
from trainatomy.results.operations import HeavyOperation, OperationBreakdown
from trainatomy.results.prediction import GPUSummary, Plan, Prediction
from trainatomy.results.time import Time
from trainatomy.results.trace import Detail
from trainatomy.units import human_bytes, many, percent, rate, seconds, signed_percent, whole_flop

TONES: dict[str, Tone] = {"fits": "good", "tight": "warn", "does not fit": "bad"}
_FOLDED = frozenset(
    SECTIONS[name] for name in ("facts", "notes", "counters", "operations", "heavy_modules", "shapes", "left_out")
)
"""Sections that are opened by those who want them."""


def prediction_report(prediction: Prediction, detail: Detail | None) -> Page:
    """Return the report of a prediction; without a detail it has no timeline and no operations."""
    memory = prediction.memory
    document = prediction_page(prediction, with_sources=True)
    first, *others = document.sections
    verdict, *answer = answer_of(first)
    sections = [Section(SECTIONS["peak"], _bill(prediction))]
    if len(prediction.ranks) > 1:
        sections.append(Section(SECTIONS["ranks"], _ranks(prediction)))
    if detail is not None and detail.allocations:
        sections.append(Section(REPORT["timeline"], timeline("timeline", detail, _over_time(prediction))))
    if len(prediction.modules) > 1:
        sections.append(Section(SECTIONS["modules"], (module_chart("modules", memory, prediction),)))
    if detail is not None and detail.operations is not None:
        breakdown = detail.operations
        charts = [*group_chart("groups", breakdown), *roofline("roofline", breakdown)]
        sections.append(Section(REPORT["operations"], tuple(charts)))
        sections += operations_page(breakdown).sections[1:]
    return Page(
        title=prediction.name,
        kind=REPORT["prediction"],
        verdict=prediction.verdict,
        tone=TONES[prediction.verdict],
        answer=[verdict.removeprefix(prediction.verdict).strip(), *answer],
        subject=document.subject,
        figures=_figures(prediction),
        sections=merged(sections, others),
        origin=f"Predicted in {seconds(prediction.seconds_taken)} without a GPU ({sentences.versions(prediction)}).",
    )


def merged(own: list[Section], others: list[Section]) -> list[Section]:
    """Return the sections with charts, each with the tables of the text page, then the rest of that page."""
    titles = {section.title for section in own}
    rest: list[Section] = []
    for other in others:
        title = next((each for each in titles if other.title.endswith(each)), None)
        if title is None:
            rest.append(other)
            continue
        place = next(index for index, section in enumerate(own) if section.title == title)
        if title != SECTIONS["peak"]:
            own[place] = Section(title, (*own[place].blocks, *other.blocks))
    unique = {section.title: section for section in [*own, *rest]}
    return [replace(each, is_folded=each.title in _FOLDED) for each in unique.values()]


def _bill(prediction: Prediction) -> tuple[ChartBlock | Part, ...]:
    """Return the memory breakdown as a bar and as a table."""
    memory = prediction.memory
    peak = Text(f"The peak is {sentences.instant(memory.peak)}.", style="dim")
    return (bill_chart(memory, prediction.gpu), breakdown_table(memory), peak)


def bill_chart(memory: Memory, gpu: GPUSummary) -> ChartBlock:
    """Return the memory breakdown as a bar beside the GPU's memory."""
    return component_bars("bill", {"": memory.components}, _summary(memory), [(gpu.name, gpu.memory_bytes)])


def _summary(memory: Memory) -> str:
    """Return the components in words, for those who do not see the chart."""
    parts = ", ".join(
        f"{component(name).title} {human_bytes(size)}" for name, size in memory.components.as_dict().items() if size
    )
    return f"{human_bytes(memory.device_bytes)} at the peak: {parts}."


def answer_of(section: Section) -> list[str]:
    """Return the sentences that precede the first title of a page."""
    return [block.plain.strip() for block in section.blocks if isinstance(block, Text)]


def module_chart(name: str, memory: Memory, source: Prediction) -> ChartBlock:
    """Return activations by module as a treemap."""
    held = human_bytes(memory.components.activations)
    return module_tree(
        name, source.modules, f"{held} of activations by module, as at the peak. Select a module to enter it."
    )


def _ranks(prediction: Prediction) -> tuple[ChartBlock, ...]:
    plan = Plan.of(prediction.workload)
    rows = {rank_name(plan, rank): each.memory.components for rank, each in prediction.ranks.items()}
    limits = [(prediction.gpu.name, prediction.gpu.memory_bytes)]
    return (component_bars("ranks", rows, REPORT["ranks_summary"], limits),)


def _over_time(prediction: Prediction) -> str:
    peak = prediction.memory
    return (
        f"Memory allocated by component, event by event; at most {human_bytes(peak.peak_allocated_bytes)}, "
        f"{sentences.instant(peak.peak)}."
    )


def _figures(prediction: Prediction) -> list[KeyFigure]:
    memory, gpu, time, room = prediction.memory, prediction.gpu, prediction.time, prediction.room_bytes
    share = percent(memory.device_bytes, gpu.memory_bytes, 0)
    allocated = f"{human_bytes(memory.peak_allocated_bytes)} {REPORT['total']}"
    found = [
        KeyFigure(REPORT["device"], human_bytes(memory.device_bytes), f"{share} of {human_bytes(gpu.memory_bytes)}"),
        KeyFigure(REPORT["headroom" if room >= 0 else "shortfall"], human_bytes(abs(room)), gpu.name),
        KeyFigure(REPORT["allocator"], human_bytes(memory.peak_reserved_bytes), allocated),
    ]
    return found if time is None else [*found, *_speed(time)]


def _speed(time: Time) -> list[KeyFigure]:
    """Return the time of a step, the throughput of all GPUs, and what bounds the step."""
    low, high = time.interval_seconds
    shared = time.communication
    samples = time.samples_per_second if shared is None else shared.total_samples_per_second
    tokens = time.tokens_per_second if shared is None else shared.total_tokens_per_second
    remarks = ["" if tokens is None else f"{rate(tokens)} tokens/s", "" if shared is None else many(shared.gpus, "GPU")]
    used = "" if time.model_flop_utilisation is None else f"MFU {percent(time.model_flop_utilisation, 1)}"
    interval = f"90 % interval: {seconds(low)} to {seconds(high)}"
    return [
        KeyFigure(REPORT["step_time"], seconds(time.step_seconds), interval),
        KeyFigure(REPORT["throughput"], f"{rate(samples)} samples/s", ", ".join(filter(None, remarks))),
        KeyFigure(REPORT["bound"], LIMITS[time.bound_by], used),
    ]


def measurement_report(measurement: Measurement, prediction: Prediction | None) -> Page:
    """Return the report of a measurement, with the prediction of the same workload beside it."""
    first, *others = measurement_page(measurement, prediction).sections
    sections = [Section(REPORT["measured"], _memory(measurement, prediction))]
    if measurement.other_ranks:
        sections.append(Section(SECTIONS["measured_ranks"], _measured_ranks(measurement)))
    if measurement.timed_step_seconds:
        sections.append(Section(REPORT["steps"], (_steps(measurement),)))
    if len(measurement.modules) > 1 and measurement.memory is not None:
        held = human_bytes(measurement.memory.components.activations)
        tree = module_tree("modules", measurement.modules, f"{held} of activations by module, as measured at the peak.")
        sections.append(Section(SECTIONS["measured_modules"], (tree,)))
    lines = answer_of(first)
    return Page(
        title=measurement.name,
        kind=REPORT["measurement"],
        verdict=measurement.status,
        tone="good" if measurement.status == "completed" else "bad",
        answer=[lines[0].removeprefix(f"{measurement.status}:").strip(), *lines[1:]] if lines else [],
        figures=_measured_figures(measurement, prediction),
        sections=merged(sections, others),
        origin=f"Measured on {measurement.gpu}, {measurement.date} ({sentences.versions(measurement)}).",
    )


def _memory(measurement: Measurement, prediction: Prediction | None) -> tuple[ChartBlock, ...]:
    rows = {}
    if measurement.memory is not None:
        rows[COLUMNS["measured"]] = measurement.memory.components
    if prediction is not None:
        rows[COLUMNS["predicted"]] = prediction.memory.components
    limits = [(prediction.gpu.name, prediction.gpu.memory_bytes)] if prediction else []
    return (component_bars("bill", rows, REPORT["measured_summary"], limits),) if rows else ()


def _measured_ranks(measurement: Measurement) -> tuple[ChartBlock, ...]:
    plan = Plan.of(measurement.workload)
    rows = {
        rank_name(plan, number): rank.memory.components
        for number, rank in measurement.ranks.items()
        if rank.memory is not None
    }
    return (component_bars("ranks", rows, REPORT["ranks_summary"]),) if rows else ()


def _steps(measurement: Measurement) -> ChartBlock:
    timed = measurement.timed_step_seconds
    series = [{"name": REPORT["step_time"], "colour": THROUGHPUT, "values": list(timed)}]
    rows = [f"step {number}" for number in range(1, len(timed) + 1)]
    return bars("steps", rows, series, REPORT["steps_summary"], unit="seconds")


def _measured_figures(measurement: Measurement, prediction: Prediction | None) -> list[KeyFigure]:
    known = prediction.memory if prediction is not None else None
    names = {"device": "device_bytes", "reserved": "peak_reserved_bytes", "allocated": "peak_allocated_bytes"}
    pairs = [
        (title, getattr(measurement, name), None if known is None else getattr(known, name))
        for title, name in names.items()
    ]
    found = [
        KeyFigure(REPORT[title], human_bytes(size), _beside(size, predicted))
        for title, size, predicted in pairs
        if size is not None
    ]
    if measurement.step_seconds is not None:
        step = (
            prediction.time.first_epoch_step_seconds if prediction is not None and prediction.time is not None else None
        )
        measured = measurement.step_seconds
        gap = "" if step is None else f"predicted {seconds(step)} ({signed_percent(step - measured, measured, 1)})"
        found.append(KeyFigure(REPORT["step_time"], seconds(measurement.step_seconds), gap))
    if measurement.samples_per_second is not None:
        found.append(KeyFigure(REPORT["throughput"], f"{rate(measurement.samples_per_second)} samples/s"))
    return found


def _beside(measured: int, predicted: int | None) -> str:
    if predicted is None or not measured:
        return ""
    return f"predicted {human_bytes(predicted)} ({signed_percent(predicted - measured, measured)})"


_COLOURS = dict(zip(GROUPS, PLANS, strict=False))
_ROOFS = {"bf16": "bf16", "fp16": "fp16", "tf32": "TF32", "fp32": "fp32"}
"""Precisions whose peak rates are drawn, the highest first; of two with the same rate the first."""
_SMALLEST, _LARGEST = 7, 40
"""Diameters of points, in pixels."""


def operations_report(breakdown: OperationBreakdown) -> Page:
    """Return the report of an operation breakdown."""
    first, *others = operations_page(breakdown).sections
    charts = (*group_chart("groups", breakdown), *roofline("roofline", breakdown))
    return Page(
        title=breakdown.name,
        kind=REPORT["operation_breakdown"],
        verdict="",
        tone="",
        answer=answer_of(first),
        figures=_operation_figures(breakdown),
        sections=[Section(REPORT["operations"], charts), *others],
    )


def _operation_figures(breakdown: OperationBreakdown) -> list[KeyFigure]:
    found = [
        KeyFigure(REPORT["operation_count"], f"{breakdown.operations:,}", breakdown.gpu),
        KeyFigure(REPORT["flop"], whole_flop(breakdown.flop), REPORT["per_step"]),
        KeyFigure(REPORT["traffic"], human_bytes(breakdown.bytes), REPORT["per_step"]),
    ]
    for title, spent in (("gpu_time", breakdown.seconds), ("gpu_time_measured", breakdown.measured_seconds)):
        if spent is not None:
            found.append(KeyFigure(REPORT[title], seconds(spent), REPORT["per_step"]))
    return found


def group_chart(name: str, breakdown: OperationBreakdown) -> tuple[ChartBlock, ...]:
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


def roofline(name: str, breakdown: OperationBreakdown) -> tuple[ChartBlock, ...]:
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
