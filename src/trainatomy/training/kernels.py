"""Layers of a built model that are replaced by those of libraries with kernels of their own (``model.kernels``)."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Collection
from typing import Any
from unittest import mock

import torch
from torch import nn

from trainatomy.errors import WorkloadError
from trainatomy.libraries import import_library
from trainatomy.workload.model import CUT_CROSS_ENTROPY

_KEY = "model.kernels"
_SOFTCAP = "final_logit_softcapping"
"""Setting of models that bound their logits."""


def replace_layers(model: nn.Module, base: Any, kernels: Collection[str]) -> None:
    """Replace layers of a model as ``model.kernels`` says.

    Args:
        model: The model, with its adapters.
        base: The model inside peft's wrapper.
        kernels: What to replace.

    Raises:
        WorkloadError: The model has no such layers.
    """
    if CUT_CROSS_ENTROPY in kernels:
        _cut_cross_entropy(base)


def _cut_cross_entropy(model: Any) -> None:
    """Let a causal language model compute its loss from hidden states, by the package ``cut_cross_entropy``.

    While it has labels, its output layer returns the hidden states, which so reach the model's loss function.
    Source: axolotl-ai-cloud/ml-cross-entropy at 5f0c7a7, transformers/llama.py, transformers/utils.py (``apply_lce``).
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    names = inspect.unwrap(type(model).forward).__code__.co_names
    if not isinstance(head, nn.Linear) or "loss_function" not in names or "float" in names:
        raise WorkloadError(
            f"{_KEY}: {CUT_CROSS_ENTROPY} is simulated for language models that hand the logits of an output layer to "
            f"transformers' loss, which {type(model).__name__} does not: leave it out",
            key=_KEY,
        )
    config = model.config.get_text_config()
    softcap, forward = getattr(config, _SOFTCAP, None), model.forward

    def loss_function(logits: torch.Tensor, labels: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
        count, hidden, weight = options.get("num_items_in_batch"), logits, head.weight
        if weight.dtype == torch.bfloat16 and hidden.dtype == torch.float32:
            hidden = hidden.to(weight.dtype)
        loss: torch.Tensor = import_library("cut_cross_entropy", _KEY).linear_cross_entropy(
            hidden,
            weight,
            labels.to(hidden.device),
            shift=True,
            softcap=softcap,
            reduction="mean" if count is None else "sum",
            **({} if head.bias is None else {"bias": head.bias}),
        )
        return loss if count is None else loss / count

    @functools.wraps(forward)
    def without_logits(*inputs: Any, **named: Any) -> Any:
        if named.get("labels") is None:
            return forward(*inputs, **named)
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(head, "forward", lambda hidden: hidden))
            if softcap is not None:
                stack.enter_context(mock.patch.object(config, _SOFTCAP, None))
            outputs = forward(*inputs, **named)
        outputs.logits = None
        return outputs

    model.loss_function = loss_function
    model.forward = without_logits
