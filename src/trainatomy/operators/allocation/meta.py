"""Meta kernels for operators that have none in PyTorch, or one that lays out its results as the CPU kernel does.

``meta_kernels`` registers them with PyTorch's dispatcher for as long as it is open and then restores the dispatcher, so
that a simulation changes nothing for the user's own meta tensors.

Meta kernels that lay out gradients as CUDA's kernels do, where PyTorch's own lay them out as their inputs.

The layout decides whether the next operation copies a gradient, and so what a training holds. torch 2.9-2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch._meta_registrations import calc_conv_nd_return_shape

from trainatomy.operators.allocation import resolve
from trainatomy.operators.allocation.convolution import memory_format
from trainatomy.operators.allocation.plan import layout_of
from trainatomy.operators.table import OPERATORS

Kernel = Callable[..., Any]

_only_if_missing: set[Kernel] = set()


def only_if_missing(kernel: Kernel) -> Kernel:
    """Mark a kernel that must not replace one that a newer PyTorch may bring."""
    _only_if_missing.add(kernel)
    return kernel


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
            if _is_composite(name):  # CUDA has one kernel; ``Library.impl`` wants composites to be divided everywhere
                assert library.m is not None  # only a library that was destroyed has none
                library.m.impl(name, "Meta", kernel, False)
            else:
                library.impl(name, kernel, "Meta", allow_override=True)
        yield
    finally:
        library._op_impls.difference_update(already_registered)  # else PyTorch drops its own registrations
        library._destroy()


@cache
def _kernels() -> dict[str, Kernel]:
    """Return the kernels to register, by operator and overload (``_fused_sgd_.tensor_lr``)."""
    found: dict[str, Kernel] = {}
    for operator in OPERATORS.values():
        if operator.meta:
            kernel = resolve(operator.meta)
            missing = kernel in _only_if_missing
            found |= {name: kernel for name in _overloads(operator.name) if not missing or not _has_meta(name)}
    return found


def _overloads(name: str) -> list[str]:
    """Return an aten operator's overloads that return new tensors or write in place, not those with an ``out``."""
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    return [
        f"{name}.{schema.overload_name}" if schema.overload_name else name
        for schema in schemas
        if not any(argument.is_out for argument in schema.arguments)
    ]


def _is_composite(name: str) -> bool:
    """Return whether PyTorch divides an operator where a device has no kernel of its own."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CompositeImplicitAutograd")


def _has_meta(name: str) -> bool:
    """Return whether PyTorch has a Meta kernel of its own."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta")


@only_if_missing
def in_place(*args: Any, **kwargs: Any) -> None:
    """Write into the arguments and allocate nothing (aten/src/ATen/native/cuda/FusedSgdKernel.cu)."""


@only_if_missing
def fake_quantize(data: torch.Tensor, *rest: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rounded tensor and the mask of unclipped elements.

    Source: aten/src/ATen/native/quantized/FakeQuantPer*Affine.cpp.
    """
    kept = torch.preserve_format
    return torch.empty_like(data, memory_format=kept), torch.empty_like(data, dtype=torch.bool, memory_format=kept)


@only_if_missing
def random_like(data: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    """Return random numbers of the shape of their parameters, or their derivatives.

    Source: aten/src/ATen/native/cuda/Distributions.cpp.
    """
    return torch.empty_like(data)


@only_if_missing
def geqrf(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors by columns, and a number for each of them (aten/src/ATen/native/BatchLinearAlgebra.cpp)."""
    rows, columns = matrix.shape[-2:]
    return torch.empty_like(matrix.mT).mT, matrix.new_empty((*matrix.shape[:-2], min(rows, columns)))


@only_if_missing
def contiguous_gradient(gradient: torch.Tensor, data: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    """Return the gradient of ``data``, contiguous.

    Sources: aten/src/ATen/native/cuda/{LossCTC,MultiMarginLoss,MultiLabelMarginCriterion}.cu.
    """
    return torch.empty_like(data, memory_format=torch.contiguous_format)


def efficient_attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    *rest: Any,
    **named: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the gradients of query, key, value and bias, whose rows are padded to a multiple of 16.

    That of PyTorch before 2.14 takes keys to have as many heads as queries.
    Source: torch/_meta_registrations.py (``meta__scaled_dot_product_efficient_backward``, 2.14).
    """
    mask = rest[5] if len(rest) > 5 else named["grad_input_mask"]
    gradients = [
        torch.empty_like(t.transpose(1, 2), memory_format=torch.contiguous_format) for t in (query, key, value)
    ]
    of_bias = None
    if bias is not None and mask[3]:
        padded = bias.shape[-1] + -bias.shape[-1] % 16
        of_bias = bias.new_empty((*bias.shape[:-1], padded))[..., : bias.shape[-1]]
    return *(each.transpose(1, 2) for each in gradients), of_bias  # type: ignore[return-value]


def convolution(
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


def convolution_backward(
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
