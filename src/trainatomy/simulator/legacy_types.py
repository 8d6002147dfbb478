"""Tensor types of old code, ``torch.cuda.FloatTensor(...)``, which a build without CUDA has only by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from trainatomy.simulator.driver import CurrentDevice

_CPU_TYPES = (
    "FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "LongTensor", "IntTensor", "ShortTensor",
    "CharTensor", "ByteTensor", "BoolTensor",
)  # fmt: skip


class LegacyType(type):
    """Type of the stand-ins for ``torch.cuda.FloatTensor`` and its kind: calls make tensors on the simulated GPU.

    Attributes:
        dtype: The dtype of its tensors.
    """

    dtype: torch.dtype
    device_of: Callable[[], torch.device]

    def __call__(cls, *arguments: Any, device: Any = None) -> torch.Tensor:
        """Make a tensor of a size, or from a list, an array or another tensor."""
        gpu = cls.device_of() if device is None else torch.device(device)
        first = arguments[0] if arguments else 0
        if len(arguments) == 1 and isinstance(first, torch.Tensor):
            return first.to(gpu, cls.dtype)
        if len(arguments) == 1 and not isinstance(first, int | torch.Size):
            return torch.tensor(first, dtype=cls.dtype).to(gpu)
        return torch.empty(*(arguments or (0,)), dtype=cls.dtype, device=gpu)

    def __instancecheck__(cls, instance: object) -> bool:
        """Return whether a tensor is on the GPU and of the dtype, as PyTorch's own types do."""
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype == cls.dtype


def install_legacy_types(stack: contextlib.ExitStack, current: CurrentDevice) -> None:
    """Put the types in place; ``stack`` undoes it."""

    def set_default(kind: Any) -> None:
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
        place, _, kind_name = name.rpartition(".")
        torch.set_default_dtype(getattr(torch, kind_name).dtype)
        torch.set_default_device(current.device if place == "torch.cuda" else "cpu")

    for name in _CPU_TYPES:
        content = {
            "dtype": getattr(torch, name).dtype,
            "device_of": staticmethod(lambda: current.device),
            "__module__": "torch.cuda",
        }
        stack.enter_context(mock.patch.object(torch.cuda, name, LegacyType(name, (), content)))
    stack.enter_context(mock.patch.object(torch, "set_default_tensor_type", set_default))
