"""The report of a measured training, beside its prediction."""

from __future__ import annotations

from trainatomy.reporters import sentences
from trainatomy.reporters.html.charts import bars, component_bars, module_tree
from trainatomy.reporters.html.from_text import sections_of
from trainatomy.reporters.html.labels import REPORT
from trainatomy.reporters.html.prediction import merged
from trainatomy.reporters.html.values import Block, KeyFigure, Page, Section, TextBlock
from trainatomy.reporters.labels import COLUMNS, SECTIONS, THROUGHPUT
from trainatomy.reporters.settings import rank_name
from trainatomy.reporters.text.measurement import measurement_page
from trainatomy.results.measurement import Measurement
from trainatomy.results.plan import Plan
from trainatomy.results.prediction import Prediction
from trainatomy.units import human_bytes, rate, seconds, signed_percent


def measurement_report(measurement: Measurement, prediction: Prediction | None) -> Page:
    """Return the report of a measurement, with the prediction of the same workload beside it."""
    first, *others = sections_of(measurement_page(measurement, prediction))
    sections = [Section(REPORT["measured"], _memory(measurement, prediction))]
    if measurement.other_ranks:
        sections.append(Section(SECTIONS["measured_ranks"], _ranks(measurement)))
    if measurement.timed_step_seconds:
        sections.append(Section(REPORT["steps"], (_steps(measurement),)))
    if len(measurement.modules) > 1 and measurement.memory is not None:
        held = human_bytes(measurement.memory.components.activations)
        tree = module_tree("modules", measurement.modules, f"{held} of activations by module, as measured at the peak.")
        sections.append(Section(SECTIONS["measured_modules"], (tree,)))
    lines = [block.text for block in first.blocks if isinstance(block, TextBlock)]
    return Page(
        title=measurement.name,
        kind=REPORT["measurement"],
        verdict=measurement.status,
        tone="good" if measurement.status == "completed" else "bad",
        answer=[lines[0].removeprefix(f"{measurement.status}:").strip(), *lines[1:]] if lines else [],
        figures=_figures(measurement, prediction),
        sections=merged(sections, others),
        origin=f"Measured on {measurement.gpu}, {measurement.date} ({sentences.versions(measurement)}).",
    )


def _memory(measurement: Measurement, prediction: Prediction | None) -> tuple[Block, ...]:
    rows = {}
    if measurement.memory is not None:
        rows[COLUMNS["measured"]] = measurement.memory.components
    if prediction is not None:
        rows[COLUMNS["predicted"]] = prediction.memory.components
    limits = [(prediction.gpu.name, prediction.gpu.memory_bytes)] if prediction else []
    return (component_bars("bill", rows, REPORT["measured_summary"], limits),) if rows else ()


def _ranks(measurement: Measurement) -> tuple[Block, ...]:
    plan = Plan.of(measurement.workload)
    rows = {
        rank_name(plan, number): rank.memory.components
        for number, rank in measurement.ranks.items()
        if rank.memory is not None
    }
    return (component_bars("ranks", rows, REPORT["ranks_summary"]),) if rows else ()


def _steps(measurement: Measurement) -> Block:
    timed = measurement.timed_step_seconds
    series = [{"name": REPORT["step_time"], "colour": THROUGHPUT, "values": list(timed)}]
    rows = [f"step {number}" for number in range(1, len(timed) + 1)]
    return bars("steps", rows, series, REPORT["steps_summary"], unit="seconds")


def _figures(measurement: Measurement, prediction: Prediction | None) -> list[KeyFigure]:
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
