"""A measurement, or a whole record, as a page: measured figures with the prediction of the same workload.

The ranks of a training that was measured on several GPUs, each with its prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainatomy.reporters import run_sentences, sentences, subject_sentences
from trainatomy.reporters.labels import COLUMNS, FIGURES, NVML_FIGURES, SECTIONS, STATUS_STYLES
from trainatomy.reporters.settings import rank_name
from trainatomy.reporters.text.memory import MeasuredBreakdown, Timeline, modules_table
from trainatomy.reporters.text.rendering import AdaptiveTable, Column, bullets, figures, grid, section
from trainatomy.results.measurement import Measurement
from trainatomy.results.prediction import Plan, Prediction
from trainatomy.results.record import Record
from trainatomy.units import difference, exact_bytes, human_bytes, many, rate, seconds, signed_percent

if TYPE_CHECKING:
    from trainatomy.results.measurement import RankMeasurement


_COLUMNS = (
    Column("allocated"),
    Column("reserved"),
    Column("device"),
    Column("NCCL", rank=1),
    Column("per step"),
    Column("CPU waiting", rank=2),
)
_NCCL = "nccl"

Figures = tuple[float | None, ...]
"""Allocated, reserved, device and NCCL bytes, then seconds per step: without and with a synchronisation after each."""


def ranks_section(measurement: Measurement, prediction: Prediction | None) -> Group:
    """Return a table with each rank as measured, as predicted, and the gap, and what it leaves open in words."""
    table = AdaptiveTable("", _COLUMNS)
    own = prediction.ranks if prediction else {}
    plan = Plan.of(measurement.workload)
    for number, rank in measurement.ranks.items():
        measured = _measured(rank)
        table.add_row(f"{rank_name(plan, number)}, {COLUMNS['measured']}", *_cells(measured))
        if prediction is not None:
            predicted = _predicted(prediction, number if number in own else prediction.rank)
            table.add_row(f"  {COLUMNS['predicted']}", *_cells(predicted))
            if rank.status == "completed":
                table.add_row(f"  {COLUMNS['gap']}", *map(_gap, measured, predicted))
    others = tuple(number for number in measurement.ranks if number and number not in own)
    parts: list[RenderableType] = [table]
    if any(rank.nccl_bytes is not None for rank in measurement.ranks.values()):
        parts.append(Text(sentences.FIRST_COLLECTIVE, style="dim"))
    if prediction is not None and others:
        parts.append(Text(sentences.same_prediction(others), style="dim"))
    return Group(*parts)


def _measured(rank: RankMeasurement) -> Figures:
    sizes = (rank.peak_allocated_bytes, rank.peak_reserved_bytes, rank.device_bytes, rank.nccl_bytes)
    return (*sizes, rank.step_seconds, rank.synchronized_step_seconds)


def _predicted(prediction: Prediction, rank: int) -> Figures:
    memory, time = prediction.ranks[rank].memory, prediction.time
    nccl = memory.components.as_dict().get(_NCCL)
    sizes = (memory.peak_allocated_bytes, memory.peak_reserved_bytes, memory.device_bytes, nccl)
    return (*sizes, time.step_seconds if time else None, None)


def _cells(figures: Figures) -> Sequence[str]:
    sizes = ["-" if size is None else human_bytes(round(size)) for size in figures[:4]]
    return [*sizes, *("-" if each is None else seconds(each) for each in figures[4:])]


def _gap(measured: float | None, predicted: float | None) -> str:
    return "-" if not measured or predicted is None else signed_percent(predicted - measured, measured, 2)


_TOTALS = ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "model_bytes")


def record_page(record: Record) -> Group:
    """Return the page of a record: how and when it was made, then its measurement."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_row("record", record.id)
    table.add_row("created", record.created.replace("T", " ").replace("Z", " UTC"))
    if record.command:
        table.add_row("command", Text(record.command))
    if record.group:
        table.add_row("group", Text(f"{record.group}, run {record.repeat + 1}"))
    return Group(table, Text(), measurement_page(record.measurement, record.prediction))


