"""Build a model on meta tensors whose builder reads values of tensors.

Under ``torch.device("meta")`` a builder cannot read a number from a tensor: widths of layers
(``torchvision.models.regnet``) or rates of dropped paths from ``torch.linspace``.  Here tensors are made on the CPU,
and a parameter loses its values as soon as its module has it, so that no more than one is ever filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import nn

from trainatomy.errors import FactoryError

_MESSAGES = ("Cannot copy out of meta tensor", "cannot be called on meta tensors", "can't convert meta device")
"""What PyTorch says where Python reads a value of a meta tensor (2.9-2.13)."""


def call_with_values(build: Callable[[], nn.Module]) -> nn.Module:
    """Call a builder under the default device; if that is meta and it reads values, once more with values."""
    try:
        return build()
    except FactoryError as error:
        if torch.get_default_device().type != "meta" or not _reads_values(error.__cause__):
            raise
    with torch.device("cpu"), _parameters_on_meta():
        model = build()
    return _move_rest(model) if isinstance(model, nn.Module) else model


def _reads_values(cause: BaseException | None) -> bool:
    return cause is not None and any(message in str(cause) for message in _MESSAGES)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Let modules take the values from parameters that they register; shared parameters stay shared."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None:
            _on_meta(param)

    with mock.patch.object(nn.Module, "register_parameter", register_on_meta):
        yield


def _move_rest(model: nn.Module) -> nn.Module:
    """Take the values from what is left: buffers, and parameters that were not registered by their module."""
    for tensor in (*model.parameters(), *model.buffers()):
        _on_meta(tensor)
    return model


def _on_meta(tensor: torch.Tensor) -> None:
    """Take the values from a tensor; it stays the same object, with the same shape, strides and dtype."""
    if tensor.is_meta:
        return
    without = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        without = type(tensor)(without, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, without)
