"""Functions that autograd records as one CUDA kernel, where meta tensors take a composite of smaller operators.

``simulator.functions`` calls these in place of the builtins; torch 2.9-2.13.

Operations that are one kernel on a GPU and several operators here, recorded as the one.

A kernel that has no implementation for meta tensors is simulated by a few operators that allocate the same memory.
``one_operation`` around them names the kernel that they stand for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from math import prod as prod_of
from typing import Any, Protocol

import torch

from trainatomy.operators.allocation.normalisation import runs_on_cudnn
from trainatomy.operators.allocation.plan import layout_of


class Writer(Protocol):
    """The recipient of operations: ``simulator.operations.OperationWriter``."""

    def enter(self, name: str) -> int: ...
    def leave(self) -> None: ...
    def write_one(
        self,
        name: str,
        inputs: tuple[torch.Tensor | None, ...],
        outputs: list[torch.Tensor | None],
        numbers: dict[str, Any],
        written: tuple[int, ...],
        event: int,
    ) -> None: ...


_writers: list[Writer] = []


@contextlib.contextmanager
def record_operations_with(writer: Writer) -> Iterator[None]:
    """Send operations to ``writer`` while the context is open."""
    _writers.append(writer)
    try:
        yield
    finally:
        _writers.pop()


@contextlib.contextmanager
def one_operation(
    name: str, *inputs: torch.Tensor | None, written: tuple[int, ...] = (), **numbers: Any
) -> Iterator[list[torch.Tensor | None]]:
    """Record the operators inside as the one operation ``name``.

    Args:
        name: the operator (``aten::_cudnn_rnn``).
        inputs: its tensors.
        written: positions of the inputs that it writes to.
        numbers: its other arguments.

    Yields:
        A list to put its results into.
    """
    results: list[torch.Tensor | None] = []
    if not _writers:
        yield results
        return
    writer = _writers[-1]
    event = writer.enter(name)
    try:
        yield results
    finally:
        writer.leave()
    writer.write_one(name, inputs, results, numbers, written, event)


@contextlib.contextmanager
def no_operation(name: str) -> Iterator[None]:
    """Record none of the operators inside, which launch nothing; what they allocate is named after ``name``."""
    if not _writers:
        yield
        return
    writer = _writers[-1]
    writer.enter(name)
    try:
        yield
    finally:
        writer.leave()


_aten = torch.ops.aten


class _FusedRmsNorm(torch.autograd.Function):
    """``_fused_rms_norm``: the output and one fp32 number per row for backward; strided inputs are copied.

    A gradient that is differentiated itself is composed of smaller operators.
    Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu (``_fused_rms_norm_cuda``,
    ``_fused_rms_norm_backward_cuda``), torch/csrc/autograd/FunctionsManual.cpp
    (``infinitely_differentiable_native_rms_norm_backward``).
    """

    @staticmethod
    def forward(
        ctx: Any, data: torch.Tensor, weight: torch.Tensor | None, dimensions: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = (*data.shape[:-dimensions], *(1 for _ in range(dimensions)))
        with one_operation("aten::_fused_rms_norm", data, weight, dimensions=dimensions) as results:
            out = torch.empty_like(data, memory_format=torch.contiguous_format)
            scale = data.new_empty(rows, dtype=torch.float32)
            results += [out, scale]
        ctx.save_for_backward(data, weight, scale)
        ctx.dimensions = dimensions
        ctx.set_materialize_grads(False)
        return out, scale

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        data, weight, scale = ctx.saved_tensors
        if torch.is_grad_enabled() or gradients[1] is not None:
            return (*_composed_rms_norm_gradients(ctx, data, weight, scale, gradients), None)
        if gradients[0] is None:
            return None, None, None
        with one_operation("aten::_fused_rms_norm_backward", gradients[0], data, scale, weight) as made:
            made += [
                torch.empty_like(tensor, memory_format=torch.contiguous_format) if wanted else None
                for tensor, wanted in zip((data, weight), ctx.needs_input_grad, strict=False)
            ]
        return (*made, None)


def _composed_rms_norm_gradients(
    ctx: Any,
    data: torch.Tensor,
    weight: torch.Tensor | None,
    scale: torch.Tensor,
    gradients: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of the data and of the weight, from those of the output and of the rows' numbers."""
    of_out, of_scale = gradients
    inner = tuple(range(data.dim() - ctx.dimensions, data.dim()))
    count, cubed = prod_of(data.shape[-ctx.dimensions :]), scale.pow(3)
    hat = of_out if of_out is None or weight is None else of_out * weight
    parts = []
    if ctx.needs_input_grad[0] and hat is not None:
        total = (data * hat).sum(inner, keepdim=True)
        parts.append(scale * hat - (data * cubed / count) * total)
    if ctx.needs_input_grad[0] and of_scale is not None:
        parts.append(-(data * cubed / count) * of_scale)
    of_data = parts[0] + parts[1] if len(parts) == 2 else next(iter(parts), None)
    of_weight = None
    if ctx.needs_input_grad[1] and of_out is not None:
        whole = of_out * (data * scale)
        of_weight = whole.sum(tuple(range(inner[0]))) if inner[0] > 0 else whole
    return of_data, of_weight


def rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """Run the fused kernel, unless types differ or the tensor is a channels-last image.

    Source: aten/src/ATen/native/layer_norm.cpp (``rms_norm_symint``).
    """
    images = layout_of(input) is not torch.contiguous_format
    if images or input.is_complex() or (weight is not None and weight.dtype != input.dtype):
        with torch._C.DisableTorchFunction():
            return torch.rms_norm(input, normalized_shape, weight, eps)
    normalised: torch.Tensor = _FusedRmsNorm.apply(input, weight, len(normalized_shape))[0]
    return normalised


class _Product(torch.autograd.Function):
    """``prod`` along a dimension: its gradient divides by the data, in which no element is taken to be exactly 0.

    Tensors without data take the formula for zeros, with a matrix for each row.  Source:
    torch/csrc/autograd/FunctionsManual.cpp (``prod_backward``).
    """

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, dim: int, keepdim: bool) -> torch.Tensor:
        result: torch.Tensor = _aten.prod(data, dim, keepdim)
        ctx.save_for_backward(data, result)
        ctx.dim, ctx.keepdim = dim, keepdim
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (data, result), gradient = ctx.saved_tensors, gradients[0]
        if not ctx.keepdim and data.dim() > 1:
            gradient, result = gradient.unsqueeze(ctx.dim), result.unsqueeze(ctx.dim)
        zeros = data == 0
        counts = zeros.sum(ctx.dim, True)
        counts.sum().item()
        return gradient * (result / data), None, None


