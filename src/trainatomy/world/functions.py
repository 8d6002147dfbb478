"""Functions that take another way on CUDA than on meta tensors, above autograd: dropout, losses, attention, normalisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Function = Callable[..., Any]


def dropout(input: torch.Tensor, p: float = 0.5, train: bool = True) -> torch.Tensor:
    """CUDA runs the fused kernel with a bool mask (``aten/src/ATen/native/Dropout.cpp``, ``is_fused_kernel_acceptable``)."""
    if not train or p == 0 or input.numel() == 0:
        return torch._C._VariableFunctions.dropout(input, p, train)
    if p == 1:
        return input.mul(torch.zeros((), dtype=input.dtype, device=input.device))
    return torch.native_dropout(input, p, train)[0]


def cross_entropy_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """What ``aten/src/ATen/native/LossNLL.cpp`` composes, so that autocast reaches the parts."""
    if label_smoothing > 0.0 or target.shape == input.shape or (weight is not None):
        return torch._C._nn.cross_entropy_loss(input, target, weight, reduction, ignore_index, label_smoothing)
    log_probabilities = torch.log_softmax(input, 1 if input.dim() > 1 else 0)
    return torch._C._nn.nll_loss_nd(log_probabilities, target, weight, reduction, ignore_index)


def composites() -> dict[Any, Function]:
    """By the builtin that Python calls."""
    return {
        torch.dropout: dropout,
        torch._C._nn.cross_entropy_loss: cross_entropy_loss,
    }
