"""Inputs of formula-based tools for a measured row: configuration, parameters, precision."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rivals import NoAnswer

if TYPE_CHECKING:
    from torch import nn

    from trainatomy.workload.schema import Workload

DECODERS = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True, slots=True)
class Shipped:
    """A row's workload, and its model on meta tensors as the tool would load it: full precision, no adapters."""

    workload: Workload
    model: nn.Module
    config: dict[str, Any]

    @property
    def parameters(self) -> int:
        """Return the number of parameters; tied ones count once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def is_decoder(self) -> bool:
        """Return whether it is a causal language model."""
        return type(self.model).__name__.endswith(DECODERS)

    @property
    def precision(self) -> str:
        """Return the dtype of matrix products: fp32, fp16 or bf16, by autocast or by the weights."""
        train, dtype = self.workload.train, self.workload.model.dtype
        if train.fp16 or train.fp16_full_eval or dtype == "float16":
            return "fp16"
        return "bf16" if train.bf16 or train.bf16_full_eval or dtype == "bfloat16" else "fp32"

    @property
    def is_flash(self) -> bool:
        """Return whether attention does not store its score matrix."""
        return self.workload.model.attn_implementation != "eager"


def shipped(line: dict[str, Any]) -> Shipped:
    """Return the row of a measured line; raises ``NoAnswer`` for a model that is not a transformers class."""
    return _shipped(json.dumps(line))


def trained_decoder(line: dict[str, Any]) -> Shipped:
    """Return the row where it trains a decoder; raises ``NoAnswer`` for everything else."""
    row = shipped(line)
    if row.workload.mode == "inference" or not row.is_decoder:
        raise NoAnswer("it only estimates the training of decoders")
    return row


@lru_cache(maxsize=1)
def _shipped(text: str) -> Shipped:
    import torch
    from outcomes import workload_of

    from trainatomy.training.model import build_model

    line = json.loads(text)
    workload = workload_of(line, "h200")
    if workload.model.factory is not None:
        raise NoAnswer("not a transformers model")
    bare = workload.model.model_copy(update={"lora": None, "freeze": (), "dtype": "float32"})
    with torch.device("meta"):
        model = build_model(workload.model_copy(update={"model": bare}))
    config: Any = model.config
    return Shipped(workload, model, config.to_dict())