def prod(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Multiply along a dimension."""
    dim = args[0] if args else kwargs.get("dim")
    keepdim = args[1] if len(args) > 1 else kwargs.get("keepdim", False)
    known = set(kwargs) <= {"dim", "keepdim"} and isinstance(dim, int) and input.dim() and input.is_floating_point()
    if known and torch.is_grad_enabled() and input.requires_grad:
        product: torch.Tensor = _Product.apply(input, dim, keepdim)
        return product
    with torch._C.DisableTorchFunction():
        return torch.prod(input, *args, **kwargs)


class _RunningProduct(torch.autograd.Function):
    """``cumprod``: its gradient is a sum from behind divided by the data, in which no element is taken to be exactly 0.

    Source: aten/src/ATen/native/ReduceOps.cpp (``cumprod_backward``, ``reversed_cumsum``).
    """

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, dim: int) -> torch.Tensor:
        result: torch.Tensor = _aten.cumprod(data, dim)
        ctx.save_for_backward(data, result)
        ctx.dim = dim
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        data, result = ctx.saved_tensors
        weighted = result * gradients[0]
        zeros = data == 0
        zeros.any().item()
        turned = weighted.flip(ctx.dim)  # C++ keeps each of these until the last one is made
        summed = turned.cumsum(ctx.dim)
        found = summed.flip(ctx.dim)
        del turned, summed
        return found.div(data), None


def cumprod(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Multiply up along a dimension."""
    dim = args[0] if args else kwargs.get("dim")
    known = len(args) + len(kwargs) == 1 and input.dim() > 0 and input.is_floating_point() and input.requires_grad
    if known and isinstance(dim, int) and input.shape[dim] > 1 and torch.is_grad_enabled():
        product: torch.Tensor = _RunningProduct.apply(input, dim)
        return product
    with torch._C.DisableTorchFunction():
        return torch.cumprod(input, *args, **kwargs)


class _WeightedLogits(torch.autograd.Function):
    """``binary_cross_entropy_with_logits`` with weights of positives, whose gradient is computed in place.

    Under a mode PyTorch makes a new tensor in each step.  Source: torch/csrc/autograd/FunctionsManual.cpp
    (``binary_cross_entropy_with_logits_backward``).
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        logits, target, weight, pos_weight, ctx.reduction = arguments
        ctx.save_for_backward(logits, target, weight, pos_weight)
        loss: torch.Tensor = _aten.binary_cross_entropy_with_logits(*arguments)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, target, weight, pos_weight = ctx.saved_tensors
        weighted = pos_weight.mul(target)
        found = weighted.add(1).sub_(target).mul_(logits.sigmoid()).sub_(weighted).mul_(gradients[0])
        if weight is not None:
            found.mul_(weight)
        if ctx.reduction == _MEAN:
            found.div_(logits.numel())
        return found, None, None, None, None


_MEAN = 1


def binary_cross_entropy_with_logits(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    pos_weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
) -> torch.Tensor:
    """Return the loss; targets and weights that train are left to PyTorch."""
    constant = (target, weight, pos_weight)
    if pos_weight is not None and not any(one is not None and one.requires_grad for one in constant):
        loss: torch.Tensor = _WeightedLogits.apply(input, *constant, reduction)
        return loss
    with torch._C.DisableTorchFunction():
        return torch.binary_cross_entropy_with_logits(input, target, weight, pos_weight, reduction)


def batch_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> torch.Tensor:
    """Run batch norm after copying inputs that are in none of cuDNN's layouts; autograd keeps the copies.

    Source: aten/src/ATen/native/Normalization.cpp (``_batch_norm_impl_index``).
    """
    if cudnn_enabled and weight is not None and runs_on_cudnn(input, weight):
        input = input.contiguous(memory_format=layout_of(input))
    with torch._C.DisableTorchFunction():
        return torch.batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled)


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Add the bias of a strided input in place, which PyTorch does not do while a mode is active.

    Source: aten/src/ATen/native/Linear.cpp (``linear``).
    """
    if bias is None or input.dim() < 3 or input.is_contiguous():
        with torch._C.DisableTorchFunction():
            return torch._C._nn.linear(input, weight, bias)
    return torch.matmul(input, weight.t()).add_(bias)


def one_hot(input: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Return zeros with scattered ones; with -1 the number of classes depends on data.

    Source: aten/src/ATen/native/Onehot.cpp.
    """
    if num_classes <= 0:
        with torch._C.DisableTorchFunction():
            return torch._C._nn.one_hot(input, num_classes)
    zeros = torch.zeros((*input.shape, num_classes), dtype=input.dtype, device=input.device)
    return zeros.scatter_(-1, input.unsqueeze(-1), 1)


def softmax(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Convert fp16 to fp32 within the kernel (aten/src/ATen/native/SoftMax.cpp, ``softmax``)."""
    if input.dtype == torch.float16 and dtype == torch.float32:
        widened: torch.Tensor = _aten._softmax(input, dim, True)
        return widened
    with torch._C.DisableTorchFunction():
        return torch.softmax(input, dim, dtype)


def log_softmax(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Convert fp16 to fp32 within the kernel, as ``softmax`` does."""
    if input.dtype == torch.float16 and dtype == torch.float32:
        widened: torch.Tensor = _aten._log_softmax(input, dim, True)
        return widened
    with torch._C.DisableTorchFunction():
        return torch.log_softmax(input, dim, dtype)
