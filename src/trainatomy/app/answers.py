"""The page's answers for a workload, as plain values: computed in a worker process, kept by the page."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from trainatomy import api
from trainatomy.app.form import in_terms_of_the_page
from trainatomy.catalog.gpus import gpus
from trainatomy.errors import TrainatomyError
from trainatomy.reporters.export import command_line_flags, training_arguments_code, workload_yaml
from trainatomy.reporters.html.page import page_of, render, to_html
from trainatomy.requests.comparing import CompareRequest
from trainatomy.requests.predicting import load_calibration
from trainatomy.results.fit import Candidate, Fit, Permission
from trainatomy.results.prediction import Prediction
from trainatomy.results.trace import Detail
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from trainatomy.prediction.assemble import Executed

Task = Literal["bill", "report", "fit", "gpus"]


class Request(NamedTuple):
    """A visitor's request.

    Attributes:
        task: The memory breakdown, the report of it, settings that fit, or the training on every GPU.
        training: The workload as JSON.
        allow: What a search may change of the training.
    """

    task: Task
    training: str
    allow: tuple[Permission, ...] = ()

    @classmethod
    def of(cls, task: Task, workload: Workload, allow: tuple[Permission, ...] = ()) -> Request:
        return cls(task, json.dumps(workload.to_mapping()), allow)

    @property
    def is_search(self) -> bool:
        """True if it takes long."""
        return self.task in ("fit", "gpus")


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request.

    Attributes:
        verdict: "fits", "tight", "does not fit", or nothing for a search.
        tone: Of the verdict, as in reports.
        sentence: The answer in words.
        subject: What was predicted, and what was decided for the visitor.
        figures: Title, value and remark of each figure.
        report: The report, a whole HTML document; empty for a bill.
        exports: The settings as Python code, workload file and options, by those names; of a search, the best ones.
        device_bytes: Device memory at the peak, of a prediction.
        best: The best settings of a search, a workload as a mapping; None where nothing fits.
    """

    verdict: str = ""
    tone: str = ""
    sentence: str = ""
    subject: tuple[str, ...] = ()
    figures: tuple[tuple[str, str, str], ...] = ()
    report: str = ""
    exports: tuple[str, str, str] = ("", "", "")
    device_bytes: int | None = None
    best: dict[str, Any] | None = None


class Answers:
    """Answers requests in its process; it keeps the last execution, of which a report is made next."""

    def __init__(self) -> None:
        self._last: tuple[str, Prediction, Executed] | None = None

    def answer(self, request: Request) -> Answer:
        """Return the answer to a request.

        Raises:
            TrainatomyError: Those of ``predict`` and ``fit``, in terms of the page.
        """
        workload = Workload.from_mapping(json.loads(request.training))
        try:
            if request.task == "fit":
                return _searched(workload, request.allow)
            if request.task == "gpus":
                return _on_all_gpus(workload)
            return self._predicted(request, workload)
        except TrainatomyError as error:
            raise TrainatomyError(in_terms_of_the_page(error)) from error

    def _predicted(self, request: Request, workload: Workload) -> Answer:
        prediction, executed = self._executed(request.training, workload)
        in_detail = request.task == "report"
        page = page_of(prediction, detail=_detail(executed, workload) if in_detail else None)
        settings = Candidate((), workload.to_mapping(), prediction, prediction.fits)
        return Answer(
            page.verdict,
            page.tone,
            page.answer[0] if page.answer else "",
            tuple(page.subject),
            tuple((figure.title, figure.value, figure.remark) for figure in page.figures),
            render(page, is_framed=True) if in_detail else "",
            _exports(settings, workload),
            prediction.memory.device_bytes,
        )

    def _executed(self, training: str, workload: Workload) -> tuple[Prediction, Executed]:
        if self._last is None or self._last[0] != training:
            self._last = None  # its memory is needed
            with api.keep_executed() as executed:
                prediction = api.predict(workload)
            self._last = (training, prediction, executed[-1])
        return self._last[1:]


def _detail(executed: Executed, workload: Workload) -> Detail:
    return api.detail_of_executed(executed, load_calibration(None, [workload]))


def _exports(settings: Candidate, workload: Workload) -> tuple[str, str, str]:
    flags = command_line_flags(settings)
    python = training_arguments_code(settings, workload.display_name)
    return python, workload_yaml(settings), f"trainatomy predict {flags}"


def _searched(workload: Workload, allow: tuple[Permission, ...]) -> Answer:
    fit: Fit = api.fit(workload, allow=allow)
    best = fit.best
    exports = ("", "", "") if best is None else _exports(best, workload)
    return Answer(report=to_html(fit), exports=exports, best=dict(best.workload) if best is not None else None)


def _on_all_gpus(workload: Workload) -> Answer:
    rows = [workload.replace({"gpu": gpu.id, "name": gpu.name}) for gpu in gpus()]
    return Answer(report=to_html(api.predict_comparison(rows, CompareRequest())))
