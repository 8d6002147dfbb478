"""Operators that a compiler cannot trace as CUDA runs them."""

from __future__ import annotations

from typing import Any

import torch

_aten: Any = torch.ops.aten
_nn: Any = torch._C._nn


def nll_loss_nd(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Run the operators that ``nll_loss_nd`` consists of: with Python's dispatcher, autograd does not know it.

    Source: aten/src/ATen/native/LossNLL.cpp (``nll_loss_nd_symint``).
    """
    if input.dim() in (1, 2):
        flat: torch.Tensor = _aten.nll_loss_forward(input, target, weight, reduction, ignore_index)[0]
        return flat
    if input.dim() == 4:
        planes: torch.Tensor = _aten.nll_loss2d_forward(input, target, weight, reduction, ignore_index)[0]
        return planes
    batch, classes, shape = input.shape[0], input.shape[1], input.shape[2:]
    logits, classes_wanted = input.reshape(batch, classes, 1, -1), target.reshape(batch, 1, -1)
    loss: torch.Tensor = _aten.nll_loss2d_forward(logits, classes_wanted, weight, reduction, ignore_index)[0]
    return loss if reduction else loss.view(batch, *shape)


FUNCTIONS = {_nn.nll_loss_nd: nll_loss_nd}
