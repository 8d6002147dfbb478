"""Write a result as one HTML file that needs no network: figures, charts, tables."""

from __future__ import annotations

import base64
import json
import re
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from trainatomy.reporters.html.comparison import comparison_report
from trainatomy.reporters.html.labels import REPORT
from trainatomy.reporters.html.measurement import measurement_report
from trainatomy.reporters.html.operations import operations_report
from trainatomy.reporters.html.prediction import prediction_report
from trainatomy.reporters.html.search import across_report, fit_report, shortage_report
from trainatomy.reporters.html.values import ChartBlock, Page
from trainatomy.results.comparison import Comparison
from trainatomy.results.detail import Detail
from trainatomy.results.fit import Fit, FitAcross, Shortage
from trainatomy.results.measurement import Measurement
from trainatomy.results.operation_breakdown import OperationBreakdown
from trainatomy.results.prediction import Prediction

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

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
    from markupsafe import Markup, escape

    return Markup(re.sub(r"(?<=[._])(?=[A-Za-z*])", "<wbr>", str(escape(text))))


def _asset(name: str) -> str:
    return (files("trainatomy.reporters.html") / "assets" / name).read_text(encoding="utf-8")


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["breakable"] = _breakable
    return environment.from_string(_asset("report.html.j2"))
