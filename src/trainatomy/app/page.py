"""The page: a form on the left, the answer beside it. Gradio draws it; nothing is computed here."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import astuple
from typing import Any

from trainatomy.app.answers import Answer, Task
from trainatomy.app.estimate import estimated_bytes
from trainatomy.app.form import MOST, OPTIMIZERS, Form
from trainatomy.app.worker import Limits, Worker
from trainatomy.catalog.architectures import architectures
from trainatomy.catalog.gpus import gpus
from trainatomy.errors import TrainatomyError
from trainatomy.libraries import import_library
from trainatomy.units import human_bytes

WAITING = 20
"""Requests in the queue; a further one is turned away."""
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
.ta-figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: .9rem;
  margin: .9rem 0 0; }
.ta-figures dt { font-size: .8rem; color: var(--body-text-color-subdued); }
.ta-figures dd { margin: 0; font-size: 1.2rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.ta-figures small { display: block; font-size: .78rem; font-weight: 400; color: var(--body-text-color-subdued); }
.ta-report { width: 100%; height: min(1100px, 88vh); border: 1px solid var(--border-color-primary);
  border-radius: 12px; background: #fff; }
.ta-wait { color: var(--body-text-color-subdued); }
"""


def launch(
    *, host: str = "127.0.0.1", port: int | None = None, is_opened: bool = False, limits: Limits | None = None
) -> None:
    """Serve the page until Ctrl-C.

    Raises:
        MissingLibrary: Gradio is not installed.
        TrainatomyError: The port is in use.
    """
    import_library("gradio", "the app", install="'trainatomy[app]'")
    worker = Worker(limits or Limits())
    worker.start()
    try:
        build(worker).queue(max_size=WAITING, default_concurrency_limit=2).launch(
            server_name=host, server_port=port, inbrowser=is_opened, css=CSS, show_error=True, footer_links=[]
        )
    except OSError as error:
        raise TrainatomyError(f"--port {port}: cannot be used: {error}") from error
    finally:
        worker.close()


def build(worker: Worker) -> Any:
    """Return the page as Gradio's blocks."""
    gr = import_library("gradio", "the app", install="'trainatomy[app]'")
    with gr.Blocks(title="trainatomy", analytics_enabled=False) as page:
        gr.Markdown("# trainatomy\nWhat a training holds in GPU memory and how long a step takes, without a GPU.")
        with gr.Row():
            with gr.Column(scale=1, min_width=320):
                inputs = _inputs(gr)
                predict = gr.Button("Predict", variant="primary")
            with gr.Column(scale=3, min_width=320):
                card = gr.HTML(notice("Press Predict. The first prediction takes some seconds longer."))
                link = gr.Textbox(label="Link to this training", buttons=["copy"], interactive=False, elem_id="ta-link")
                report, searches, exports = _tabs(gr)
        outputs = [card, report, link, *exports]
        shown = _predicts(gr, worker)
        predict.click(shown, inputs, outputs, show_progress="hidden")
        for slider in inputs[3:5]:  # batch and length
            slider.release(shown, inputs, outputs, show_progress="hidden", trigger_mode="always_last")
        for task, (button, found) in searches.items():
            button.click(_searches(worker, task), inputs, found, show_progress="full")
        page.load(_from_link(gr), None, inputs)
    return page


def _inputs(gr: Any) -> list[Any]:
    """Return the components of the form, in the order of the fields of ``Form``."""
    first = Form()
    names = [entry.hub_id for entry in architectures()]
    model = gr.Dropdown(names, value=first.model, label="Model (listed, or a name on the hub)", allow_custom_value=True)
    with gr.Accordion("Paste a config.json instead", open=False):
        config = gr.Code(value="", language="json", label="config.json", lines=6, max_lines=12)
    gpu = gr.Dropdown([(each.name, each.id) for each in gpus()], value=first.gpu, label="GPU")
    batch = gr.Slider(1, 128, first.batch, step=1, label="Batch size of the device")
    length = gr.Slider(0, 8192, first.length, step=64, label="Sequence length (0: the model's own)")
    precision = gr.Radio(["fp32", "bf16", "fp16"], value=first.precision, label="Precision")
    checkpointing = gr.Checkbox(first.checkpointing, label="Gradient checkpointing")
    with gr.Accordion("Optimizer, accumulation, LoRA, quantisation", open=False):
        accumulation = gr.Number(first.accumulation, label="Accumulation steps", precision=0, minimum=1)
        optimizer = gr.Dropdown(list(OPTIMIZERS), value=first.optimizer, label="Optimizer")
        rank = gr.Number(first.lora_rank, label="LoRA rank (0: train all)", precision=0, maximum=MOST["lora_rank"])
        quantization = gr.Radio(["none", "8-bit", "4-bit"], value=first.quantization, label="Quantised weights")
    return [
        model,
        config,
        gpu,
        batch,
        length,
        accumulation,
        precision,
        optimizer,
        checkpointing,
        rank,
        quantization,
    ]


def _tabs(gr: Any) -> tuple[Any, dict[Task, tuple[Any, Any]], list[Any]]:
    with gr.Tab("Memory and time"):
        report = gr.HTML("")
    with gr.Tab("What fits"):
        gr.Markdown("Searches the fastest settings with the same effective batch size. This may take a minute.")
        fit = (gr.Button("Find settings that fit this GPU"), gr.HTML(""))
    with gr.Tab("On which GPU"):
        gr.Markdown("Predicts this training, as it is, on every GPU that is known.")
        all_gpus = (gr.Button("Predict on every GPU"), gr.HTML(""))
    with gr.Tab("Export"):
        exports = [
            gr.Code(label="TrainingArguments", language="python"),
            gr.Code(label="Workload file", language="yaml"),
            gr.Code(label="Command line", language="shell"),
        ]
    return report, {"fit": fit, "gpus": all_gpus}, exports


def _predicts(gr: Any, worker: Worker) -> Any:
    def predicts(request: Any, *values: Any) -> Iterator[tuple[Any, ...]]:
        form, unchanged = Form(*values), gr.skip()
        try:
            workload = form.workload()
            if worker.known("bill", workload) is None:
                yield notice(waiting(worker, form)), *[unchanged] * 5
            bill = worker.ask("bill", workload)
            link = f"{str(request.request.base_url).rstrip('/')}/?{form.query()}"
            yield card(bill), unchanged, link, *bill.exports
            yield card(bill), framed(worker.ask("report", workload)), link, *bill.exports
        except TrainatomyError as error:
            yield notice(str(error), "bad"), "", "", "", "", ""

    predicts.__annotations__["request"] = gr.Request
    return predicts


def _searches(worker: Worker, task: Task) -> Any:
    def searches(*values: Any) -> str:
        try:
            return framed(worker.ask(task, Form(*values).workload()))
        except TrainatomyError as error:
            return notice(str(error), "bad")

    return searches


def waiting(worker: Worker, form: Form) -> str:
    """Return what is shown while a training is executed: an estimate, named so, or that it is executed."""
    estimate = estimated_bytes(worker, form)
    if estimate is None:
        return "Executing the step without a GPU …"
    return f"About {human_bytes(estimate)}: an estimate from other batch sizes. Executing the step without a GPU …"


def _from_link(gr: Any) -> Any:
    def from_link(request: Any) -> list[Any]:
        try:
            return list(astuple(Form.of_query(dict(request.query_params))))
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
    return (
        f'<div class="ta-card" role="status"><span class="ta-verdict {found.tone}">{html.escape(found.verdict)}</span>'
        f'<p>{html.escape(found.sentence)}</p><dl class="ta-figures">{figures}</dl></div>'
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
