"""A measurement beside the prediction of the same workload: the answer first, then what it is made of."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainatomy.reporters.text.bill_beside import BillBeside
from trainatomy.reporters.text.evidence import modules_table
from trainatomy.reporters.text.rendering import bullets, figures, section
from trainatomy.reporters.text.verdict import instant_phrase
from trainatomy.results.measurement import Measurement
from trainatomy.results.prediction import Prediction
from trainatomy.units import difference, exact_bytes, human_bytes, many, rate, seconds, signed_percent, times

_FIGURES = (
    ("peak allocated", "peak_allocated_bytes"),
    ("peak reserved", "peak_reserved_bytes"),
    ("device memory", "device_bytes"),
    ("the model, once loaded", "model_bytes"),
)

NVML = (
    "NVML's first call counts what the driver keeps for itself as used, also on an idle card; nvidia-smi shows what is "
    "used without it. The context and the kernels that are loaded lie outside of PyTorch's memory: no counter of "
    "PyTorch's has them."
)


def measurement_page(measurement: Measurement, prediction: Prediction | None) -> Group:
    """What the GPU said first, then beside it what was predicted, then why NVML's figures differ from each other."""
    versions = ", ".join(f"{name} {version}" for name, version in measurement.versions.items())
    where = f"{measurement.gpu}, driver {measurement.driver}, {versions}, {measurement.date}"
    parts: list[RenderableType] = [_headline(measurement), Text(where, style="dim")]
    parts += _failure(measurement)
    if measurement.memory is not None:
        parts.append(section(_bill_title(measurement), *_bill(measurement, prediction)))
    parts.append(section("Totals", _table(measurement, prediction)))
    if measurement.stages:
        parts.append(section("Stage by stage", _stages(measurement)))
    if measurement.timed_step_seconds:
        parts.append(section("Time", bullets(_time(measurement))))
    if any(value is not None for _, value in _nvml(measurement)):
        parts.append(section("What NVML said", _nvml_table(measurement), Text(NVML, style="dim")))
    if measurement.modules and measurement.memory is not None:
        activations = measurement.memory.components.activations
        parts.append(section("Activations by module, as measured", modules_table(measurement.modules, activations)))
    if measurement.neighbours:
        parts.append(section("Others on the card", _neighbours(measurement)))
    if measurement.notes:
        parts.append(section("Notes", bullets(measurement.notes)))
    if measurement.tape_file:
        parts.append(Text(f"\nThe stream of allocations is in {measurement.tape_file}."))
    return Group(*parts)


def _headline(measurement: Measurement) -> Text:
    good = measurement.status == "completed"
    line = Text(measurement.status, style="bold green" if good else "bold red")
    line.append(f": {measurement.name}, {many(measurement.steps, 'step')}")
    if good and measurement.device_bytes is not None:
        line.append(f", {human_bytes(measurement.device_bytes)} at the peak")
    if measurement.step_seconds is not None:
        line.append(f", {seconds(measurement.step_seconds)} each")
    if measurement.samples_per_second is not None:
        line.append(f", {rate(measurement.samples_per_second)} samples/s")
    if measurement.num_alloc_retries:
        line.append(f"; the allocator gave its cache back {times(measurement.num_alloc_retries)}")
    return line


def _failure(measurement: Measurement) -> list[RenderableType]:
    """Where it failed, what was asked for and held, and the message itself."""
    if not measurement.message and measurement.out_of_memory is None:
        return []
    body: list[RenderableType] = []
    if point := measurement.out_of_memory:
        asked = f"{human_bytes(point.requested_bytes)} wanted, " if point.requested_bytes else ""
        body.append(
            Text(
                f"It stopped {instant_phrase(point.instant)}: {asked}with {human_bytes(point.allocated_bytes)} "
                f"allocated and {human_bytes(point.reserved_bytes)} reserved."
            )
        )
    if measurement.message:
        body.append(Text(measurement.message))
    return [section("What happened", *body)]


def _bill_title(measurement: Measurement) -> str:
    assert measurement.memory is not None
    at = "When it failed" if measurement.status == "out of memory" else "At the peak"
    return f"{at}, {instant_phrase(measurement.memory.peak)}, from the allocations that were recorded"


