"""A call's arguments by name, and facts about tensors that several rules ask for: sizes, types, copies, lists."""

from __future__ import annotations

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
    """Every argument of ``call`` under its schema's name; what was not passed has the schema's default."""
    named: dict[str, Any] = {}
    for position, argument in enumerate(call.func._schema.arguments):
        if argument.name in call.kwargs:
            named[argument.name] = call.kwargs[argument.name]
        elif position < len(call.args):
            named[argument.name] = call.args[position]
        else:
            named[argument.name] = argument.default_value
    return named


def ceil_div(dividend: int, divisor: int) -> int:
    """The least integer that is not below ``dividend / divisor``."""
    return -(-dividend // divisor)


def round_up(number: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is not below ``number``."""
    return ceil_div(number, multiple) * multiple


def compute_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which CUDA kernels compute: fp32 for 16-bit floats, else the type itself (``at::opmath_type``)."""
    return _COMPUTE.get(dtype, dtype)


def dense_bytes(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> int:
    """Bytes of a dense copy of ``tensor``, in ``dtype`` where one is given."""
    return tensor.numel() * (dtype or tensor.dtype).itemsize


def is_half(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` holds 16-bit floating-point numbers."""
    return tensor.dtype in HALF_TYPES


def deterministic() -> bool:
    """Whether ``torch.use_deterministic_algorithms`` forbids atomic additions, and not only warns of them."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def contiguous_copies(*tensors: torch.Tensor | None, name: str = "contiguous copy") -> list[Scratch]:
    """A buffer for each of ``tensors`` that a kernel must first make contiguous."""
    return [
        Scratch(dense_bytes(tensor), f"{name} {number}")
        for number, tensor in enumerate(tensors)
        if tensor is not None and not tensor.is_contiguous()
    ]


def layout_of(data: torch.Tensor) -> torch.memory_format:
    """``Tensor.suggest_memory_format``: channels last where the strides say so and nothing else."""
    for dimensions, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if data.dim() == dimensions and data.is_contiguous(memory_format=layout) and not data.is_contiguous():
            return layout
    return torch.contiguous_format


def tensor_list(value: Any) -> Sequence[torch.Tensor]:
    """The tensors of an argument that is one tensor or a list of them."""
    if isinstance(value, torch.Tensor):
        return (value,)
    return tuple(item for item in value or () if isinstance(item, torch.Tensor))
