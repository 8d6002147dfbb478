"""Records as OpenMetrics text, for Prometheus (its textfile collector, or a scrape of a file that is served).

Source: the OpenMetrics specification 1.0: a family has its TYPE, UNIT and HELP, names end with their unit, and the text
ends with ``# EOF``.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from trainatomy.results.record import History, Summary

Value = Callable[[Summary], float | int | None]

FAMILIES: tuple[tuple[str, str, str, Value], ...] = (
    (
        "trainatomy_device_memory_bytes",
        "bytes",
        "Device memory at the peak of the measured run, as in nvidia-smi.",
        lambda one: one.device_bytes,
    ),
    (
        "trainatomy_predicted_device_memory_bytes",
        "bytes",
        "Device memory as predicted for the same run.",
        lambda one: one.predicted_device_bytes,
    ),
    (
        "trainatomy_prediction_gap_ratio",
        "ratio",
        "Predicted over measured device memory, minus 1.",
        lambda one: one.gap,
    ),
    ("trainatomy_step_seconds", "seconds", "Measured time of an optimizer step.", lambda one: one.step_seconds),
    (
        "trainatomy_samples_per_second",
        "",
        "Measured samples per second.",
        lambda one: one.samples_per_second,
    ),
    (
        "trainatomy_out_of_memory",
        "",
        "1 if the run ran out of memory, else 0.",
        lambda one: int(one.status == "out of memory"),
    ),
)
"""Name, unit, description and value of each metric."""


def openmetrics(history: History) -> str:
    """Return the records of a history as gauges, each with the time of its record."""
    lines: list[str] = []
    for name, unit, help, value in FAMILIES:
        lines += [f"# TYPE {name} gauge", *([f"# UNIT {name} {unit}"] if unit else []), f"# HELP {name} {help}"]
        for one in history.records:
            found = value(one)
            if found is not None:
                lines.append(f"{name}{{{_labels(one)}}} {found!r} {_timestamp(one)}")
    return "\n".join([*lines, "# EOF"]) + "\n"


def _labels(one: Summary) -> str:
    labels = {"record": one.id, "name": one.name, "gpu": one.gpu, "status": one.status, "group": one.group}
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _timestamp(one: Summary) -> str:
    return f"{datetime.fromisoformat(one.created).timestamp():.0f}"