def _bill(measurement: Measurement, prediction: Prediction | None) -> list[RenderableType]:
    """With the prediction beside it where both are of the peak."""
    assert measurement.memory is not None
    beside = prediction.memory if prediction and measurement.status == "completed" else None
    drawn: list[RenderableType] = [BillBeside(measurement.memory, beside)]
    if beside is not None and (beside.peak.step, beside.peak.phase) != _instant(measurement):
        drawn.append(Text(f"The predicted peak is {instant_phrase(beside.peak)}.", style="dim"))
    return drawn


def _instant(measurement: Measurement) -> tuple[int, str]:
    assert measurement.memory is not None
    return measurement.memory.peak.step, measurement.memory.peak.phase


def _table(measurement: Measurement, prediction: Prediction | None) -> Table:
    table = figures("", numbers=("measured", "bytes", "predicted", "gap"))
    for title, name in _FIGURES:
        measured: int | None = getattr(measurement, name)
        predicted: int | None = getattr(prediction.memory, name) if prediction else None
        known = measured and predicted is not None and measurement.status == "completed"
        gap = signed_percent(predicted - measured, measured, 3) if known and measured and predicted is not None else "-"
        table.add_row(title, *_both(measured), _both(predicted)[1], gap)
    return table


def _stages(measurement: Measurement) -> Table:
    """Each stage by the driver and by PyTorch, with what it added to the card."""
    table = figures("", numbers=("as nvidia-smi shows", "more", "PyTorch reserved", "allocated"))
    before: int | None = None
    for stage in measurement.stages:
        held = stage.device_bytes
        more = "" if held is None or before is None else difference(held - before)
        sizes = (human_bytes(stage.reserved_bytes), human_bytes(stage.allocated_bytes))
        table.add_row(stage.name, "-" if held is None else human_bytes(held), more, *sizes)
        before = held
    return table


def _time(measurement: Measurement) -> list[str]:
    timed = measurement.timed_step_seconds
    assert measurement.step_seconds is not None
    spread = "" if len(timed) == 1 else f", from {seconds(min(timed))} to {seconds(max(timed))}"
    of = f"the median of {len(timed)} steps" if len(timed) > 1 else "one step"
    found = [f"{seconds(measurement.step_seconds)} a step ({of}{spread}), measured while nothing was recorded"]
    if measurement.samples_per_second is not None:
        tokens = measurement.tokens_per_second
        found.append(
            f"{rate(measurement.samples_per_second)} samples a second"
            + ("" if tokens is None else f", {rate(tokens)} tokens a second")
        )
    if measurement.recorded_step_seconds is not None:
        more = signed_percent(measurement.recorded_step_seconds - measurement.step_seconds, measurement.step_seconds, 1)
        found.append(f"with allocations recorded a step took {seconds(measurement.recorded_step_seconds)} ({more})")
    return found


def _neighbours(measurement: Measurement) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("right", "left", "right"):
        table.add_column(justify=justify)
    for one in measurement.neighbours:
        held = "not told" if one.bytes is None else human_bytes(one.bytes)
        table.add_row(str(one.pid), one.name or "(not visible from here)", held)
    return table


def _both(count: int | None) -> tuple[str, str]:
    return ("-", "-") if count is None else (human_bytes(count), exact_bytes(count))


def _nvml(measurement: Measurement) -> tuple[tuple[str, int | None], ...]:
    process, device = measurement.process_bytes, measurement.device_bytes
    more = None if process is None or device is None else device - process
    return (
        ("used, by the first version of the call", measurement.nvml_used_bytes),
        ("of it before the first tensor (the driver's own)", measurement.idle_bytes),
        ("what the first tensor cost (the context)", measurement.context_bytes),
        ("NVML's figure for the process", process),
        ("of the context, counted for the card but for no process", more if more and more > 0 else None),
        ("device memory", device),
    )


def _nvml_table(measurement: Measurement) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for title, count in _nvml(measurement):
        if count is not None:
            table.add_row(title, *_both(count))
    return table
