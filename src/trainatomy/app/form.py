"""The fields of the page as one value: its workload, its link, and what a server refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlencode

from trainatomy.app.suited import Precision, lengths_of, precision_of
from trainatomy.errors import WorkloadError
from trainatomy.workload.schema import Workload

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
        model: dict[str, Any] = _of_config(self.config) if self.config.strip() else {"id": _hub_name(self.model)}
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


def _hub_name(text: str) -> str:
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
