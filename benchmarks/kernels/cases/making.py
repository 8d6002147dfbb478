"""What cases are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

Case = Callable[[], Any]
Cases = Iterator[tuple[str, Case]]


def leaf(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of random numbers that wants a gradient."""
    return torch.randn(*shape, device="cuda").to(dtype).requires_grad_()


def through(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Case:
    """Forward, a gradient of ones, backward; gradients are dropped afterwards."""

    def run() -> None:
        out = function(*inputs)
        out.backward(torch.ones_like(out))
        for tensor in inputs:
            tensor.grad = None

    return run
