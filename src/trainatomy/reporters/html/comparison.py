"""The report of several training runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainatomy.reporters.html.charts import bars, component_bars
from trainatomy.reporters.html.from_text import sections_of
from trainatomy.reporters.html.labels import REPORT
from trainatomy.reporters.html.prediction import bill_table
from trainatomy.reporters.html.values import Block, KeyFigure, ListBlock, Page, Section, TextBlock
from trainatomy.reporters.labels import AXES, COLUMNS, COMPONENTS, MARKS, SECTIONS, THROUGHPUT
from trainatomy.reporters.subject_sentences import shared_subject
from trainatomy.reporters.text.comparison import comparison_page
from trainatomy.reporters.text.rendering import swept
from trainatomy.results.comparison import Comparison
from trainatomy.results.memory import Components
from trainatomy.results.plan import total_rate
from trainatomy.results.prediction import Prediction
from trainatomy.units import human_bytes, many, rate

_MEASURED_COLOUR = COMPONENTS["activations"].colour


def comparison_report(comparison: Comparison) -> Page:
    """Return the report of a comparison."""
    others = sections_of(comparison_page(comparison))
    subject = [line for line in (shared_subject(comparison.predictions), *_assumed(comparison)) if line]
    tables = [block for section in others[:1] for block in section.blocks if not _says(block, subject)]
    memory = _memory(comparison)
    sections = [Section(SECTIONS["peak"], (*memory, *tables)), *_speeds(comparison), *others[1:]]
    sections += [
        Section(row.name or row.prediction.name, (bill_table(row.prediction.memory),), True)
        for row in comparison.rows
        if row.prediction is not None
    ]
    count = many(len(comparison.rows), "training run")
    fitting = sum(each.fits for each in comparison.predictions)
    return Page(
        title=comparison.group or f"{count} side by side",
        kind=REPORT["comparison"],
        verdict="",
        tone="",
        answer=[REPORT["fitting"].format(fitting, len(comparison.predictions)), *_remarks(comparison)],
        subject=subject,
        figures=_figures(comparison),
        sections=[section for section in sections if section.blocks],
    )


def _assumed(comparison: Comparison) -> list[str]:
    """Return what was decided for the user in any of the rows."""
    return list(dict.fromkeys(text for each in comparison.predictions for text in each.leading_notes))


def _says(block: Block, subject: Sequence[str]) -> bool:
    """Return whether a block says what the head of the report says already."""
    if isinstance(block, TextBlock):
        return block.text in subject
    return isinstance(block, ListBlock) and set(block.items) <= set(subject)


def _remarks(comparison: Comparison) -> list[str]:
    return [text for text in (comparison.source, comparison.remark) if text]


def _memory(comparison: Comparison) -> tuple[Block, ...]:
    """Return the components of each row, predicted and measured below each other."""
    rows: dict[str, Components] = {}
    given = [row.name or (row.prediction.name if row.prediction else "") for row in comparison.rows]
    for number, (name, row) in enumerate(zip(swept(given)[1], comparison.rows, strict=True), 1):
        name = name or f"{number}"
        if name in rows:
            name = f"{name} ({number})"
        if row.prediction is not None:
            title = f"{name}, {COLUMNS['predicted']}" if row.typical else name
            rows[title] = row.prediction.memory.components
        if row.typical is not None and row.typical.memory is not None:
            rows[f"{name}, {COLUMNS['measured']}"] = row.typical.memory.components
    gpus = {each.gpu.name: each.gpu.memory_bytes for each in comparison.predictions}
    limits = list(gpus.items()) if len(gpus) == 1 else []
    if not rows:
        return ()
    return (component_bars("memory", rows, REPORT["comparison_summary"], limits, _published(comparison, list(rows))),)


def _published(comparison: Comparison, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the published sizes as marks beside the bars; none of a measured comparison, which has more of them."""
    values = [row.published and row.published.memory_bytes for row in comparison.rows if row.prediction is not None]
    if comparison.measured or not any(values) or len(values) != len(names):
        return []
    return [{"name": MARKS["published"], "values": values}]


def _speeds(comparison: Comparison) -> list[Section]:
    """Return the throughput of each row, predicted and measured side by side."""
    predicted = [row.prediction and total_rate(row.prediction) for row in comparison.rows]
    measured = [row.total_rate.median if row.total_rate else None for row in comparison.rows]
    if not any(predicted) and not any(measured):
        return []
    _, names = swept([row.name or (row.prediction.name if row.prediction else "") for row in comparison.rows])
    series = [{"name": COLUMNS["predicted"], "colour": THROUGHPUT, "values": predicted}]
    if any(measured):
        series.append({"name": COLUMNS["measured"], "colour": _MEASURED_COLOUR, "values": measured})
    axis = AXES["throughput"]
    chart = bars("speed", names, series, REPORT["speed_summary"], unit="rate", is_stacked=False, axis=axis)
    return [Section(REPORT["speeds"], (chart,))]


def _figures(comparison: Comparison) -> list[KeyFigure]:
    """Return the smallest, the largest and the fastest training."""
    predictions = comparison.predictions
    if not predictions:
        return []
    ranked = sorted(predictions, key=lambda each: each.memory.device_bytes)
    found = [_held(REPORT["least_memory"], ranked[0]), _held(REPORT["most_memory"], ranked[-1])]
    rates = [(total_rate(each) or 0.0, each) for each in predictions if each.fits]
    if rates and (fastest := max(rates, key=lambda pair: pair[0]))[0]:
        found.append(KeyFigure(REPORT["fastest"], f"{rate(fastest[0])} samples/s", fastest[1].name))
    return found


def _held(title: str, prediction: Prediction) -> KeyFigure:
    return KeyFigure(title, human_bytes(prediction.memory.device_bytes), prediction.name)
