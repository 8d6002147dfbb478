"""What a script prints while it trains: the card's memory with what it is made of, and a watched run, whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainatomy.reporters.text.bill import TITLES, Bill
from trainatomy.reporters.text.rendering import bullets, figures, section
from trainatomy.reporters.text.verdict import instant_phrase
from trainatomy.results.measurement import Measurement
from trainatomy.results.prediction import Prediction
from trainatomy.units import exact_bytes, human_bytes, many, mebibytes, rate, seconds, signed_percent


class Held(Protocol):
    """What ``gpu.attachment.reading.Utilization`` says of a card, bytes; ``None``: not known."""

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


def utilization_text(held: Held) -> Group:
    """The line of the guides, and below it who holds how much."""
    if held.used_bytes is None:
        headline = f"GPU memory occupied: the driver does not say ({held.gpu})"
    else:
        headline = f"GPU memory occupied: {mebibytes(held.used_bytes)} MiB ({held.gpu})"
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for indent, title, count in _parts(held):
        if count is not None:
            table.add_row(f"{'  ' * indent}{title}", human_bytes(count), exact_bytes(count))
    return Group(Text(headline, style="bold"), table)


def _parts(held: Held) -> tuple[tuple[int, str, int | None], ...]:
    hidden = " (from a container, those outside of it are not listed)" if held.can_hide else ""
    return (
        (1, "the driver's own", held.driver_bytes),
        (1, "this process", held.process_bytes),
        (2, "context and kernels", held.context_bytes),
        (2, "reserved by PyTorch", held.reserved_bytes),
        (3, "allocated: tensors", held.allocated_bytes),
        (3, "cache, fragmentation", held.reserved_bytes - held.allocated_bytes),
        (1, f"other processes ({held.others})", held.other_bytes if held.others else None),
        (1, f"for no listed process{hidden}", held.unlisted_bytes or None),
    )


def speed_text(metrics: Mapping[str, Any]) -> Text:
    """Time and samples per second of a ``TrainOutput``'s metrics, as the guides print them; what is missing is not
    shown."""
    lines = []
    for title, name in (("Time", "train_runtime"), ("Samples/second", "train_samples_per_second")):
        if name in metrics:
            lines.append(f"{title}: {metrics[name]:.2f}")
    return Text("\n".join(lines))


def summary_page(measurement: Measurement, prediction: Prediction | None) -> Group:
    """A watched training: what came of it, how fast it was, what held the memory at the peak, what was there before."""
    memory = measurement.memory
    parts: list[RenderableType] = [_headline(measurement), Text(_speed(measurement))]
    if measurement.out_of_memory is not None:
        point = measurement.out_of_memory
        parts.append(
            Text(
                f"{human_bytes(point.requested_bytes)} were wanted {instant_phrase(point.instant)}, with "
                f"{human_bytes(point.allocated_bytes)} allocated and {human_bytes(point.reserved_bytes)} reserved."
            )
        )
    if memory is not None:
        when = "at the failure" if measurement.out_of_memory is not None else "at its peak"
        parts.append(section(f"Device memory {when}, as measured", Bill(memory)))
        parts.append(section(f"The peak is {instant_phrase(memory.peak)}"))
    parts.append(section("Stages", _stages(measurement)))
    if prediction is not None:
        parts.append(section("Beside the prediction", _beside(measurement, prediction)))
    if measurement.notes:
        parts.append(section("Notes", bullets(measurement.notes)))
    return Group(*parts)


def _headline(measurement: Measurement) -> Text:
    good = measurement.status == "completed"
    line = Text(measurement.status, style="bold green" if good else "bold red")
    line.append(f": {measurement.name} on {measurement.gpu}, {many(measurement.steps, 'optimizer step')}")
    return line


def _speed(measurement: Measurement) -> str:
    if measurement.step_seconds is None:
        return "too few steps to time them"
    parts = [f"{seconds(measurement.step_seconds)} a step"]
    for each, what in ((measurement.samples_per_second, "samples"), (measurement.tokens_per_second, "tokens")):
        if each is not None:
            parts.append(f"{rate(each)} {what} a second")
    return ", ".join(parts)


def _stages(measurement: Measurement) -> Table:
    table = figures("", numbers=("this process", "reserved", "allocated"))
    for stage in measurement.stages:
        held = "-" if stage.device_bytes is None else human_bytes(stage.device_bytes)
        table.add_row(stage.name, held, human_bytes(stage.reserved_bytes), human_bytes(stage.allocated_bytes))
    return table


def _beside(measurement: Measurement, prediction: Prediction) -> Table:
    table = figures("", numbers=("measured", "predicted", "gap"))
    measured = {} if measurement.memory is None else measurement.memory.components.as_dict()
    predicted = prediction.memory.components.as_dict()
    rows: list[tuple[str, int | None, int]] = [
        (TITLES[name], count, predicted[name]) for name, count in measured.items()
    ]
    rows += [
        ("peak allocated", measurement.peak_allocated_bytes, prediction.memory.peak_allocated_bytes),
        ("peak reserved", measurement.peak_reserved_bytes, prediction.memory.peak_reserved_bytes),
        ("device memory", measurement.device_bytes, prediction.memory.device_bytes),
    ]
    for title, found, expected in rows:
        if found is not None:
            gap = signed_percent(expected - found, found) if found else "-"
            table.add_row(title, human_bytes(found), human_bytes(expected), gap)
    return table
