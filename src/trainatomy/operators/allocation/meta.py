"""Kernels without data for operators to which PyTorch gives none, or one that lays results out as the CPU does."""

from __future__ import annotations

from typing import Any

import torch
from torch import library as operators
from torch._meta_registrations import calc_conv_nd_return_shape

from trainatomy.operators.allocation import ctc, gradients
from trainatomy.operators.allocation.convolution import memory_format

_IN_PLACE = ("_fused_sgd_", "_fused_sgd_.tensor_lr", "_fused_adagrad_", "_fused_adagrad_.tensor_lr")

_FAKE_QUANTIZE = (
    "fake_quantize_per_tensor_affine_cachemask",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    "fake_quantize_per_channel_affine_cachemask",
)
_MARGINS = ("multi_margin_loss_backward", "multilabel_margin_loss_backward")


def register() -> operators.Library:
    """Kernels that last as long as the library that is returned."""
    library = operators.Library("aten", "IMPL")
    for name in _IN_PLACE:
        if _lacks_meta(name):
            library.impl(name, _in_place, "Meta")
    for name in _FAKE_QUANTIZE:
        if _lacks_meta(name):
            library.impl(name, _fake_quantize, "Meta")
    for name in _MARGINS:
        if _lacks_meta(name):
            library.impl(name, _margin_backward, "Meta")
    if _lacks_meta("_ctc_loss_backward"):
        library.impl("_ctc_loss_backward", ctc.meta_backward, "Meta")
    for name, kernel in gradients.KERNELS.items():
        library.impl(name, kernel, "Meta", allow_override=True)
    library.impl("convolution", _convolution, "Meta", allow_override=True)
    library.impl("convolution_backward", _convolution_backward, "Meta", allow_override=True)
    return library


def _lacks_meta(name: str) -> bool:
    known = torch._C._dispatch_has_kernel(f"aten::{name}")
    return known and not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta")


def _in_place(*args: Any, **kwargs: Any) -> None:
    """Writes into its arguments and takes nothing (aten/src/ATen/native/cuda/FusedSgdKernel.cu)."""


def _fake_quantize(data: torch.Tensor, *rest: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The rounded tensor and where it was not clipped (aten/src/ATen/native/quantized/FakeQuantPer*Affine.cpp)."""
    kept = torch.preserve_format
    return torch.empty_like(data, memory_format=kept), torch.empty_like(data, dtype=torch.bool, memory_format=kept)


def _margin_backward(gradient: torch.Tensor, data: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    """The gradient of ``data`` (aten/src/ATen/native/cuda/{MultiMarginLoss,MultiLabelMarginCriterion}.cu)."""
    return torch.empty_like(data, memory_format=torch.contiguous_format)


def _convolution(
    data: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> torch.Tensor:
    """[N, K, ...] in cuDNN's memory format (aten/src/ATen/native/cudnn/ConvShared.cpp, ``cudnn_convolution``)."""
    extra = output_padding if transposed else None
    shape = calc_conv_nd_return_shape(data, weight, stride, padding, dilation, transposed, groups, extra)
    return torch.empty(shape, dtype=data.dtype, device="meta", memory_format=memory_format(data, weight))


def _convolution_backward(
    gradient: torch.Tensor,
    data: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    output_mask: list[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of data and weight in cuDNN's memory format, of the bias [K]."""
    layout = memory_format(data, weight)
    made: list[torch.Tensor | None] = [
        torch.empty(like.shape, dtype=like.dtype, device="meta", memory_format=layout) if wanted else None
        for like, wanted in zip((data, weight), output_mask, strict=False)
    ]
    channels = gradient.shape[1]
    return (*made, gradient.new_empty(channels) if output_mask[2] else None)
