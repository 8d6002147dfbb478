"""Layers of a built model that are replaced by those of libraries with kernels of their own (``model.kernels``)."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Collection, Iterable
from typing import Any
from unittest import mock

import torch
from torch import nn

from trainatomy.errors import WorkloadError
from trainatomy.libraries import import_library
from trainatomy.workload.model import CUT_CROSS_ENTROPY, LORA_KERNELS

_KEY = "model.kernels"
_SOFTCAP = "final_logit_softcapping"
"""Setting of models that bound their logits."""
_PROJECTIONS, _MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj")
_ATTENTION = (
    r"q_proj\(hidden_states\)\.view\((hidden_shape\)+\.transpose\(1, 2\)|\*input_shape, -1, self\.head_dim \* 2\))",
    r"k_proj\(hidden_states\)\.view\(hidden_shape\)+\.transpose\(1, 2\)",
    r"v_proj\(hidden_states\)\.view\(hidden_shape\)\.transpose\(1, 2\)",
    r"attn_output = self\.o_proj\(attn_output\)",
)
"""Code of an attention's projections that axolotl replaces (``QKV_PATCHES``, ``ORIGINAL_O_CODE``)."""


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
    if not set(LORA_KERNELS).isdisjoint(kernels):
        _fuse_adapters(base, kernels)


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


def _fuse_adapters(model: Any, kernels: Collection[str]) -> None:
    """Replace layers all of which have adapters by axolotl's functions; other layers stay as they are.

    Source: axolotl 0.19, monkeypatch/lora_kernels.py (``apply_lora_kernel_patches``, ``patch_self_attn_lora``).
    """
    of_attention = not {"lora_qkv_kernel", "lora_o_kernel"}.isdisjoint(kernels)
    for layer in _layers(model):
        attention: Any = getattr(layer, "self_attn", None)
        mlp: Any = getattr(layer, "mlp", None)
        if of_attention and attention is not None:
            _check_attention(attention)
        if of_attention and _has_adapters(getattr(layer, "linear_attn", None), None):
            raise _unknown(f"adapters of linear attention ({type(layer.linear_attn).__name__})")
        if "lora_qkv_kernel" in kernels and _has_adapters(attention, _PROJECTIONS):
            _project_together(attention)
        if "lora_o_kernel" in kernels and _has_adapters(attention, ("o_proj",)):
            attention.o_proj.forward = functools.partial(_call, "apply_lora_o", attention)
        if "lora_mlp_kernel" in kernels and all(hasattr(mlp, name) for name in _MLP):
            function = _function_of(model)
            if _has_adapters(mlp, _MLP):
                mlp.forward = functools.partial(_call, function, mlp)


def _layers(model: Any) -> Iterable[nn.Module]:
    """Return the layers of a language model, where axolotl looks for them (``get_layers``)."""
    inner = getattr(model, "language_model", None) or getattr(model, "model", None)
    layers: Iterable[nn.Module] | None = getattr(getattr(inner, "language_model", inner), "layers", None)
    if layers is None:
        raise WorkloadError(
            f"{_KEY}: axolotl finds no layers in {type(model).__name__} for its kernels, and stops: leave them out",
            key=_KEY,
        )
    return layers


def _unknown(what: str) -> WorkloadError:
    return WorkloadError(f"{_KEY}: axolotl's functions for {what} are not simulated: leave them out", key=_KEY)


def _has_adapters(module: Any, names: tuple[str, ...] | None) -> bool:
    """Return whether all named layers of a module have adapters; without names, whether any has."""
    if names is None:
        return module is not None and any(hasattr(each, "lora_A") for each in module.modules())
    return all(hasattr(getattr(module, name, None), "lora_A") for name in names)


def _check_attention(attention: nn.Module) -> None:
    """Refuse an attention whose code axolotl does not find, with which it stops."""
    source = inspect.getsource(type(attention).forward)
    if not all(re.search(pattern, source) for pattern in _ATTENTION):
        raise WorkloadError(
            f"{_KEY}: lora_qkv_kernel and lora_o_kernel: axolotl stops with {type(attention).__name__}, whose "
            "projections it does not find: leave both out (lora_qkv_kernel: false, lora_o_kernel: false)",
            key=_KEY,
        )


def _project_together(attention: Any) -> None:
    """Compute queries, keys and values where the queries are asked for."""
    made: dict[str, torch.Tensor] = {}

    def queries(hidden: torch.Tensor) -> torch.Tensor:
        found, made["k_proj"], made["v_proj"] = _call("apply_lora_qkv", attention, hidden)
        return found

    attention.q_proj.forward = queries
    for name in ("k_proj", "v_proj"):
        getattr(attention, name).forward = functools.partial(lambda name, _: made.pop(name), name)


def _function_of(model: Any) -> str:
    """Return the function for MLPs of a model's activation."""
    config = model.config.get_text_config()
    activation = next(
        (getattr(config, name) for name in ("hidden_act", "hidden_activation") if hasattr(config, name)), None
    )
    if activation == "silu":
        return "apply_lora_mlp_swiglu"
    if activation and "gelu" in activation:
        return "apply_lora_mlp_geglu"
    raise WorkloadError(
        f"{_KEY}: lora_mlp_kernel: axolotl stops with the activation {activation}: leave it out", key=_KEY
    )


def _call(name: str, module: nn.Module, hidden: torch.Tensor) -> Any:
    library = import_library("axolotl.kernels.lora", _KEY, install="axolotl")
    return getattr(library, name)(module, hidden)
