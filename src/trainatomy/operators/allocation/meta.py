"""Meta kernels for operators that have none in PyTorch, or one that lays out its results as the CPU kernel does.

``meta_kernels`` registers them with PyTorch's dispatcher for as long as it is open and then restores the dispatcher, so
that a simulation changes nothing for the user's own meta tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
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


@contextlib.contextmanager
def meta_kernels() -> Iterator[None]:
    """Register the meta kernels of this package while the context is open.

    The dispatcher belongs to the process: nested contexts are harmless, but threads that use meta tensors meanwhile see
    these kernels too.
    """
    library = torch.library.Library("aten", "IMPL")
    already_registered = frozenset(torch.library._impls)
    try:
        for name, kernel in _kernels().items():
            library.impl(name, kernel, "Meta", allow_override=True)
        yield
    finally:
        library._op_impls.difference_update(already_registered)  # else PyTorch forgets its own registrations
        library._destroy()


def _kernels() -> dict[str, Callable[..., Any]]:
    """Return the kernels to register, by operator: the missing ones, and those that replace PyTorch's."""
    missing: dict[str, Callable[..., Any]] = {
        **dict.fromkeys(_IN_PLACE, _in_place),
        **dict.fromkeys(_FAKE_QUANTIZE, _fake_quantize),
        **dict.fromkeys(_MARGINS, _margin_backward),
        "_ctc_loss_backward": ctc.meta_backward,
    }
    return {
        **{name: kernel for name, kernel in missing.items() if _lacks_meta(name)},
        **gradients.KERNELS,
        "convolution": _convolution,
        "convolution_backward": _convolution_backward,
    }


def _lacks_meta(name: str) -> bool:
    """Return whether PyTorch knows the operator but has no Meta kernel for it."""
    known = torch._C._dispatch_has_kernel(f"aten::{name}")
    return known and not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta")


def _in_place(*args: Any, **kwargs: Any) -> None:
    """Write into the arguments and allocate nothing (aten/src/ATen/native/cuda/FusedSgdKernel.cu)."""


def _fake_quantize(data: torch.Tensor, *rest: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rounded tensor and the mask of unclipped elements.

    Source: aten/src/ATen/native/quantized/FakeQuantPer*Affine.cpp.
    """
    kept = torch.preserve_format
    return torch.empty_like(data, memory_format=kept), torch.empty_like(data, dtype=torch.bool, memory_format=kept)


def _margin_backward(gradient: torch.Tensor, data: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    """Return the gradient of ``data``, contiguous.

    Source: aten/src/ATen/native/cuda/{MultiMarginLoss,MultiLabelMarginCriterion}.cu.
    """
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
    """Return [N, K, ...] in cuDNN's memory format.

    Source: aten/src/ATen/native/cudnn/ConvShared.cpp (``cudnn_convolution``).
    """
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
    """Return the gradients of data and weight in cuDNN's memory format, and that of the bias [K]."""
    layout = memory_format(data, weight)
    made: list[torch.Tensor | None] = [
        torch.empty(like.shape, dtype=like.dtype, device="meta", memory_format=layout) if wanted else None
        for like, wanted in zip((data, weight), output_mask, strict=False)
    ]
    channels = gradient.shape[1]
    return (*made, gradient.new_empty(channels) if output_mask[2] else None)
