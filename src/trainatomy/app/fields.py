"""The fields of the form as Gradio's components, and how they follow each other."""

from __future__ import annotations

from dataclasses import astuple, fields
from typing import Any

from trainatomy.app.form import MOST, OPTIMIZERS, Form
from trainatomy.app.refusals import FIELDS
from trainatomy.app.suited import Lengths, lengths_of, precision_of
from trainatomy.catalog.architectures import architectures
from trainatomy.catalog.gpus import gpus

LENGTH = "Tokens of a sample; 0: the model's default"


def form_fields(gr: Any) -> dict[str, Any]:
    """Return the components of the form by the fields of ``Form``, in their order."""
    first = Form()
    names = [entry.hub_id for entry in architectures()]
    found = {
        "model": gr.Dropdown(
            names,
            value=first.model,
            label="Model",
            info="One of the list, or a name on the hub",
            allow_custom_value=True,
        )
    }
    with gr.Accordion("Paste a config.json instead", open=False):
        found["config"] = gr.Code(value="", language="json", label="config.json", lines=6, max_lines=12)
    found["gpu"] = gr.Dropdown([(each.name, each.id) for each in gpus()], value=first.gpu, label=FIELDS["gpu"])
    found["batch"] = gr.Slider(1, 128, first.batch, step=1, label=FIELDS["batch"])
    lengths = lengths_of(first.model, "")
    found["length"] = gr.Slider(0, lengths.most, first.length, step=64, label=FIELDS["length"], info=LENGTH)
    found["precision"] = gr.Radio(["fp32", "bf16", "fp16"], value=first.precision, label=FIELDS["precision"])
    found["checkpointing"] = gr.Checkbox(first.checkpointing, label="Gradient checkpointing")
    with gr.Accordion("Optimizer, accumulation, LoRA, quantisation", open=False):
        found["accumulation"] = gr.Number(first.accumulation, label=FIELDS["accumulation"], precision=0, minimum=1)
        found["optimizer"] = gr.Dropdown(list(OPTIMIZERS), value=first.optimizer, label=FIELDS["optimizer"])
        found["lora_rank"] = gr.Number(
            first.lora_rank, label=FIELDS["lora_rank"], info="0: train all", precision=0, maximum=MOST["lora_rank"]
        )
        found["quantization"] = gr.Radio(
            ["none", "8-bit", "4-bit"], value=first.quantization, label=FIELDS["quantization"]
        )
    return {field.name: found[field.name] for field in fields(Form)}


def suit(gr: Any, form: dict[str, Any]) -> list[Any]:
    """Let the precision follow the GPU and the length follow the model; return the events after which they did."""

    def length(model: str, config: str, length: int) -> Any:
        lengths = lengths_of(model, config)
        return length_field(gr, lengths, length if lengths.has_text and 0 < length <= lengths.most else lengths.usual)

    quickly = {"queue": False, "show_progress": "hidden"}
    gpu_chosen = form["gpu"].input(_precision, [form["gpu"], form["precision"]], form["precision"], **quickly)
    of_model = [form["model"], form["config"], form["length"]]
    model_chosen = form["model"].input(length, of_model, form["length"], **quickly)
    form["config"].input(length, of_model, form["length"], **quickly)  # still being typed: nothing is predicted
    return [gpu_chosen.then, model_chosen.then]


def values_of(gr: Any, form: Form) -> list[Any]:
    """Return the values of the components for a form."""
    found = dict(zip((field.name for field in fields(Form)), astuple(form), strict=True))
    found["length"] = length_field(gr, lengths_of(form.model, form.config), form.length)
    return list(found.values())


def length_field(gr: Any, lengths: Lengths, length: int) -> Any:
    """Return the update of the slider for a model, which is at rest where the model reads no text."""
    info = LENGTH if lengths.has_text else "This model reads no text"
    return gr.update(value=length, maximum=max(lengths.most, length), interactive=lengths.has_text, info=info)


def _precision(gpu: str, precision: str) -> str:
    """Return the precision that suits a GPU; fp32 was chosen on purpose and stays."""
    return precision if precision == "fp32" else precision_of(gpu)
