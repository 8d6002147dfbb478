"""Gradients of distances of pairs (``pdist``, ``cdist``): a buffer with a part for each pair, and its sum.

Source: aten/src/ATen/native/cuda/DistanceKernel.cu (``pdist_backward_kernel_impl``, ``cdist_backward_kernel_impl``),
torch 2.9-2.13.
"""

from __future__ import annotations

import torch

from trainatomy.operators.allocation.arguments import bound
from trainatomy.operators.allocation.iterator import InputGeometry, reduction_iterator
from trainatomy.operators.allocation.plan import KernelCall, Out, Plan, Scratch
from trainatomy.operators.allocation.reduction import reduction_scratch, sum_kernel


def pdist_backward(call: KernelCall) -> Plan:
    """Plan a part of the gradient for each other row."""
    rows, columns = bound(call)["self"].shape
    return _summed(call, [rows - 1, rows, columns], 0)


def cdist_backward(call: KernelCall) -> Plan:
    """Plan a part of the gradient for each row of the other tensor."""
    (rows, columns), others = bound(call)["x1"].shape[-2:], bound(call)["x2"].shape[-2]
    batch = call.outputs[0].numel() // max(1, rows * columns)
    return _summed(call, [batch, others, rows, columns], 1)


def _summed(call: KernelCall, sizes: list[int], dim: int) -> Plan:
    """Plan the gradient, the buffer, and what its sum along ``dim`` takes; nothing is computed for p = 0."""
    result = call.outputs[0]
    if bound(call)["p"] == 0 or 0 in sizes:
        return [Out(0)]
    buffer = torch.empty(sizes, dtype=result.dtype, device="meta")
    layout = InputGeometry(tuple(sizes), buffer.stride(), result.itemsize, 0)
    iterator = reduction_iterator(layout, [position == dim for position in range(len(sizes))], [result.itemsize])
    kernel = sum_kernel(result.dtype)
    return [
        Out(0),
        Scratch(buffer.nbytes, "part of each pair"),
        *reduction_scratch(iterator, kernel, call.processor, result.itemsize),
    ]
