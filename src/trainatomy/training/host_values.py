"""Build a model on meta tensors whose builder reads values of tensors.

Under ``torch.device("meta")`` a builder cannot read a number from a tensor: widths of layers
(``torchvision.models.regnet``) or rates of dropped paths from ``torch.linspace``.  Here tensors are made on the CPU,
and a parameter loses its values as soon as its module has it, so that no more than one is ever filled.  What a builder
asks of the weights themselves (``resize_token_embeddings`` asks whether their covariance is positive definite) is
answered as healthy weights would: a bool is True, a number 0.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

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
    with torch.device("cpu"), _parameters_on_meta(), _Answers():
        model = build()
    return _move_rest(model) if isinstance(model, nn.Module) else model


def _reads_values(cause: BaseException | None) -> bool:
    return cause is not None and any(message in str(cause) for message in _MESSAGES)


class _Answers(TorchDispatchMode):
    """Answers reads of values that follow from parameters, which have none; an integer may be a size, and is not read."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, or answer it."""
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            if args[0].dtype == torch.bool:
                return True
            if args[0].is_floating_point():
                return 0.0
        return func(*args, **(kwargs or {}))


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