def measurement_page(measurement: Measurement, prediction: Prediction | None) -> Group:
    """Return everything in a measurement as a page, with the prediction beside it."""
    where = f"{measurement.gpu}, driver {measurement.driver}, {sentences.versions(measurement)}, {measurement.date}"
    parts: list[RenderableType] = [_headline(measurement), Text(where, style="dim")]
    parts += _failure(measurement)
    if measurement.memory is not None:
        parts.append(_breakdown(measurement, prediction))
    parts.append(section(SECTIONS["totals"], _totals(measurement, prediction)))
    if measurement.skipped_steps:
        parts.append(Text(sentences.skipped_in_run(measurement.skipped_steps), style="dim"))
    if measurement.other_ranks:
        parts.append(section(SECTIONS["measured_ranks"], ranks_section(measurement, prediction)))
    if checkpoints := subject_sentences.checkpoints(measurement.checkpoint, measurement.restored):
        parts.append(section(SECTIONS["checkpoint"], bullets(checkpoints)))
    if measurement.generation is not None:
        parts.append(section(SECTIONS["generation"], bullets(subject_sentences.generation(measurement.generation))))
    if measurement.evaluation is not None:
        parts.append(section(SECTIONS["evaluation"], bullets(subject_sentences.evaluation(measurement.evaluation))))
    if measurement.stages:
        parts.append(section(SECTIONS["stages"], _stages(measurement)))
    if prediction is not None and prediction.timeline:
        parts.append(section(f"{SECTIONS['timeline']} (predicted)", Timeline(prediction.timeline)))
    if measurement.timed_step_seconds:
        parts.append(section(SECTIONS["time"], bullets(_time(measurement, prediction))))
    for name, lines in run_sentences.of_run(measurement, prediction.time if prediction else None).items():
        parts.append(section(SECTIONS[name], bullets(lines)))
    if any(value is not None for _, value in _nvml(measurement)):
        parts.append(section(SECTIONS["nvml"], _nvml_table(measurement), Text(sentences.NVML, style="dim")))
    if measurement.modules and measurement.memory is not None:
        activations = measurement.memory.components.activations
        parts.append(section(SECTIONS["measured_modules"], modules_table(measurement.modules, activations)))
    if measurement.neighbours:
        parts.append(section(SECTIONS["other_processes"], _other_processes(measurement)))
    if measurement.notes:
        parts.append(section(SECTIONS["notes"], bullets(measurement.notes)))
    if measurement.tape_file:
        parts.append(Text(f"\nThe allocation trace is in {measurement.tape_file}."))
    return Group(*parts)


def _headline(measurement: Measurement) -> Text:
    parts = [f"{measurement.name}, {many(measurement.steps, 'step')}"]
    if measurement.status == "completed" and measurement.device_bytes is not None:
        parts.append(f"{human_bytes(measurement.device_bytes)} at the peak")
    if measurement.step_seconds is not None:
        parts.append(f"{seconds(measurement.step_seconds)} per step")
    if measurement.samples_per_second is not None:
        parts.append(f"{rate(measurement.samples_per_second * _data_parallel(measurement))} samples/s")
    if retries := measurement.num_alloc_retries:
        parts.append(sentences.cache_freed(retries))
    status = Text(measurement.status, style=f"bold {STATUS_STYLES[measurement.status]}")
    return Text.assemble(status, f": {', '.join(parts)}")


def _failure(measurement: Measurement) -> list[RenderableType]:
    """Return a section on the allocation that failed, with PyTorch's message."""
    body: list[RenderableType] = []
    if measurement.out_of_memory is not None:
        body.append(Text(sentences.out_of_memory(measurement.out_of_memory, predicted=False)))
    if measurement.message:
        body.append(Text(measurement.message))
    return [section(SECTIONS["failure"], *body)] if body else []


def _breakdown(measurement: Measurement, prediction: Prediction | None) -> Group:
    """Return the measured breakdown; with the predicted one if both are of the peak."""
    memory = measurement.memory
    assert memory is not None
    failed = measurement.status == "out of memory"
    title = f"{'At the failure' if failed else 'At the peak'}, {sentences.instant(memory.peak)} (recorded allocations)"
    predicted = prediction.memory if prediction and not failed else None
    body: list[RenderableType] = [MeasuredBreakdown(memory, predicted)]
    if predicted and (predicted.peak.step, predicted.peak.phase) != (memory.peak.step, memory.peak.phase):
        body.append(Text(f"The predicted peak is {sentences.instant(predicted.peak)}.", style="dim"))
    return section(title, *body)


