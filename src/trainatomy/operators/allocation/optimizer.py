"""Multi-tensor (``_foreach_*``), fused optimizer and gradient scaler kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainatomy.operators.allocation.arguments import bound, ceil_div, compute_type, tensor_list
from trainatomy.operators.allocation.iterator import InputGeometry, reduction_iterator
from trainatomy.operators.allocation.plan import Free, KernelCall, Out, Plan, Scratch
from trainatomy.operators.allocation.reduction import Kernel, reduction_scratch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_CHUNK = 65536
_FAST_ORDERS = (1.0, 2.0, float("inf"))


def foreach_norm(call: KernelCall) -> Plan:
    """Plan accumulators for every tensor, as many as the largest has chunks of 65,536 elements; the results.

    bytes = tensors · ⌈largest / 65536⌉ · size of the compute type. Without the fast route the tensors are reduced one
    by one.

    Source: aten/src/ATen/native/cuda/ForeachReduceOp.cu (``foreach_tensor_norm_cuda``), torch 2.9-2.13.
    """
    named = bound(call)
    tensors = tensor_list(named["self"])
    if not _fast(tensors, float(named.get("ord", 2))):
        return _one_by_one(call, tensors)
    return _chunked(call, tensors, compute_type(call.outputs[0].dtype).itemsize)


def foreach_max(call: KernelCall) -> Plan:
    """Plan accumulators of the tensors' type (``foreach_tensor_max_cuda``), else as ``foreach_norm``."""
    tensors = tensor_list(bound(call)["self"])
    return _chunked(call, tensors, call.outputs[0].dtype.itemsize)


def _chunked(call: KernelCall, tensors: Sequence[torch.Tensor], accumulator_bytes: int) -> Plan:
    results = [Out(index) for index in range(len(call.outputs))]
    chunks = max((ceil_div(tensor.numel(), _CHUNK) for tensor in tensors), default=0)
    if not chunks:
        return results
    return [Scratch(len(tensors) * chunks * accumulator_bytes, "chunks"), *results, Free("chunks")]


def _fast(tensors: Sequence[torch.Tensor], order: float) -> bool:
    """Return ``can_use_fast_route`` (ForeachUtils.h): one floating type, dense tensors, a supported order."""
    return order in _FAST_ORDERS and all(
        tensor.dtype == tensors[0].dtype and tensor.is_floating_point() and _is_dense(tensor) for tensor in tensors
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill their memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _one_by_one(call: KernelCall, tensors: Sequence[torch.Tensor]) -> Plan:
    """Plan one reduction to a single number after another."""
    plan: list[Out | Scratch | Free] = []
    for index, (tensor, result) in enumerate(zip(tensors, call.outputs, strict=True)):
        size = tensor.dtype.itemsize
        layout = InputGeometry(tuple(tensor.shape), tuple(tensor.stride()), size, int(tensor.storage_offset()))
        iterator = reduction_iterator(layout, [True] * tensor.dim(), (result.dtype.itemsize,))
        kernel = Kernel(compute_type(tensor.dtype).itemsize, size)
        plan += [Out(index), *reduction_scratch(iterator, kernel, call.processor, result.dtype.itemsize)]
    return plan
