"""Meta kernels that lay out gradients as CUDA's kernels do, where PyTorch's own lay them out as their inputs.

The layout decides whether the next operation copies a gradient, and so what a training holds. torch 2.9-2.13.
"""

from __future__ import annotations

from typing import Any

import torch

from trainatomy.operators.allocation.arguments import layout_of

Gradient = torch.Tensor | None


def layer_norm_backward(
    gradient: torch.Tensor,
    data: torch.Tensor,
    normalized_shape: list[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    output_mask: list[bool],
) -> tuple[Gradient, ...]:
    """Return dense gradients (aten/src/ATen/native/cuda/layer_norm_kernel.cu, ``layer_norm_backward_cuda``)."""
    return tuple(
        _dense(like) if wanted and like is not None else None
        for like, wanted in zip((data, weight, bias), output_mask, strict=True)
    )


def batch_norm_backward(
    gradient: torch.Tensor,
    data: torch.Tensor,
    weight: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    save_mean: torch.Tensor | None,
    save_invstd: torch.Tensor | None,
    train: bool,
    eps: float,
    output_mask: list[bool],
) -> tuple[Gradient, ...]:
    """Return gradients in the layout of the input's images.

    Sources: cudnn/BatchNorm.cpp (``cudnn_batch_norm_backward``); cuda/Normalization.cuh
    (``batch_norm_backward_cuda_template``).
    """
    of_data = torch.empty_like(data, memory_format=layout_of(data)) if output_mask[0] else None
    statistics = data.new_empty(data.shape[1], dtype=torch.float32 if data.element_size() == 2 else data.dtype)
    like = statistics if weight is None else weight
    return (of_data, *(_dense(like) if wanted else None for wanted in output_mask[1:]))


def _dense(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def contiguous(gradient: torch.Tensor, data: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    """Return a dense gradient, whatever the input's layout.

    Sources: Loss.cpp (``mse_loss_backward``, ``smooth_l1_loss_backward``, ``huber_loss_backward``); GatedLinearUnit.cpp
    (``glu_backward_cuda``).
    """
    return _dense(data)


def log_softmax_backward(
    gradient: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> torch.Tensor:
    """Return a dense gradient in the input's type (SoftMax.cpp, ``_log_softmax_backward_data``)."""
    return torch.empty(gradient.shape, dtype=input_dtype, device=gradient.device)


def as_both(gradient: torch.Tensor, data: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    """Return a gradient laid out like the result of gradient and input element by element (Activation.cpp)."""
    return torch.mul(gradient, data)


def elu_backward(
    gradient: torch.Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, data: torch.Tensor
) -> torch.Tensor:
    """Return a gradient laid out as by ``as_both``; its arguments have another order."""
    return torch.mul(gradient, data)
