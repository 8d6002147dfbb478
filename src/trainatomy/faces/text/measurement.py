"""A measurement beside the prediction of the same workload, with the gap."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainatomy.faces.text.rendering import figures, section
from trainatomy.results.bill import Measurement, Prediction
from trainatomy.units import exact_bytes, human_bytes, seconds, signed_percent, times

_FIGURES = (
    ("peak allocated", "peak_allocated_bytes"),
    ("peak reserved", "peak_reserved_bytes"),
    ("device memory", "device_bytes"),
    ("the model, once loaded", "model_bytes"),
)


def measurement_page(measurement: Measurement, prediction: Prediction | None) -> Group:
    """What the GPU said first, then beside it what was predicted, then why NVML's figures differ from each other."""
    versions = ", ".join(f"{name} {version}" for name, version in measurement.versions.items())
    where = f"{measurement.gpu}, driver {measurement.driver}, {versions}, {measurement.date}"
    parts: list[RenderableType] = [
        _headline(measurement),
        Text(where, style="dim"),
        Text(),
        _table(measurement, prediction),
    ]
    if any(value is not None for _, value in _nvml(measurement)):
        parts.append(section("What NVML said", _nvml_table(measurement)))
    if measurement.message:
        parts.append(section("What happened", Text(measurement.message)))
    if measurement.tape_file:
        parts.append(Text(f"\nThe stream of allocations is in {measurement.tape_file}."))
    return Group(*parts)


def _headline(measurement: Measurement) -> Text:
    good = measurement.status == "completed"
    line = Text(measurement.status, style="bold green" if good else "bold red")
    line.append(f": {measurement.name}, {measurement.steps} step{'' if measurement.steps == 1 else 's'}")
    if measurement.step_seconds is not None:
        line.append(f", {seconds(measurement.step_seconds)} each")
    if measurement.num_alloc_retries:
        line.append(f"; the allocator gave its cache back {times(measurement.num_alloc_retries)}")
    return line


def _table(measurement: Measurement, prediction: Prediction | None) -> Table:
    table = figures("", numbers=("measured", "bytes", "predicted", "gap"))
    for title, name in _FIGURES:
        measured: int | None = getattr(measurement, name)
        predicted: int | None = getattr(prediction.memory, name) if prediction else None
        known = measured and predicted is not None and measurement.status == "completed"
        gap = signed_percent(predicted - measured, measured, 3) if known and measured and predicted is not None else "-"
        table.add_row(title, *_both(measured), _both(predicted)[1], gap)
    return table


def _both(count: int | None) -> tuple[str, str]:
    return ("-", "-") if count is None else (human_bytes(count), exact_bytes(count))


def _nvml(measurement: Measurement) -> tuple[tuple[str, int | None], ...]:
    return (
        ("used, by the first version of the call", measurement.nvml_used_bytes),
        ("of it before the first tensor (the driver's own)", measurement.idle_bytes),
        ("what the first tensor cost (the context)", measurement.context_bytes),
        ("NVML's figure for the process", measurement.process_bytes),
        ("as nvidia-smi shows the process", measurement.device_bytes),
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
