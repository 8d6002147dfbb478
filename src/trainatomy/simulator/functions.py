"""Functions that take another way on CUDA than on meta tensors, above autograd: dropout, losses, attention,
normalisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainatomy.operators.allocation import above_autograd, recurrent
from trainatomy.operators.allocation.grouped import grouped_mm
from trainatomy.operators.allocation.plan import Processor
from trainatomy.operators.allocation.sdpa import sdpa
from trainatomy.operators.allocation.sdpa_choice import SdpFlags
from trainatomy.simulator.eras import functions_of

Function = Callable[..., Any]
_nn: Any = torch._C._nn  # its stubs take a reduction for a string, which is an index there


def dropout(input: torch.Tensor, p: float = 0.5, train: bool = True) -> torch.Tensor:
    """CUDA runs the fused kernel with a bool mask (``aten/src/ATen/native/Dropout.cpp``,
    ``is_fused_kernel_acceptable``)."""
    if not train or p == 0 or p == 1 or input.numel() == 0:
        with torch._C.DisableTorchFunction():
            return torch.dropout(input, p, train)
    return torch.native_dropout(input, p, train)[0]


def cross_entropy_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """What ``aten/src/ATen/native/LossNLL.cpp`` composes, so that autocast reaches the parts: log_softmax in the
    logits' type, the loss in fp32."""
    if label_smoothing > 0.0 or target.shape == input.shape or (weight is not None):
        with torch._C.DisableTorchFunction():
            return _nn.cross_entropy_loss(input, target, weight, reduction, ignore_index, label_smoothing)
    log_probabilities = torch.log_softmax(input, 1 if input.dim() > 1 else 0, input.dtype)
    return _nn.nll_loss_nd(log_probabilities, target, weight, reduction, ignore_index)


def composites(processor: Processor) -> dict[Any, Function]:
    """By the builtin that Python calls."""

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        return sdpa(*args, **kwargs, processor=processor, flags=SdpFlags.current())

    return {
        torch.dropout: dropout,
        _nn.cross_entropy_loss: cross_entropy_loss,
        _nn.scaled_dot_product_attention: attention,
        torch._grouped_mm: grouped_mm,
        torch.rms_norm: above_autograd.rms_norm,
        torch.batch_norm: above_autograd.batch_norm,
        _nn.linear: above_autograd.linear,
        _nn.one_hot: above_autograd.one_hot,
        **dict.fromkeys((torch.softmax, torch.Tensor.softmax), above_autograd.softmax),
        **dict.fromkeys((torch.log_softmax, torch.Tensor.log_softmax), above_autograd.log_softmax),
        **recurrent.RecurrentLayers(processor.multiprocessors).functions(),
        **functions_of(processor.torch_version),
    }
