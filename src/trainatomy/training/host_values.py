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
from torch.utils._pytree import tree_map

from trainatomy.errors import FactoryError

_MESSAGES = ("Cannot copy out of meta tensor", "cannot be called on meta tensors", "can't convert meta device")
"""PyTorch's messages where Python reads a value of a meta tensor (2.9-2.13)."""


def call_with_values(build: Callable[[], nn.Module]) -> nn.Module:
    """Call a builder under the default device; if that is meta and it reads values, once more with values."""
    try:
        with _Refusals():
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
    """Answers what has no values: reads of what follows from parameters, and operators that cannot run without data.

    An integer may be a size, and is not read.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, or answer it."""
        kwargs = kwargs or {}
        if func in _COMPARISONS and any(tensor.is_meta for tensor in args[:2]):
            return True
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            if args[0].dtype == torch.bool:
                return True
            if args[0].is_floating_point():
                return 0.0
        try:
            return func(*args, **kwargs)
        except NotImplementedError as error:
            if not _runs_on_meta_only(error):
                raise
        results = func(*tree_map(_with_values, args), **tree_map(_with_values, kwargs))
        return tree_map(lambda each: each.to("meta") if isinstance(each, torch.Tensor) else each, results)


class _Refusals(TorchDispatchMode):
    """Lets no one mistake an operator without a meta kernel for a method that is not implemented, as PyTorch does.

    ``torch.nn.utils.parametrize`` takes a ``NotImplementedError`` of ``right_inverse`` for a missing inverse.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; raise ``RuntimeError`` if it cannot run on meta tensors."""
        try:
            return func(*args, **(kwargs or {}))
        except NotImplementedError as error:
            if _runs_on_meta_only(error):
                raise RuntimeError(f"{func} {_MESSAGES[1]}") from error
            raise


_COMPARISONS = (torch.ops.aten.allclose.default, torch.ops.aten.equal.default)


def _runs_on_meta_only(error: NotImplementedError) -> bool:
    """Return whether an operator has no kernel for meta tensors."""
    return "'Meta' backend" in str(error) or "Meta tensors" in str(error)


def _with_values(value: Any) -> Any:
    """Return a tensor with random numbers in place of one without values; anything else as it is."""
    if not isinstance(value, torch.Tensor) or not value.is_meta:
        return value
    made = torch.empty_like(value, device="cpu")
    return made.normal_() if made.is_floating_point() or made.is_complex() else made.zero_()


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
