"""A prediction as a page: the verdict first, then the bill, then what it rests on."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from trainatomy.reporters.text.bill import Bill, counters
from trainatomy.reporters.text.evidence import facts_table, modules_table, parameters_body, parameters_title
from trainatomy.reporters.text.rendering import bullets, section
from trainatomy.reporters.text.time import time_line, time_table
from trainatomy.reporters.text.timeline import Timeline
from trainatomy.reporters.text.verdict import instant_phrase, out_of_memory_line, verdict_line
from trainatomy.results.prediction import Prediction
from trainatomy.units import seconds


def prediction_page(prediction: Prediction) -> Group:
    """Everything that a prediction says, for a reader."""
    memory = prediction.memory
    parts: list[RenderableType] = [verdict_line(prediction)]
    if prediction.out_of_memory is not None:
        parts.append(out_of_memory_line(prediction.out_of_memory))
    if prediction.time is not None:
        parts.append(time_line(prediction.time, fits=prediction.fits))
    parts.append(section(f"{prediction.name}: device memory at its peak, in bytes that add up", Bill(memory)))
    parts.append(section(f"The peak is {instant_phrase(memory.peak)}"))
    parts.append(section("What PyTorch would report", counters(memory)))
    if prediction.modules:
        table = modules_table(prediction.modules, memory.components.activations)
        parts.append(section("Activations at the peak, by module", table))
    figures = prediction.bytes_per_parameter
    parts.append(section(parameters_title(figures), parameters_body(prediction)))
    if prediction.timeline:
        parts.append(section("Allocated over the steps, at the largest of each phase", Timeline(prediction.timeline)))
    if prediction.time is not None:
        parts.append(section("A step's time", time_table(prediction.time)))
    if prediction.facts:
        parts.append(section("What this rests on", facts_table(prediction.facts)))
    if prediction.notes:
        parts.append(section("Notes", bullets(prediction.notes)))
    parts += [Text(), Text(_colophon(prediction), style="dim")]
    return Group(*parts)


def _colophon(prediction: Prediction) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in prediction.versions.items())
    return f"Predicted in {seconds(prediction.seconds_taken)} without a GPU ({versions})."
