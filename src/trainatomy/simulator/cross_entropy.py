"""``cross_entropy`` in its parts, so that autocast reaches them: ``log_softmax`` keeps the type, sums are in fp32.

Source: aten/src/ATen/native/LossNLL.cpp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_nn: Any = torch._C._nn  # its stubs declare ``reduction`` as a string, which is an index there
_MEAN, _SUM = 1, 2


def cross_entropy_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the loss of logits against classes or, where the shapes are equal, against probabilities."""
    class_dim = 1 if input.dim() > 1 else 0
    log_probabilities = torch.log_softmax(input, class_dim, input.dtype)
    if input.shape == target.shape:
        return _of_probabilities(log_probabilities, target, weight, reduction, label_smoothing)
    loss: Tensor = _nn.nll_loss_nd(log_probabilities, target, weight, reduction, ignore_index)
    if not label_smoothing:
        return loss
    smooth = _smooth(log_probabilities, target, weight, reduction, ignore_index)
    return (1 - label_smoothing) * loss + smooth * (label_smoothing / input.shape[class_dim])


def _of_probabilities(
    log_probabilities: Tensor, target: Tensor, weight: Tensor | None, reduction: int, label_smoothing: float
) -> Tensor:
    class_dim = 1 if log_probabilities.dim() > 1 else 0
    classes = log_probabilities.shape[class_dim]
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / classes
    products = log_probabilities * target
    if weight is not None:
        products = products * _beside(weight, log_probabilities)
    if reduction == _MEAN:
        return -products.sum() / (log_probabilities.numel() / classes)
    return -products.sum() if reduction == _SUM else -products.sum(class_dim)


def _smooth(
    log_probabilities: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> Tensor:
    """Return the loss against equal probabilities, not yet divided by the number of classes."""
    class_dim = 1 if log_probabilities.dim() > 1 else 0
    weighed = log_probabilities if weight is None else log_probabilities * _beside(weight, log_probabilities)
    smooth = -weighed.sum(class_dim)
    del weighed
    ignored = target == ignore_index
    smooth.masked_fill_(ignored, 0.0)
    if reduction == _MEAN:
        kept = ~ignored
        return smooth.sum() / (kept if weight is None else weight.gather(0, target.masked_select(kept).flatten())).sum()
    return smooth.sum() if reduction == _SUM else smooth


def _beside(weight: Tensor, values: Tensor) -> Tensor:
    """Return the classes' weights with a dimension for each of the values'."""
    return weight.view([1, -1, *[1] * (values.dim() - 2)] if values.dim() > 1 else [-1])
