"""What the page shows for a workload, as plain values: computed in a worker process, kept by the page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from trainatomy.workload.schema import Workload

Task = Literal["bill", "report", "fit", "gpus"]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request.

    Attributes:
        verdict: "fits", "tight", "does not fit", or nothing for a search.
        tone: Of the verdict, as in reports.
        sentence: The answer in words.
        figures: Title, value and remark of each figure.
        report: The report, a whole HTML document; empty for a bill.
        exports: The settings as Python code, workload file and options, by those names.
        device_bytes: Device memory at the peak, of a prediction.
    """

    verdict: str = ""
    tone: str = ""
    sentence: str = ""
    figures: tuple[tuple[str, str, str], ...] = ()
    report: str = ""
    exports: tuple[str, str, str] = ("", "", "")
    device_bytes: int | None = None


def answer(task: Task, mapping: dict[str, Any]) -> Answer:
    """Return the answer of a task for a workload, as a mapping.

    Raises:
        TrainatomyError: Those of ``predict`` and ``fit``.
    """
    workload = Workload.from_mapping(mapping)
    if task == "fit":
        return _searched(workload)
    return _on_all_gpus(workload) if task == "gpus" else _predicted(workload, in_detail=task == "report")


def _predicted(workload: Workload, *, in_detail: bool) -> Answer:
    from trainatomy import api
    from trainatomy.reporters.export import command_line_flags, training_arguments_code, workload_yaml
    from trainatomy.reporters.html.page import page_of, render
    from trainatomy.results.fit import Candidate

    prediction, detail = api.predict_in_detail(workload) if in_detail else (api.predict(workload), None)
    page = page_of(prediction, detail=detail)
    settings = Candidate((), workload.to_mapping(), prediction, prediction.fits)
    flags = command_line_flags(settings)
    return Answer(
        page.verdict,
        page.tone,
        page.answer[0] if page.answer else "",
        tuple((figure.title, figure.value, figure.remark) for figure in page.figures),
        render(page) if in_detail else "",
        (
            training_arguments_code(settings, workload.display_name),
            workload_yaml(settings),
            f"trainatomy predict {flags}",
        ),
        prediction.memory.device_bytes,
    )


def _searched(workload: Workload) -> Answer:
    from trainatomy import api
    from trainatomy.reporters.html import to_html

    return Answer(report=to_html(api.fit(workload)))


def _on_all_gpus(workload: Workload) -> Answer:
    from trainatomy import api
    from trainatomy.catalog.gpus import gpus
    from trainatomy.reporters.html import to_html
    from trainatomy.runs.options import PredictOptions

    rows = [workload.replace({"gpu": gpu.id, "name": gpu.name}) for gpu in gpus()]
    return Answer(report=to_html(api.predict_comparison(rows, PredictOptions())))
