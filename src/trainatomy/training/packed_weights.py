"""Weights that are packed in a tensor subclass: torchao's, whose tensors hold integers and their scales.

The subclass has the shape and the dtype of the weight that it stands for, but no memory; the tensors inside have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

_LIBRARY = "torchao."


def is_packed(tensor: Any) -> bool:
    """Return whether a tensor is packed by torchao."""
    return is_packed_type(type(tensor))


def is_packed_type(kind: type) -> bool:
    """Return whether tensors of a type are packed by torchao."""
    return kind.__module__.startswith(_LIBRARY) and hasattr(kind, "__tensor_flatten__")


def parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that hold a weight: integers first, then scales and zero points; a plain tensor is its own."""
    if not is_packed(tensor):
        yield tensor
        return
    packed: Any = tensor
    for name in packed.__tensor_flatten__()[0]:
        yield from parts(getattr(packed, name))


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds the numbers of a weight, without its scales."""
    return next(parts(tensor))


def rebuilt(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return a packed tensor like another, with every tensor inside changed; a plain one is changed itself."""
    if not is_packed(tensor):
        return change(tensor)
    packed: Any = tensor
    names, attributes = packed.__tensor_flatten__()
    inside = {name: rebuilt(getattr(packed, name), change) for name in names}
    made: torch.Tensor = type(packed).__tensor_unflatten__(inside, attributes, packed.shape, packed.stride())
    return made
