"""Arguments of a call by name, and properties of tensors that several rules need: sizes, types, copies, lists."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from trainatomy.operators.allocation.plan import Scratch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainatomy.operators.allocation.plan import KernelCall

FLOAT_BYTES = 4
HALF_TYPES = (torch.float16, torch.bfloat16)
_COMPUTE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def bound(call: KernelCall) -> dict[str, Any]:
    """Return every argument of ``call`` by its name in the schema, with the schema's defaults."""
    names, defaults = _parameters(call.func)
    return {**defaults, **dict(zip(names, call.args, strict=False)), **call.kwargs}


@cache
def _parameters(func: torch._ops.OpOverload) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the names of an operator's arguments and their defaults, both in the order of the schema."""
    arguments = func._schema.arguments
    return tuple(each.name for each in arguments), {each.name: each.default_value for each in arguments}


def ceil_div(dividend: int, divisor: int) -> int:
    """Return ``dividend / divisor``, rounded up."""
    return -(-dividend // divisor)


def compute_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type CUDA kernels compute in: fp32 for 16-bit floats, else the type (``at::opmath_type``)."""
    return _COMPUTE.get(dtype, dtype)


def dense_bytes(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of a dense copy of ``tensor``, in ``dtype`` if one is given."""
    return tensor.numel() * (dtype or tensor.dtype).itemsize


def is_half(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` holds 16-bit floating-point numbers."""
    return tensor.dtype in HALF_TYPES


def deterministic() -> bool:
    """Return whether ``torch.use_deterministic_algorithms`` forbids atomic additions and does not only warn."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def contiguous_copies(*tensors: torch.Tensor | None, name: str = "contiguous copy") -> list[Scratch]:
    """Return a buffer for each of ``tensors`` that a kernel must first make contiguous."""
    return [
        Scratch(dense_bytes(tensor), f"{name} {number}")
        for number, tensor in enumerate(tensors)
        if tensor is not None and not tensor.is_contiguous()
    ]


def layout_of(data: torch.Tensor) -> torch.memory_format:
    """Return ``Tensor.suggest_memory_format``: channels last only where the strides are unambiguous."""
    for dimensions, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if data.dim() == dimensions and data.is_contiguous(memory_format=layout) and not data.is_contiguous():
            return layout
    return torch.contiguous_format


def tensor_list(value: Any) -> Sequence[torch.Tensor]:
    """Return the tensors of an argument that is one tensor or a list of them."""
    if isinstance(value, torch.Tensor):
        return (value,)
    return tuple(item for item in value or () if isinstance(item, torch.Tensor))
