"""A measurement, or a whole record, as a page: measured figures with the prediction of the same workload.

The ranks of a training that was measured on several GPUs, each with its prediction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from trainatomy.reporters import run_sentences, sentences
from trainatomy.reporters.document import (
    Cell,
    Column,
    Document,
    Part,
    Section,
    Table,
    figures,
    grid,
    listed,
    section,
    words,
)
from trainatomy.reporters.labels import COLUMNS, FIGURES, NVML_FIGURES, SECTIONS, STATUS_STYLES
from trainatomy.reporters.settings import rank_name
from trainatomy.reporters.text.host import host_section
from trainatomy.reporters.text.memory import measured_breakdown, modules_table, sizes_table, timeline
from trainatomy.reporters.text.prediction import task_sections
from trainatomy.results.measurement import Measurement, RankMeasurement
from trainatomy.results.prediction import Plan, Prediction
from trainatomy.results.record import Record
from trainatomy.units import difference, exact_bytes, human_bytes, many, rate, seconds, signed_percent

_COLUMNS = (
    words(),
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


def _ranks(measurement: Measurement, prediction: Prediction | None) -> Iterator[Part]:
    """Yield a table with each rank as measured, as predicted, and the gap, and what it leaves open in words."""
    rows: list[tuple[Cell, ...]] = []
    own = prediction.ranks if prediction else {}
    plan = Plan.of(measurement.workload)
    for number, rank in measurement.ranks.items():
        measured = _measured(rank)
        rows.append((f"{rank_name(plan, number)}, {COLUMNS['measured']}", *_cells(measured)))
        if prediction is not None:
            predicted = _predicted(prediction, number if number in own else prediction.rank)
            rows.append((f"  {COLUMNS['predicted']}", *_cells(predicted)))
            if rank.status == "completed":
                rows.append((f"  {COLUMNS['gap']}", *map(_gap, measured, predicted)))
    yield Table(_COLUMNS, tuple(rows), name_width=26)
    others = tuple(number for number in measurement.ranks if number and number not in own)
    if any(rank.nccl_bytes is not None for rank in measurement.ranks.values()):
        yield Text(sentences.FIRST_COLLECTIVE, style="dim")
    if prediction is not None and others:
        yield Text(sentences.same_prediction(others), style="dim")


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


def record_page(record: Record) -> Document:
    """Return the page of a record: how and when it was made, then its measurement."""
    rows: list[tuple[Cell, ...]] = [("record", record.id)]
    rows.append(("created", record.created.replace("T", " ").replace("Z", " UTC")))
    if record.command:
        rows.append(("command", Text(record.command)))
    if record.group:
        rows.append(("group", Text(f"{record.group}, run {record.repeat + 1}")))
    made = grid(rows, words(style="dim", wraps=False), "left")
    return Document((made, Text(), measurement_page(record.measurement, record.prediction)))


def measurement_page(measurement: Measurement, prediction: Prediction | None) -> Document:
    """Return everything in a measurement as a page, with the prediction beside it."""
    return Document(tuple(_parts(measurement, prediction)))


def _parts(measurement: Measurement, prediction: Prediction | None) -> Iterator[Part]:
    where = f"{measurement.gpu}, driver {measurement.driver}, {sentences.versions(measurement)}, {measurement.date}"
    yield _headline(measurement)
    yield Text(where, style="dim")
    if failure := list(_failure(measurement)):
        yield section(SECTIONS["failure"], *failure)
    if measurement.memory is not None:
        yield _breakdown(measurement, prediction)
    yield section(SECTIONS["totals"], _totals(measurement, prediction))
    if measurement.skipped_steps:
        yield Text(sentences.skipped_in_run(measurement.skipped_steps), style="dim")
    if measurement.other_ranks:
        yield section(SECTIONS["measured_ranks"], *_ranks(measurement, prediction))
    yield from task_sections(measurement)
    if measurement.stages:
        yield section(SECTIONS["stages"], _stages(measurement))
    if prediction is not None and prediction.timeline:
        yield section(f"{SECTIONS['timeline']} (predicted)", *timeline(prediction.timeline))
    if measurement.timed_step_seconds:
        yield from listed(SECTIONS["time"], _time(measurement, prediction))
    for name, lines in run_sentences.of_run(measurement, prediction.time if prediction else None).items():
        yield from listed(SECTIONS[name], lines)
    if measurement.host_bill is not None:
        predicted = None if prediction is None else prediction.host_bill
        yield (
            host_section(measurement.host_bill) if predicted is None else host_section(predicted, measurement.host_bill)
        )
    if nvml := _nvml(measurement):
        yield section(SECTIONS["nvml"], sizes_table(nvml), Text(sentences.NVML, style="dim"))
    if measurement.modules and measurement.memory is not None:
        activations = measurement.memory.components.activations
        yield section(SECTIONS["measured_modules"], modules_table(measurement.modules, activations))
    if measurement.neighbours:
        yield section(SECTIONS["other_processes"], _other_processes(measurement))
    yield from listed(SECTIONS["notes"], measurement.notes)
    if measurement.tape_file:
        yield Text(f"\nThe allocation trace is in {measurement.tape_file}.")


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


def _failure(measurement: Measurement) -> Iterator[Text]:
    """Yield the allocation that failed, and PyTorch's message."""
    if measurement.out_of_memory is not None:
        yield Text(sentences.out_of_memory(measurement.out_of_memory, predicted=False))
    if measurement.message:
        yield Text(measurement.message)