def _totals(measurement: Measurement, prediction: Prediction | None) -> Table:
    table = figures("", numbers=[COLUMNS[name] for name in ("measured", "bytes", "predicted", "gap")])
    totals = prediction.memory.totals(measurement.skipped_steps) if prediction else {}
    for name in _TOTALS:
        measured: int | None = getattr(measurement, name)
        predicted: int | None = totals.get(name, getattr(prediction.memory, name)) if prediction else None
        gap = "-"
        if measured and predicted is not None and measurement.status == "completed":
            gap = signed_percent(predicted - measured, measured, 3)
        table.add_row(FIGURES[name], *_sizes(measured), _sizes(predicted)[1], gap)
    return table


def _stages(measurement: Measurement) -> Table:
    """Return the driver's and PyTorch's figures at each stage, with what the stage added."""
    table = figures("", numbers=[COLUMNS[name] for name in ("device", "added", "reserved", "allocated")])
    before: int | None = None
    for stage in measurement.stages:
        held = stage.device_bytes
        added = "" if held is None or before is None else difference(held - before)
        sizes = (human_bytes(stage.reserved_bytes), human_bytes(stage.allocated_bytes))
        table.add_row(stage.name, "-" if held is None else human_bytes(held), added, *sizes)
        before = held
    return table


def _time(measurement: Measurement, prediction: Prediction | None) -> list[str]:
    timed, step = measurement.timed_step_seconds, measurement.step_seconds
    assert step is not None
    spread = "" if len(timed) == 1 else f", from {seconds(min(timed))} to {seconds(max(timed))}"
    of_lengths = prediction is not None and prediction.lengths is not None
    count = f"{'mean' if of_lengths else 'median'} of {len(timed)} steps" if len(timed) > 1 else "one step"
    lines = [f"{seconds(step)} per step ({count}{spread}), measured without recording allocations"]
    if measurement.samples_per_second is not None:
        tokens = measurement.tokens_per_second
        ranks = _data_parallel(measurement)
        more = "" if tokens is None else f", {rate(tokens * ranks)} tokens/s"
        together = " of all ranks together" if ranks > 1 else ""
        lines.append(f"{rate(measurement.samples_per_second * ranks)} samples/s{more}{together}")
    if of_lengths and prediction is not None and prediction.time is not None:
        first, later = prediction.time.first_epoch_step_seconds, prediction.time.step_seconds
        lines.append(
            f"predicted: {seconds(first)} per step of an epoch whose lengths are new "
            f"({signed_percent(first - step, step, 1)}), {seconds(later)} once they have occurred"
        )
    if (synchronized := measurement.synchronized_step_seconds) is not None:
        slower = signed_percent(synchronized - step, step, 1)
        lines.append(f"{seconds(synchronized)} per step with the CPU waiting for the GPU after each ({slower})")
    if len(measurement.ranks) > 1:
        slowest = max(measurement.ranks.values(), key=lambda rank: rank.step_seconds or 0.0)
        lines.append(f"{seconds(slowest.step_seconds or 0.0)} per step in the slowest rank, {slowest.rank}")
    if (recorded := measurement.recorded_step_seconds) is not None:
        overhead = signed_percent(recorded - step, step, 1)
        lines.append(f"{seconds(recorded)} per step while allocations were recorded ({overhead})")
    return lines


def _data_parallel(measurement: Measurement) -> int:
    """Return the number of ranks that process different samples."""
    return Plan.of(measurement.workload).data_parallel_size


def _other_processes(measurement: Measurement) -> Table:
    table = grid("right", "left", "right")
    for one in measurement.neighbours:
        held = "not reported" if one.bytes is None else human_bytes(one.bytes)
        table.add_row(str(one.pid), one.name or "(name not visible)", held)
    return table


def _sizes(count: int | None) -> tuple[str, str]:
    return ("-", "-") if count is None else (human_bytes(count), exact_bytes(count))


def _nvml(measurement: Measurement) -> tuple[tuple[str, int | None], ...]:
    process, device = measurement.process_bytes, measurement.device_bytes
    missing = None if process is None or device is None else device - process
    return (
        (NVML_FIGURES["nvml_used_bytes"], measurement.nvml_used_bytes),
        (f"  {NVML_FIGURES['idle_bytes']}", measurement.idle_bytes),
        (NVML_FIGURES["context_bytes"], measurement.context_bytes),
        (NVML_FIGURES["process_bytes"], process),
        (NVML_FIGURES["uncounted_bytes"], missing if missing and missing > 0 else None),
        (NVML_FIGURES["device_bytes"], device),
    )


def _nvml_table(measurement: Measurement) -> Table:
    table = grid("left", "right", "right")
    for title, count in _nvml(measurement):
        if count is not None:
            table.add_row(title, *_sizes(count))
    return table
