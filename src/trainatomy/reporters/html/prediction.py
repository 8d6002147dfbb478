"""The report of a predicted training."""

from __future__ import annotations

from trainatomy.reporters import sentences
from trainatomy.reporters.html.charts import component_bars, module_tree
from trainatomy.reporters.html.from_text import sections_of
from trainatomy.reporters.html.labels import REPORT
from trainatomy.reporters.html.operations import group_chart, roofline
from trainatomy.reporters.html.timeline import timeline
from trainatomy.reporters.html.values import (
    Block,
    Cell,
    KeyFigure,
    Page,
    Section,
    TableBlock,
    TextBlock,
    Tone,
)
from trainatomy.reporters.labels import DEVICE_TOTAL, LIMITS, SECTIONS, component
from trainatomy.reporters.settings import rank_name
from trainatomy.reporters.subject_sentences import subject_line
from trainatomy.reporters.text.operations import operations_page
from trainatomy.reporters.text.prediction import prediction_page
from trainatomy.results.detail import Detail
from trainatomy.results.memory import Memory
from trainatomy.results.plan import Plan
from trainatomy.results.prediction import Prediction
from trainatomy.results.time import Time
from trainatomy.units import exact_bytes, human_bytes, many, percent, rate, seconds

TONES: dict[str, Tone] = {"fits": "good", "tight": "warn", "does not fit": "bad"}
_FOLDED = frozenset(
    SECTIONS[name] for name in ("facts", "notes", "counters", "operations", "heavy_modules", "shapes", "left_out")
)
"""Sections that are opened by those who want them."""


def prediction_report(prediction: Prediction, detail: Detail | None) -> Page:
    """Return the report of a prediction; without a detail it has no timeline and no operations."""
    memory = prediction.memory
    answer, *others = sections_of(prediction_page(prediction, with_sources=True))
    subject = [line for line in (subject_line(prediction), *prediction.leading_notes) if line]
    first_lines = [block.text for block in answer.blocks if isinstance(block, TextBlock) and block.text not in subject]
    sections = [Section(SECTIONS["peak"], bill(prediction))]
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
        sections += sections_of(operations_page(breakdown))[1:]
    return Page(
        title=prediction.name,
        kind=REPORT["prediction"],
        verdict=prediction.verdict,
        tone=TONES[prediction.verdict],
        answer=[first_lines[0].removeprefix(prediction.verdict).strip(), *first_lines[1:]] if first_lines else [],
        subject=subject,
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
    return [Section(each.title, each.blocks, each.title in _FOLDED) for each in unique.values()]


def bill(prediction: Prediction) -> tuple[Block, ...]:
    """Return the memory breakdown as a bar and as a table."""
    memory = prediction.memory
    limits = [(prediction.gpu.name, prediction.gpu.memory_bytes)]
    chart = component_bars("bill", {"": memory.components}, memory_summary(memory), limits)
    peak = TextBlock(f"The peak is {sentences.instant(memory.peak)}.", "muted")
    return (chart, bill_table(memory), peak)


def memory_summary(memory: Memory) -> str:
    """Return the components in words, for those who do not see the chart."""
    parts = ", ".join(
        f"{component(name).title} {human_bytes(size)}" for name, size in memory.components.as_dict().items() if size
    )
    return f"{human_bytes(memory.device_bytes)} at the peak: {parts}."


def bill_table(memory: Memory) -> TableBlock:
    """Return the components with their parts, and the total."""
    total = memory.components.total_bytes
    largest = max(memory.components.as_dict().values(), default=0) or 1
    rows: list[tuple[Cell, ...]] = []
    for name, size in memory.components.as_dict().items():
        label = component(name)
        sizes = (Cell(human_bytes(size), is_number=True), Cell(exact_bytes(size), "muted", is_number=True))
        share = Cell(percent(size, total), is_number=True)
        bar = Cell("", bar=size / largest, colour=label.colour) if size else Cell("")
        rows.append((Cell(label.title, colour=label.colour), *sizes, share, bar))
        for line in memory.lines:
            if line.component == name and line.name != label.title:
                held = (Cell(human_bytes(line.bytes), "muted", True), Cell(exact_bytes(line.bytes), "muted", True))
                rows.append((Cell(line.name, "muted", depth=1), *held, Cell(""), Cell("")))
    sizes = (Cell(human_bytes(total), "strong", True), Cell(exact_bytes(total), "strong", True))
    rows.append((Cell(DEVICE_TOTAL, "strong"), *sizes, Cell("100.0 %", "strong", True), Cell("")))
    head = (Cell(REPORT["component"]), Cell(REPORT["size"], is_number=True), Cell(REPORT["bytes"], is_number=True))
    return TableBlock(tuple(rows), (*head, Cell(REPORT["share"], is_number=True), Cell("")))


def module_chart(name: str, memory: Memory, source: Prediction) -> Block:
    """Return activations by module as a treemap."""
    held = human_bytes(memory.components.activations)
    return module_tree(
        name, source.modules, f"{held} of activations by module, as at the peak. Select a module to enter it."
    )


def _ranks(prediction: Prediction) -> tuple[Block, ...]:
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