def _breakdown(measurement: Measurement, prediction: Prediction | None) -> Section:
    """Return the measured breakdown; with the predicted one if both are of the peak."""
    memory = measurement.memory
    assert memory is not None
    failed = measurement.status == "out of memory"
    title = f"{'At the failure' if failed else 'At the peak'}, {sentences.instant(memory.peak)} (recorded allocations)"
    predicted = prediction.memory if prediction and not failed else None
    body: list[Part] = [measured_breakdown(memory, predicted)]
    if predicted and (predicted.peak.step, predicted.peak.phase) != (memory.peak.step, memory.peak.phase):
        body.append(Text(f"The predicted peak is {sentences.instant(predicted.peak)}.", style="dim"))
    return section(title, *body)


def _totals(measurement: Measurement, prediction: Prediction | None) -> Table:
    totals = prediction.memory.totals(measurement.skipped_steps) if prediction else {}
    rows = []
    for name in _TOTALS:
        measured: int | None = getattr(measurement, name)
        predicted: int | None = totals.get(name, getattr(prediction.memory, name)) if prediction else None
        gap = "-"
        if measured and predicted is not None and measurement.status == "completed":
            gap = signed_percent(predicted - measured, measured, 3)
        rows.append((FIGURES[name], *_sizes(measured), _sizes(predicted)[1], gap))
    return figures(rows, "", numbers=[COLUMNS[name] for name in ("measured", "bytes", "predicted", "gap")])


def _stages(measurement: Measurement) -> Table:
    """Return the driver's and PyTorch's figures at each stage, with what the stage added."""
    rows = []
    before: int | None = None
    for stage in measurement.stages:
        held = stage.device_bytes
        added = "" if held is None or before is None else difference(held - before)
        sizes = (human_bytes(stage.reserved_bytes), human_bytes(stage.allocated_bytes))
        rows.append((stage.name, "-" if held is None else human_bytes(held), added, *sizes))
        before = held
    return figures(rows, "", numbers=[COLUMNS[name] for name in ("device", "added", "reserved", "allocated")])


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
    rows = [
        (
            str(each.pid),
            each.name or "(name not visible)",
            "not reported" if each.bytes is None else human_bytes(each.bytes),
        )
        for each in measurement.neighbours
    ]
    return grid(rows, "right", "left", "right")


def _sizes(count: int | None) -> tuple[str, str]:
    return ("-", "-") if count is None else (human_bytes(count), exact_bytes(count))


def _nvml(measurement: Measurement) -> dict[str, int]:
    """Return those of NVML's figures that are known."""
    process, device = measurement.process_bytes, measurement.device_bytes
    missing = None if process is None or device is None else device - process
    counts = {
        NVML_FIGURES["nvml_used_bytes"]: measurement.nvml_used_bytes,
        f"  {NVML_FIGURES['idle_bytes']}": measurement.idle_bytes,
        NVML_FIGURES["context_bytes"]: measurement.context_bytes,
        NVML_FIGURES["process_bytes"]: process,
        NVML_FIGURES["uncounted_bytes"]: missing if missing and missing > 0 else None,
        NVML_FIGURES["device_bytes"]: device,
    }
    return {title: count for title, count in counts.items() if count is not None}
