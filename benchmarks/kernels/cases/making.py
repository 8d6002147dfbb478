"""Building blocks of cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

Case = Callable[[], Any]
Cases = Iterator[tuple[str, Case]]


def leaf(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a random tensor that requires a gradient."""
    return torch.randn(*shape, device="cuda").to(dtype).requires_grad_()


def through(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Case:
    """Run forward, then backward with a gradient of ones; gradients are dropped afterwards."""

    def run() -> None:
        out = function(*inputs)
        out.backward(torch.ones_like(out))
        for tensor in inputs:
            tensor.grad = None

    return run
