"""Pages for a script that trains: GPU memory by owner, and a watched run after it ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainatomy.reporters import run_sentences, sentences
from trainatomy.reporters.labels import COLUMNS, FIGURES, SECTIONS, STATUS_STYLES, component
from trainatomy.reporters.text.memory import Breakdown
from trainatomy.reporters.text.rendering import bullets, figures, grid, section
from trainatomy.results.measurement import Measurement
from trainatomy.results.prediction import Prediction
from trainatomy.units import exact_bytes, human_bytes, many, mebibytes, signed_percent


class GPUUse(Protocol):
    """Memory of a GPU by owner, in bytes; ``None`` where not known (``integrations.reading.Utilization``)."""

    @property
    def gpu(self) -> str: ...
    @property
    def used_bytes(self) -> int | None: ...
    @property
    def driver_bytes(self) -> int | None: ...
    @property
    def process_bytes(self) -> int | None: ...
    @property
    def other_bytes(self) -> int | None: ...
    @property
    def others(self) -> int | None: ...
    @property
    def unlisted_bytes(self) -> int | None: ...
    @property
    def can_hide(self) -> bool: ...
    @property
    def context_bytes(self) -> int | None: ...
    @property
    def reserved_bytes(self) -> int: ...
    @property
    def allocated_bytes(self) -> int: ...


def utilization_text(use: GPUUse) -> Group:
    """Return the line that the guides print, and a table of who holds how much below it."""
    used = "not reported by the driver" if use.used_bytes is None else f"{mebibytes(use.used_bytes)} MiB"
    table = grid("left", "right", "right")
    for indent, title, count in _owners(use):
        if count is not None:
            table.add_row(f"{'  ' * indent}{title}", human_bytes(count), exact_bytes(count))
    return Group(Text(f"GPU memory occupied: {used} ({use.gpu})", style="bold"), table)


def _owners(use: GPUUse) -> tuple[tuple[int, str, int | None], ...]:
    hidden = " (a container does not see processes outside of it)" if use.can_hide else ""
    return (
        (1, "driver", use.driver_bytes),
        (1, "this process", use.process_bytes),
        (2, component("context").title, use.context_bytes),
        (2, "reserved by PyTorch", use.reserved_bytes),
        (3, "allocated to tensors", use.allocated_bytes),
        (3, component("cache").title, use.reserved_bytes - use.allocated_bytes),
        (1, f"other processes ({use.others})", use.other_bytes if use.others else None),
        (1, f"not listed for any process{hidden}", use.unlisted_bytes or None),
    )


def speed_text(metrics: Mapping[str, Any]) -> Text:
    """Return time and samples per second from a ``TrainOutput``'s metrics, as the guides print them."""
    lines = []
    for title, name in (("Time", "train_runtime"), ("Samples/second", "train_samples_per_second")):
        if name in metrics:
            lines.append(f"{title}: {metrics[name]:.2f}")
    return Text("\n".join(lines))


def summary_page(measurement: Measurement, prediction: Prediction | None) -> Group:
    """Return a page on a watched training: outcome, speed, memory at the peak and by stage, and the prediction."""
    memory, failure = measurement.memory, measurement.out_of_memory
    parts: list[RenderableType] = [_headline(measurement), Text(sentences.speed(measurement))]
    if failure is not None:
        parts.append(Text(sentences.out_of_memory(failure, predicted=False)))
    if memory is not None:
        title = SECTIONS["measured_peak" if failure is None else "measured_failure"]
        parts.append(section(title, Breakdown(memory)))
        parts.append(section(f"The peak is {sentences.instant(memory.peak)}."))
    parts.append(section(SECTIONS["stages"], _stages(measurement)))
    for name, lines in run_sentences.of_run(measurement, prediction.time if prediction else None).items():
        parts.append(section(SECTIONS[name], bullets(lines)))
    if prediction is not None:
        parts.append(section(SECTIONS["prediction"], _gaps(measurement, prediction)))
    if measurement.notes:
        parts.append(section(SECTIONS["notes"], bullets(measurement.notes)))
    return Group(*parts)


def _headline(measurement: Measurement) -> Text:
    status = Text(measurement.status, style=f"bold {STATUS_STYLES[measurement.status]}")
    steps = many(measurement.steps, "optimizer step")
    return Text.assemble(status, f": {measurement.name} on {measurement.gpu}, {steps}")


def _stages(measurement: Measurement) -> Table:
    table = figures("", numbers=("this process", "reserved", "allocated"))
    for stage in measurement.stages:
        held = "-" if stage.device_bytes is None else human_bytes(stage.device_bytes)
        table.add_row(stage.name, held, human_bytes(stage.reserved_bytes), human_bytes(stage.allocated_bytes))
    return table


def _gaps(measurement: Measurement, prediction: Prediction) -> Table:
    table = figures("", numbers=[COLUMNS[name] for name in ("measured", "predicted", "gap")])
    measured = {} if measurement.memory is None else measurement.memory.components.as_dict()
    rows: list[tuple[str, int | None, int]] = [
        (component(name).title, count, prediction.memory.components[name]) for name, count in measured.items()
    ]
    rows += [
        (FIGURES[name], getattr(measurement, name), getattr(prediction.memory, name))
        for name in ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes")
    ]
    for title, found, expected in rows:
        if found is not None:
            gap = signed_percent(expected - found, found) if found else "-"
            table.add_row(title, human_bytes(found), human_bytes(expected), gap)
    return table
