"""The fields of the page as one value: its workload, its link, and what a server refuses.

Messages about training runs that cannot be predicted, with the names that the page gives its fields.

Values that suit a model and a GPU: the precision that it computes fastest, the lengths that the model reads.

The fields of the form as Gradio's components, and how they follow each other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlencode

from trainatomy.catalog.architectures import architecture, architectures
from trainatomy.catalog.gpus import find_gpu, gpus
from trainatomy.errors import WorkloadError
from trainatomy.workload.schema import Workload

FIELDS = {
    "model.id": "Model",
    "model.class": "config.json",
    "model.config": "config.json",
    "model.lora": "LoRA rank",
    "model.quantization": "Quantised weights",
    "data.sequence_length": "Sequence length",
    "train.per_device_train_batch_size": "Batch size of the device",
    "train.gradient_accumulation_steps": "Accumulation steps",
    "train.gradient_checkpointing": "Gradient checkpointing",
    "train.optim": "Optimizer",
    "train.bf16": "Precision",
    "train.fp16": "Precision",
    "gpu": "GPU",
    "batch": "Batch size of the device",
    "length": "Sequence length",
    "accumulation": "Accumulation steps",
    "lora_rank": "LoRA rank",
    "precision": "Precision",
    "quantization": "Quantised weights",
    "optimizer": "Optimizer",
}
"""Titles of the page by keys of a workload, and by fields of the form."""

_REWORDED = (
    ("or let the search choose: --allow precision", "or let the search change it: tick precision above the button"),
    ("reads no text: leave it out", "reads no text: set it to 0"),
    (
        "quantised weights cannot be trained: add model.lora, or ask for mode: inference",
        "quantised weights cannot be trained: set a LoRA rank, so that adapters are",
    ),
)
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+|`trainatomy [a-z]")


def in_terms_of_the_page(error: Exception) -> str:
    """Return the message of an error as the page says it.

    Keys of a workload become the titles of fields, and advice that names options becomes advice about the page; of an
    option that is left it says that it is one of the command line.
    """
    text = str(error)
    for said, meant in _REWORDED:
        text = text.replace(said, meant)
    if "--trust-remote-code" in text:
        return (
            "Model: this model needs code of its own from the hub, which this page does not run; the command line can"
        )
    key, colon, rest = text.partition(": ")
    if colon and key in FIELDS:
        text = f"{FIELDS[key]}: {rest}"
    keys = sorted((key for key in FIELDS if "." in key), key=len, reverse=True)
    for name in keys:
        text = re.sub(rf"(?<![\w.]){re.escape(name)}(?![\w.])", FIELDS[name], text)
    return f"{text} (on the command line)" if _OPTION.search(text) else text


Precision = Literal["fp32", "bf16", "fp16"]
USUAL_LENGTH = 512
LONGEST = 32_768
"""End of the slider for models with more positions."""
UNKNOWN = 8192
"""End of the slider for models whose positions are not known."""
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx")
_AFTER_PADDING = ("roberta", "xlm-roberta", "camembert")
"""Types of models whose table of positions begins after that of the padding token."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of samples that a model reads.

    Attributes:
        usual: The one to begin with; 0 where the model reads no text.
        most: The longest one of the slider.
    """

    usual: int = USUAL_LENGTH
    most: int = UNKNOWN

    @property
    def has_text(self) -> bool:
        return self.usual > 0


def precision_of(gpu: str) -> Precision:
    """Return the precision to begin with: bf16 where the GPU computes with it, else fp16, else fp32."""
    try:
        rates = find_gpu(gpu).rates
    except WorkloadError:
        return "bf16"
    return "bf16" if "bf16" in rates else "fp16" if "fp16" in rates else "fp32"


def lengths_of(model: str, config: str) -> Lengths:
    """Return the lengths of a model by its configuration: the pasted one, or one that ships; else the usual ones."""
    values = _configuration(model, config)
    if values is None:
        return Lengths()
    is_of_images = "image_size" in values or "num_channels" in values
    if is_of_images and "vocab_size" not in values and "text_config" not in values:
        return Lengths(0)
    positions = next((values[key] for key in _POSITIONS if isinstance(values.get(key), int)), UNKNOWN)
    if values.get("model_type") in _AFTER_PADDING:
        padding = values.get("pad_token_id", 1)
        positions -= (padding if isinstance(padding, int) else 1) + 1
    most = max(1, min(positions, LONGEST))
    return Lengths(min(USUAL_LENGTH, most), most)


def _configuration(model: str, config: str) -> Mapping[str, Any] | None:
    if config.strip():
        try:
            found = json.loads(config)
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None
    shipped = architecture(model)
    return shipped.config if shipped is not None else None


Quantization = Literal["none", "8-bit", "4-bit"]
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "adafactor", "sgd")
MOST = {"batch": 1024, "length": 131_072, "accumulation": 1024, "lora_rank": 1024}
"""The largest values that the page predicts."""
MAX_CONFIG_CHARACTERS = 64_000
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_CLASS = re.compile(r"[A-Z]\w*")
_DROPPED = ("architectures", "_name_or_path", "transformers_version")
_REFUSED = {
    "auto_map": "names code on the hub, which this page does not run",
    "quantization_config": "is not read here; choose the quantisation in the form",
}


@dataclass(frozen=True, slots=True)
class Form:
    """The answers of a filled form.

    Attributes:
        model: Name on the hub; not used where ``config`` is given.
        config: Text of a ``config.json``, or nothing.
        gpu: The GPU.
        batch: Samples of a micro-batch.
        length: Tokens of a sample; 0 for the default of the model.
        accumulation: Micro-batches of an optimizer step.
        precision: Precision of the training.
        optimizer: A name of ``TrainingArguments.optim``.
        checkpointing: Whether activations are recomputed.
        lora_rank: Rank of the adapters; 0 trains all weights.
        quantization: Bits of the base model's weights.
    """

    model: str = "gpt2"
    config: str = ""
    gpu: str = "h200"
    batch: int = 8
    length: int = 512
    accumulation: int = 1
    precision: Precision = "bf16"
    optimizer: str = "adamw_torch_fused"
    checkpointing: bool = False
    lora_rank: int = 0
    quantization: Quantization = "none"

    def workload(self) -> Workload:
        """Return the workload of the form.

        Raises:
            WorkloadError: A value is not accepted by the page, or the settings contradict each other.
        """
        self._check()
        model: dict[str, Any] = _of_config(self.config) if self.config.strip() else {"id": hub_name(self.model)}
        if self.lora_rank:
            model["lora"] = {"r": self.lora_rank}
        if self.quantization != "none":
            model["quantization"] = {"load_in_4bit" if self.quantization == "4-bit" else "load_in_8bit": True}
        train: dict[str, Any] = {
            "per_device_train_batch_size": self.batch,
            "gradient_accumulation_steps": self.accumulation,
            "optim": self.optimizer,
            "gradient_checkpointing": self.checkpointing,
        }
        if self.precision != "fp32":
            train[self.precision] = True
        data = {"sequence_length": self.length} if self.length else {}
        return Workload.from_mapping({"model": model, "data": data, "train": train, "gpu": self.gpu})

    def suited(self) -> Form:
        """Return this form with the precision and the length that suit its model and its GPU."""
        return replace(self, precision=precision_of(self.gpu), length=lengths_of(self.model, self.config).usual)

    def with_settings(self, workload: Mapping[str, Any]) -> Form | None:
        """Return this form with the settings of a workload, or None where it has some that are not on the page."""
        train, model = workload.get("train", {}), workload.get("model", {})
        quantized = model.get("quantization") or {}
        found = replace(
            self,
            batch=train.get("per_device_train_batch_size", 8),
            length=workload.get("data", {}).get("sequence_length", 0),
            accumulation=train.get("gradient_accumulation_steps", 1),
            precision="bf16" if train.get("bf16") else "fp16" if train.get("fp16") else "fp32",
            optimizer=train.get("optim", self.optimizer),
            checkpointing=bool(train.get("gradient_checkpointing")),
            lora_rank=(model.get("lora") or {}).get("r", 0),
            quantization="4-bit" if quantized.get("load_in_4bit") else "8-bit" if quantized else "none",
        )
        try:
            same = found.workload().to_mapping() == Workload.from_mapping(workload).to_mapping()
        except WorkloadError:
            return None
        return found if same else None

    def query(self) -> str:
        """Return the fields that differ from the defaults as the query of a URL."""
        first, suited = asdict(Form()), self.suited()
        default = {**first, "precision": suited.precision, "length": suited.length}
        changed = {key: value for key, value in asdict(self).items() if value != default[key]}
        return urlencode({key: int(value) if isinstance(value, bool) else value for key, value in changed.items()})

    @classmethod
    def of_query(cls, query: Mapping[str, str]) -> Form:
        """Return the form of a URL's query; keys that are not fields are left out, fields that it lacks are suited.

        Raises:
            WorkloadError: A number is not one.
        """
        default: dict[str, Any] = asdict(cls())
        found: dict[str, Any] = {}
        for field in fields(cls):
            if field.name not in query:
                continue
            text, kind = query[field.name], type(default[field.name])
            try:
                found[field.name] = text if kind is str else kind(int(text))
            except ValueError:
                raise WorkloadError(f"the link's {field.name}={text!r} is not a whole number") from None
        form = cls(**found)
        suited = form.suited()
        missing = {name: getattr(suited, name) for name in ("precision", "length") if name not in found}
        return replace(form, **missing)

    def _check(self) -> None:
        for name, most in MOST.items():
            value, least = getattr(self, name), 0 if name in ("length", "lora_rank") else 1
            if not isinstance(value, int):
                raise WorkloadError(f"{name}: give a whole number from {least} to {most}", key=name)
            if not least <= value <= most:
                raise WorkloadError(f"{name}: {value} is outside what this page predicts ({least} to {most})", key=name)
        for name, options in (
            ("precision", get_args(Precision)),
            ("quantization", get_args(Quantization)),
            ("optimizer", OPTIMIZERS),
        ):
            if getattr(self, name) not in options:
                raise WorkloadError(
                    f"{name}: {getattr(self, name)!r} is not offered here; choose one of {', '.join(options)}", key=name
                )


def hub_name(text: str) -> str:
    """Return the name of a model on the hub; raise ``WorkloadError`` if it is none, or a folder of the server."""
    name = text.strip()
    if not _HUB_NAME.fullmatch(name) or Path(name).exists():
        raise WorkloadError(
            f"model: {name!r} is not a name on the hub, such as gpt2 or Qwen/Qwen2.5-0.5B; this page reads no folders. "
            "Paste the model's config.json instead",
            key="model.id",
        )
    return name


def _of_config(text: str) -> dict[str, Any]:
    """Return the model of a pasted ``config.json``."""
    if len(text) > MAX_CONFIG_CHARACTERS:
        raise WorkloadError(f"config: {len(text)} characters were pasted; at most {MAX_CONFIG_CHARACTERS} are read")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WorkloadError(f"config: what was pasted is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise WorkloadError("config: what was pasted is JSON, but not an object: paste a whole config.json")
    for key, reason in _REFUSED.items():
        if config.get(key):
            raise WorkloadError(f"config: {key} {reason}", key="model.config")
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if not isinstance(name, str) or not _CLASS.fullmatch(name):
        raise WorkloadError('config: names no class of transformers; add "architectures": ["GPT2LMHeadModel"]')
    return {"class": name, "config": {key: value for key, value in config.items() if key not in _DROPPED}}


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
