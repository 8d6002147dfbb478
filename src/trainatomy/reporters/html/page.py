"""Write a result as one HTML file that needs no network: figures, charts, tables.

The report of several training runs side by side.

The reports of searches: settings that fit, on one GPU or several, and what would make a training fit.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from trainatomy.reporters.document import Section, swept
from trainatomy.reporters.html.charts import bars, component_bars, scatter
from trainatomy.reporters.html.prediction import (
    answer_of,
    bill_chart,
    measurement_report,
    operations_report,
    prediction_report,
)
from trainatomy.reporters.html.values import (
    REPORT,
    ChartBlock,
    KeyFigure,
    Page,
    drawn_table,
    kind_of,
    tone_of,
)
from trainatomy.reporters.labels import ALARM, AXES, COLUMNS, COMPONENTS, HIGHLIGHT, MARKS, MUTED, SECTIONS, THROUGHPUT
from trainatomy.reporters.settings import FIT_MARKS, settings_of
from trainatomy.reporters.text.comparison import comparison_page
from trainatomy.reporters.text.fit import fit_page, shortage_page
from trainatomy.reporters.text.gpus import gpus_fit_page
from trainatomy.reporters.text.memory import breakdown
from trainatomy.results.comparison import Comparison
from trainatomy.results.fit import Candidate, Fit, FitAcross, Shortage
from trainatomy.results.measurement import Measurement
from trainatomy.results.memory import Components
from trainatomy.results.operations import OperationBreakdown
from trainatomy.results.prediction import Prediction, total_rate
from trainatomy.results.trace import Detail
from trainatomy.units import human_bytes, many, rate, seconds

_MEASURED_COLOUR = COMPONENTS["activations"].colour


def comparison_report(comparison: Comparison) -> Page:
    """Return the report of a comparison."""
    document = comparison_page(comparison)
    others = document.sections
    tables = [block for section in others[:1] for block in section.blocks]
    memory = _memory(comparison)
    sections = [Section(SECTIONS["peak"], (*memory, *tables)), *_speeds(comparison), *others[1:]]
    sections += [
        Section(row.name or row.prediction.name, (breakdown(row.prediction.memory),), is_folded=True)
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
        subject=document.subject,
        figures=_comparison_figures(comparison),
        sections=[section for section in sections if section.blocks],
    )


def _remarks(comparison: Comparison) -> list[str]:
    return [text for text in (comparison.source, comparison.remark) if text]


def _memory(comparison: Comparison) -> tuple[Any, ...]:
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


def _comparison_figures(comparison: Comparison) -> list[KeyFigure]:
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


_FAR = 2.5
"""The limit is drawn unless it is that many times as far as the largest candidate."""
_BEST = COMPONENTS["activations"].colour


def fit_report(fit: Fit, command: str) -> Page:
    """Return the report of a search on one GPU."""
    document = fit_page(fit, command) if command else fit_page(fit)
    first, *others = document.sections
    sections = [Section(REPORT["pareto"], _pareto(fit))]
    if fit.best is not None:
        memory = fit.best.prediction.memory
        sections.append(Section(SECTIONS["peak"], (bill_chart(memory, fit.gpu), breakdown(memory))))
    elif fit.shortage is not None:  # its table is in a section of the document
        sections.append(Section(SECTIONS["peak"], (bill_chart(fit.shortage.given.prediction.memory, fit.gpu),)))
    return Page(
        title=fit.name,
        kind=REPORT["search"],
        verdict="fits" if fit.best else "does not fit",
        tone="good" if fit.best else "bad",
        answer=answer_of(first),
        subject=document.subject,
        figures=_search_figures(fit),
        sections=[section for section in [*sections, *others] if section.blocks],
    )


def across_report(across: FitAcross) -> Page:
    """Return the report of a search on several GPUs."""
    document = gpus_fit_page(across)
    first, *others = document.sections
    found = {each.gpu.name: each.fit.best for each in across.options if each.fit.best is not None}
    charts: list[Any] = []
    if found:
        rows = {name: best.prediction.memory.components for name, best in found.items()}
        charts.append(component_bars("memory", rows, REPORT["across_memory"]))
        rates = [best.samples_per_second for best in found.values()]
        series = [{"name": REPORT["throughput"], "colour": THROUGHPUT, "values": rates}]
        charts.append(bars("speed", list(found), series, REPORT["across_speed"], unit="rate", axis=AXES["throughput"]))
    count = many(len(across.options), "GPU")
    return Page(
        title=across.name,
        kind=REPORT["search"],
        verdict="fits" if found else "does not fit",
        tone="good" if found else "bad",
        answer=[f"It fits on {len(found)} of {count}."],
        subject=document.subject,
        sections=[Section(REPORT["gpus"], (*charts, *first.blocks)), *others],
    )


def shortage_report(shortage: Shortage) -> Page:
    """Return the report of a training that does not fit, with what would make it fit."""
    document = shortage_page(shortage)
    first, *others = document.sections
    prediction = shortage.given.prediction
    chart = bill_chart(prediction.memory, prediction.gpu)
    does = "fits" if shortage.given.fits else "does not fit"
    lines = [line.removeprefix(does).strip() for line in answer_of(first)]
    return Page(
        title=prediction.name,
        kind=REPORT["shortage"],
        verdict=does,
        tone="good" if shortage.given.fits else "bad",
        answer=lines,
        subject=document.subject,
        sections=[Section(SECTIONS["peak"], (chart,)), *others],
    )


def _pareto(fit: Fit) -> tuple[Any, ...]:
    """Return every executed candidate by memory and throughput, and the front of those that none beats."""
    tied = [each.workload for each in fit.ties]
    groups: dict[str, list[Candidate]] = {"best": [], "tie": [], "fits": [], "too_large": list(fit.too_large)}
    for each in fit.candidates:
        kind = "best" if fit.best is not None and each.workload == fit.best.workload else "fits"
        groups["tie" if kind == "fits" and each.workload in tied else kind].append(each)
    colours = {"best": _BEST, "tie": HIGHLIGHT, "fits": THROUGHPUT, "too_large": ALARM}
    series = [
        {"name": FIT_MARKS[kind], "colour": colours[kind], "points": _points(some, 16 if kind == "best" else 9)}
        for kind, some in groups.items()
        if some
    ]
    if not series:
        return ()
    front = [[each.device_bytes, each.samples_per_second] for each in fit.front]
    rates = [each.samples_per_second for each in (*fit.candidates, *fit.too_large)]
    most = max(each.device_bytes for each in (*fit.candidates, *fit.too_large))
    lines: list[dict[str, object]] = [{"name": FIT_MARKS["front"], "colour": MUTED, "points": front}]
    if fit.usable_bytes <= _FAR * most:
        limit = [[fit.usable_bytes, 0], [fit.usable_bytes, max(rates) * 1.05]]
        lines.append({"name": REPORT["usable"].format(human_bytes(fit.usable_bytes)), "colour": ALARM, "points": limit})
    axes = (
        {"title": REPORT["device"], "unit": "bytes", "log": False},
        {"title": AXES["throughput"], "unit": "rate", "log": False},
    )
    count = many(len(fit.candidates) + len(fit.too_large), "candidate")
    return (scatter("pareto", series, lines, axes, REPORT["pareto_summary"].format(count)),)


def _points(candidates: Sequence[Candidate], size: int) -> list[dict[str, object]]:
    return [
        {
            "x": each.device_bytes,
            "y": each.samples_per_second,
            "size": size,
            "label": settings_of(each),
            "text": [
                human_bytes(each.device_bytes),
                f"{rate(each.samples_per_second)} samples/s, {seconds(each.step_seconds)} per step",
            ],
        }
        for each in candidates
    ]


def _search_figures(fit: Fit) -> list[KeyFigure]:
    executed = (
        f"{fit.counts.executed:,} of {many(fit.counts.space, 'candidate')} executed in {seconds(fit.counts.seconds)}"
    )
    searched = KeyFigure(REPORT["searched"], f"{fit.counts.space:,}", executed)
    if fit.best is None:
        return [searched]
    best, usable = fit.best, f"{human_bytes(fit.usable_bytes)} usable on {fit.gpu.name}"
    return [
        KeyFigure(REPORT["throughput"], f"{rate(best.samples_per_second)} samples/s", settings_of(best)),
        KeyFigure(
            REPORT["device"],
            human_bytes(best.device_bytes),
            usable,
        ),
        KeyFigure(REPORT["step_time"], seconds(best.step_seconds), f"{fit.effective_batch_size} samples per step"),
        searched,
    ]


Reported = Prediction | Measurement | Comparison | Fit | FitAcross | Shortage | OperationBreakdown


def to_html(
    value: Prediction | Measurement | Comparison | Fit | FitAcross | Shortage | OperationBreakdown,
    *,
    detail: Detail | None = None,
    prediction: Prediction | None = None,
    command: str = "",
) -> str:
    """Return the report of a result: a whole HTML document that needs no network.

    Args:
        value: A prediction, a measurement, a comparison, the outcome of a search, or an operation breakdown.
        detail: Of a prediction: its allocations and operations (``predict_in_detail``), for the timeline.
        prediction: Of a measurement: the prediction of the same workload.
        command: The command line that made it.
    """
    return render(page_of(value, detail=detail, prediction=prediction, command=command), command)


def page_of(
    value: Reported, *, detail: Detail | None = None, prediction: Prediction | None = None, command: str = ""
) -> Page:
    """Return what the report of a result shows; the arguments are those of ``to_html``."""
    if isinstance(value, Prediction):
        return prediction_report(value, detail)
    if isinstance(value, Measurement):
        return measurement_report(value, prediction)
    if isinstance(value, Fit):
        return fit_report(value, command)
    if isinstance(value, Comparison):
        return comparison_report(value)
    if isinstance(value, FitAcross):
        return across_report(value)
    if isinstance(value, Shortage):
        return shortage_report(value)
    return operations_report(value)


def render(page: Page, command: str = "", *, is_framed: bool = False) -> str:
    """Return a page as HTML.

    Args:
        page: The page.
        command: The command line that made it.
        is_framed: True for a part of another page, which has the answer already and is told the height.
    """
    charts = [block for section in page.sections for block in section.blocks if isinstance(block, ChartBlock)]
    data = {chart.name: {"chart": chart.chart, **chart.data} for chart in charts}
    return _template().render(
        page=page,
        is_framed=is_framed,
        command=command or page.command,
        labels=REPORT,
        # "<" as an escape: no text of the data can close the element that it is in
        data=json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
        style=_asset("report.css"),
        script=_asset("report.js"),
        library=_asset("echarts.min.js") if charts else "",
        packed={chart.name: chart.packed for chart in charts if chart.packed},
        icon=base64.b64encode(_asset("icon.svg").encode()).decode(),
    )


def _breakable(text: str) -> Markup:
    """Return a text as HTML that may break after dots and underscores, as paths of modules are long."""
    return Markup(re.sub(r"(?<=[._])(?=[A-Za-z*])", "<wbr>", str(escape(text))))


def _asset(name: str) -> str:
    return (files("trainatomy.reporters.html") / "assets" / name).read_text(encoding="utf-8")


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"breakable": _breakable, "drawn": drawn_table, "kind": kind_of, "tone": tone_of}
    return environment.from_string(_asset("report.html.j2"))
