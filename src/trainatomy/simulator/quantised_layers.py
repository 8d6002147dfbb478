"""Copies of bitsandbytes' layers on meta tensors, for live modules that hold them.

Their parameters carry what copying a tensor leaves out: scales and code books of quantised weights (``quant_state``,
``SCB``), and how weights are to be quantised when they are moved to a GPU.

Source: bitsandbytes 0.46-0.50, nn/modules.py and functional.py.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def is_quantised(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is one of bitsandbytes' linear layers."""
    kind = type(parameter)
    return kind.__module__.startswith("bitsandbytes.") and kind.__name__ in ("Params4bit", "Int8Params")


def on_meta(parameter: Any, memo: dict[int, Any]) -> nn.Parameter:
    """Return a copy of a quantised parameter without data, and note in ``memo`` what it holds, as ``deepcopy`` does."""
    empty = torch.empty_like(parameter.data, device="meta")
    memo[id(parameter.data)] = empty
    attributes = {name: value for name, value in vars(parameter).items() if name not in ("data", "module")}
    for name, value in attributes.items():
        if isinstance(value, torch.Tensor):  # CB is the weight itself
            shared = value.data_ptr() == parameter.data_ptr() and value.dtype == parameter.dtype
            attributes[name] = empty if shared else torch.empty_like(value, device="meta")
            memo[id(value)] = attributes[name]
    if attributes.get("quant_state") is not None:
        attributes["quant_state"] = _state(attributes["quant_state"], memo)
    copied: nn.Parameter = type(parameter)(empty, requires_grad=parameter.requires_grad)
    vars(copied).update(attributes)
    memo[id(parameter)] = copied
    return copied


def _state(state: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of a ``QuantState`` without data."""
    copied = copy.copy(state)
    for name, value in vars(state).items():
        if isinstance(value, torch.Tensor):
            setattr(copied, name, torch.empty_like(value, device="meta"))
    if state.state2 is not None:
        copied.state2 = _state(state.state2, memo)
    memo[id(state)] = copied
    return copied


def memo_of_layers(model: nn.Module, memo: dict[int, Any]) -> None:
    """Note in ``memo`` what layers with 8-bit weights keep outside of their parameters."""
    for module in model.modules():
        state = vars(module).get("state")
        if type(state).__module__.startswith("bitsandbytes."):
            weight: Any = memo.get(id(module._parameters.get("weight")))
            for name, value in vars(state).items():
                if isinstance(value, torch.Tensor) and id(value) not in memo:
                    is_weight = name == "CB" and weight is not None
                    memo[id(value)] = weight.data if is_weight else torch.empty_like(value, device="meta")


def place(model: nn.Module) -> None:
    """Move a live model to the GPU as far as ``from_pretrained`` makes it there.

    That is a model that was loaded quantised, which the Trainer leaves where it is, and 8-bit weights with their
    scales, which ``nn.Module.to`` would leave behind.
    """
    _place_8bit(model)
    if any(vars(module).get("is_quantized") is True for module in model.modules()):
        nn.Module.to(model, "cuda")


def _place_8bit(model: nn.Module) -> None:
    for module in model.modules():
        weight = module._parameters.get("weight")
        if type(weight).__name__ == "Int8Params" and weight is not None and weight.dtype == torch.int8:
            module.weight = weight.to("cuda")
            state: Any = module.state
            state.CB = None if state.CB is None else module.weight.data
            state.SCB = None if state.SCB is None else state.SCB.to("cuda")


def name_layers(model: nn.Module) -> None:
    """Let the 4-bit weights of a copied model know their layers, which take the scales when they are quantised."""
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and hasattr(weight, "quant_storage"):
            vars(weight)["module"] = module
