"""The page: a form on the left, the answer beside it. Gradio draws it; nothing is computed here.

An estimate of memory while the exact prediction is executed.
"""

from __future__ import annotations

import errno
import html
import socket
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

from trainatomy.app.answers import Answer, Request
from trainatomy.app.configuration import workload_of
from trainatomy.app.form import Form, form_fields, in_terms_of_the_page, suit, values_of
from trainatomy.app.workers import Gate, Turns, Workers
from trainatomy.errors import TrainatomyError
from trainatomy.libraries import import_library
from trainatomy.runs.worker import Limits
from trainatomy.units import human_bytes


def estimated_bytes(workers: Workers, form: Form) -> int | None:
    """Return device memory on the line through the two executed batch sizes nearest to that of a form.

    None where fewer than two training runs were executed that differ from the form in nothing but the batch size. The
    allocator rounds sizes and may choose other blocks, which the line leaves out: it is shown as an estimate only.
    """
    known = [
        (batch, found.device_bytes)
        for batch in range(1, 129)
        if batch != form.batch
        and (found := workers.known(Request.of("bill", replace(form, batch=batch).workload()))) is not None
        and found.device_bytes is not None
    ]
    if len(known) < 2:
        return None
    (low, low_bytes), (high, high_bytes) = sorted(known, key=lambda point: abs(point[0] - form.batch))[:2]
    return max(0, round(low_bytes + (high_bytes - low_bytes) * (form.batch - low) / (high - low)))


WAITING = 40
"""Requests in the queue; a further one is turned away."""
AT_ONCE = 8
"""Requests of one kind that wait for a process at a time; the others wait in the queue."""
_ADJUSTED = ("batch", "length", "precision", "checkpointing", "optimizer", "quantization")
"""Fields that are predicted for as soon as they change."""
_AT_REST = """(...values) => new Promise((go, stop) => {
  window.trainatomyMoved?.();
  const timer = setTimeout(() => go(values), 150);
  window.trainatomyMoved = () => { clearTimeout(timer); stop(); };
})"""
"""Goes on when nothing has been adjusted for 150 ms, so that a slider that moves asks for nothing."""
MAY_CHANGE = (
    ("precision", "precision"),
    ("optimizer", "optimizer"),
    ("LoRA in place of all weights", "lora"),
    ("quantised weights", "quantization"),
    ("shorter sequences", "sequence-length"),
)
"""Permissions of a search to change what is trained, as the page words them."""
CSS = """
.gradio-container { max-width: 1560px !important; padding: 1rem clamp(.6rem, 2vw, 1.6rem) !important; }
.ta-card { border: 1px solid var(--border-color-primary); border-radius: 12px; padding: 1rem 1.1rem;
  background: var(--block-background-fill); }
.ta-card p { margin: .5rem 0 0; }
.ta-verdict { display: inline-block; border-radius: 999px; padding: .15rem .8rem; font-weight: 650;
  background: #e4e7ec; color: #344054; }
.ta-verdict.good { background: #d9f2e3; color: #11613a; }
.ta-verdict.warn { background: #fdecc8; color: #7a4b00; }
.ta-verdict.bad { background: #fbdcd9; color: #8f1d14; }
.ta-figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(118px, 1fr)); gap: .9rem;
  margin: .9rem 0 0; }
.ta-figures dt { font-size: .8rem; color: var(--body-text-color); opacity: .7; }
.ta-figures dd { margin: 0; font-size: 1.2rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.ta-figures small { display: block; font-size: .78rem; font-weight: 400; color: var(--body-text-color); opacity: .7; }
.ta-report { width: 100%; height: 88vh; border: 0; background: transparent; }
.ta-subject { font-size: .86rem; color: var(--body-text-color); opacity: .8; }
.ta-wait { color: var(--body-text-color); opacity: .7; }
"""


HEAD = """<script>
addEventListener("message", ({ source, data }) => {
  const frame = [...document.querySelectorAll(".ta-report")].find((each) => each.contentWindow === source);
  if (frame && data && data.trainatomyHeight > 0) frame.style.height = `${Math.ceil(data.trainatomyHeight)}px`;
});
</script>"""
"""Makes the frame of a report as high as the report, so that the page scrolls and the frame does not."""


def launch(
    *, host: str = "127.0.0.1", port: int | None = None, is_opened: bool = False, limits: Limits | None = None
) -> None:
    """Serve the page until Ctrl-C.

    Raises:
        MissingLibrary: Gradio is not installed.
        TrainatomyError: The address is none of this machine's, or the port is in use.
    """
    import_library("gradio", "the app", install="'trainatomy[app]'")
    check_address(host, port)
    workers = Workers(limits or Limits())
    workers.start()
    try:
        build(workers).queue(max_size=WAITING).launch(
            server_name=host,
            server_port=port,
            inbrowser=is_opened,
            css=CSS,
            head=HEAD,
            show_error=True,
            footer_links=[],
            max_file_size=0,
            app_kwargs={"middleware": [import_module("starlette.middleware").Middleware(Gate, host=host)]},
        )
    except OSError as error:
        raise TrainatomyError(f"--port {port}: cannot be used: {error}") from error
    finally:
        workers.close()


