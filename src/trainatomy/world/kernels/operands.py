"""A call's arguments by name, and the sizes and types that its rule asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from trainatomy.world.kernels.plan import Call

FLOAT_BYTES = 4
HALF_TYPES = (torch.float16, torch.bfloat16)


def bound(call: Call) -> dict[str, Any]:
    """Every argument of ``call`` under its schema's name; the dispatcher leaves out those that are the defaults."""
    values: dict[str, Any] = {}
    for position, argument in enumerate(call.func._schema.arguments):
        if position < len(call.args):
            values[argument.name] = call.args[position]
        else:
            values[argument.name] = call.kwargs.get(argument.name, argument.default_value)
    return values


def dense_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a contiguous copy of ``tensor``."""
    return tensor.numel() * tensor.element_size()


def is_half(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` holds 16-bit floating-point numbers."""
    return tensor.dtype in HALF_TYPES


def deterministic() -> bool:
    """Whether ``torch.use_deterministic_algorithms`` forbids atomic additions, and not only warns of them."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def ceil_div(number: int, divisor: int) -> int:
    """``number / divisor``, rounded up."""
    return -(-number // divisor)


def round_up(number: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is not below ``number``."""
    return ceil_div(number, multiple) * multiple