def check_address(host: str, port: int | None) -> None:
    """Raise ``TrainatomyError`` if nothing can be served on an address: Gradio would try every port of a wrong host."""
    try:
        families = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        with socket.socket(families[0][0], socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(families[0][4])
    except OSError as error:
        is_name = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        option = f"--host {host}: no address of this machine" if is_name else f"--port {port}: cannot be used"
        raise TrainatomyError(f"{option}: {error.strerror or error}") from error


def build(workers: Workers) -> Any:
    """Return the page as Gradio's blocks."""
    gr = import_library("gradio", "the app", install="'trainatomy[app]'")
    turns = Turns()
    with gr.Blocks(title="trainatomy", analytics_enabled=False) as page:
        gr.Markdown("# trainatomy\nWhat a training holds in GPU memory and how long a step takes, without a GPU.")
        with gr.Row():
            with gr.Column(scale=1, min_width=320):
                form = form_fields(gr)
                inputs = list(form.values())
                predict = gr.Button("Predict", variant="primary")
            with gr.Column(scale=3, min_width=320):
                card = gr.HTML(notice("The first prediction takes some seconds longer."))
                link = gr.Textbox(label="Link to this training", buttons=["copy"], interactive=False, elem_id="ta-link")
                with gr.Tab("Report"):
                    report = gr.HTML("", elem_id="ta-report")
                used = _searches(gr, workers, inputs)
                exports = _exports(gr)
                _configurations(gr, workers, form["gpu"])
        shown = gr.State()
        predicts = _predicts(gr, workers, turns), inputs, [card, link, *exports, shown]
        reports = _reports(gr, workers, turns), shown, report
        limits = {"show_progress": "hidden", "concurrency_limit": AT_ONCE, "trigger_mode": "always_last"}
        adjusted = [form[name].input for name in _ADJUSTED]
        at_rest = gr.on(adjusted, None, inputs, None, js=_AT_REST, trigger_mode="multiple", show_progress="hidden")
        submitted = [predict.click, form["accumulation"].submit, form["lora_rank"].submit]
        loaded = page.load(_from_link(gr), None, inputs)
        for event in (*submitted, at_rest.then, *suit(gr, form), used.then, loaded.success):
            bill = event(*predicts, concurrency_id="predictions", **limits)
            bill.then(*reports, concurrency_id="reports", **limits)
    return page


def _exports(gr: Any) -> list[Any]:
    with gr.Tab("Export"):
        return [
            gr.Code(label="TrainingArguments", language="python"),
            gr.Code(label="Workload file", language="yaml"),
            gr.Code(label="Command line", language="shell"),
        ]


def _configurations(gr: Any, workers: Workers, gpu: Any) -> None:
    """Add the tab in which a framework's configuration is pasted and predicted."""
    with gr.Tab("Paste a configuration"):
        gr.Markdown(
            "Predicts the YAML or JSON of a framework on the GPU of the form. Files that it names are not read."
        )
        text = gr.Code(value="", language="yaml", label="Configuration", lines=12, max_lines=30)
        predict = gr.Button("Predict this configuration", variant="primary")
        found, report = gr.HTML("", elem_id="ta-configuration"), gr.HTML("")
        limits = {"show_progress": "hidden", "concurrency_limit": AT_ONCE, "concurrency_id": "predictions"}
        predict.click(_of_configuration(workers), [text, gpu], [found, report], **limits)


def _of_configuration(workers: Workers) -> Any:
    def of_configuration(text: str, gpu: str) -> Iterator[tuple[str, str]]:
        try:
            workload = workload_of(text, gpu)
            asked = Request.of("bill", workload)
            yield notice("Executing the step without a GPU …"), ""
            bill = workers.ask(asked)
            origin = workload.origin
            assumed = () if origin is None else (in_terms_of_the_page(TrainatomyError(text)) for text in origin.assumed)
            shown = card(replace(bill, subject=(*bill.subject, *assumed)))
            yield shown, ""
            yield shown, framed(workers.ask(Request.of("report", workload)))
        except TrainatomyError as error:
            yield notice(str(error), "bad"), ""

    return of_configuration


def _searches(gr: Any, workers: Workers, inputs: list[Any]) -> Any:
    """Add the tabs of what takes long; return the event after which the best settings are those of the form."""
    limits = {"show_progress": "hidden", "concurrency_limit": AT_ONCE}
    with gr.Tab("What fits"):
        gr.Markdown("Searches the fastest settings with the same effective batch size. This may take a minute.")
        allow = gr.CheckboxGroup(list(MAY_CHANGE), label="The search may also change")
        find = gr.Button("Find settings that fit this GPU", variant="primary")
        use = gr.Button("Use these settings in the form", visible=False)
        found, best = gr.HTML("", elem_id="ta-fit"), gr.State()
        find.click(_fits(gr, workers), [allow, *inputs], [found, best, use], concurrency_id="fit", **limits)
    with gr.Tab("GPUs"):
        gr.Markdown("Predicts this training, as it is, on every GPU that is known. This may take a minute.")
        compare = gr.Button("Predict on every GPU", variant="primary")
        on_all = gr.HTML("", elem_id="ta-gpus")
        compare.click(_on_all_gpus(workers), inputs, on_all, concurrency_id="gpus", **limits)
    return use.click(lambda best: values_of(gr, best), best, inputs, show_progress="hidden")


def _predicts(gr: Any, workers: Workers, turns: Turns) -> Any:
    def predicts(request: Any, *values: Any) -> Iterator[tuple[Any, ...]]:
        form, unchanged = Form(*values), gr.skip()
        turn = turns.next(request.session_hash)
        try:
            asked = Request.of("bill", form.workload())
            if workers.known(asked) is None:
                yield notice(waiting(workers, form)), *[unchanged] * 5
            bill = workers.ask(asked)
            link = f"{str(request.request.base_url).rstrip('/')}/?{form.query()}"
            found: tuple[Any, ...] = (card(bill), link, *bill.exports, (turn, form))
        except TrainatomyError as error:
            found = notice(in_terms_of_the_page(error), "bad"), "", "", "", "", None
        yield found if turns.is_latest(request.session_hash, turn) else (unchanged,) * 6

    predicts.__annotations__["request"] = gr.Request
    return predicts


def _reports(gr: Any, workers: Workers, turns: Turns) -> Any:
    def reports(request: Any, shown: tuple[int, Form] | None) -> Any:
        """Return the report of the training whose figures are shown."""
        if shown is None:
            return ""
        turn, form = shown
        if not turns.is_latest(request.session_hash, turn):
            return gr.skip()
        try:
            found = framed(workers.ask(Request.of("report", form.workload())))
        except TrainatomyError as error:
            found = notice(str(error), "bad")
        return found if turns.is_latest(request.session_hash, turn) else gr.skip()

    reports.__annotations__["request"] = gr.Request
    return reports


def _fits(gr: Any, workers: Workers) -> Any:
    def fits(allow: list[Any], *values: Any) -> Iterator[tuple[Any, ...]]:
        form, hidden = Form(*values), gr.update(visible=False)
        try:
            asked = Request.of("fit", form.workload(), tuple(allow))
            yield notice(_searching(workers, asked)), None, hidden
            found = workers.ask(asked)
        except TrainatomyError as error:
            yield notice(in_terms_of_the_page(error), "bad"), None, hidden
            return
        best = form.with_settings(found.best) if found.best else None
        yield framed(found), best, gr.update(visible=best is not None)

    return fits


def _on_all_gpus(workers: Workers) -> Any:
    def on_all_gpus(*values: Any) -> Iterator[str]:
        try:
            asked = Request.of("gpus", Form(*values).workload())
            yield notice(_searching(workers, asked))
            yield framed(workers.ask(asked))
        except TrainatomyError as error:
            yield notice(in_terms_of_the_page(error), "bad")

    return on_all_gpus


def waiting(workers: Workers, form: Form) -> str:
    """Return what is shown while a training is executed: an estimate, named so, or that it is executed."""
    estimate = estimated_bytes(workers, form)
    if workers.must_wait(Request.of("bill", form.workload())):
        doing = "Waiting for a prediction of another visitor …"
    else:
        doing = "Executing the step without a GPU …"
    if estimate is None:
        return doing
    return f"About {human_bytes(estimate)}: an estimate from other batch sizes. {doing}"


def _searching(workers: Workers, asked: Request) -> str:
    if workers.must_wait(asked):
        return "Waiting for the search of another visitor …"
    return f"Searching … It is stopped after {workers.limits.seconds:.0f} s."


def _from_link(gr: Any) -> Any:
    def from_link(request: Any) -> list[Any]:
        try:
            return values_of(gr, Form.of_query(dict(request.query_params)))
        except TrainatomyError as error:
            raise gr.Error(str(error)) from error

    from_link.__annotations__["request"] = gr.Request
    return from_link


def card(found: Answer) -> str:
    """Return the verdict and the figures as HTML."""
    figures = "".join(
        f"<div><dt>{html.escape(title)}</dt><dd>{html.escape(value)}<small>{html.escape(remark)}</small></dd></div>"
        for title, value, remark in found.figures
    )
    subject = "".join(f'<p class="ta-subject">{html.escape(line)}</p>' for line in found.subject)
    return (
        f'<div class="ta-card" role="status"><span class="ta-verdict {found.tone}">{html.escape(found.verdict)}</span>'
        f'<p>{html.escape(found.sentence)}</p>{subject}<dl class="ta-figures">{figures}</dl></div>'
    )


def notice(text: str, tone: str = "") -> str:
    """Return a message as HTML."""
    badge = '<span class="ta-verdict bad">not predicted</span>' if tone else ""
    return f'<div class="ta-card" role="status">{badge}<p class="ta-wait">{html.escape(text)}</p></div>'


def framed(found: Answer) -> str:
    """Return a report in a frame that can neither reach the page around it nor the network's cookies."""
    return (
        f'<iframe class="ta-report" title="Report" sandbox="allow-scripts" srcdoc="{html.escape(found.report)}">'
        "</iframe>"
    )
