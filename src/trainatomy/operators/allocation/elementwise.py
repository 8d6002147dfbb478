"""Elementwise operators whose kernels allocate scratch, or allocate results in another order than they return them.

Most do neither: type promotion, broadcasting and copies between layouts happen inside the kernel (``gpu_kernel`` casts
as it loads), and inputs are never copied to a common type on CUDA (ATen/TensorIterator.cpp, ``compute_types``).
"""

from __future__ import annotations

import torch

from trainatomy.operators.allocation.arguments import bound, dense_bytes
from trainatomy.operators.allocation.plan import Free, KernelCall, Out, Plan, Scratch


def native_dropout(call: KernelCall) -> Plan:
    """Plan the mask before the result (aten/src/ATen/native/cuda/Dropout.cu, ``dropout_cuda``).

    Evaluation and p = 1 draw no random numbers and keep the order of the results.
    """
    named = bound(call)
    if named["train"] is False or named["p"] == 1:
        return [Out(0), Out(1)]
    return [Out(1), Out(0)]


def isinf(call: KernelCall) -> Plan:
    """Plan |x| as a tensor of its own: |x| = ∞ (aten/src/ATen/native/TensorCompare.cpp)."""
    return [Scratch(dense_bytes(bound(call)["self"]), "absolute value"), Out(0)]


def affine_grid(call: KernelCall) -> Plan:
    """Plan the base grid, and for each of its dimensions the coordinates with their steps.

    Source: aten/src/ATen/native/AffineGridGenerator.cpp (``make_base_grid_4D``, ``linspace_from_neg_one``),
    torch 2.9-2.13.
    """
    sizes = [int(size) for size in call.args[1]][2:]
    itemsize = call.outputs[0].itemsize
    points = call.outputs[0].numel() // len(sizes)
    plan: list[Scratch | Free] = [Scratch(points * (len(sizes) + 1) * itemsize, "base grid")]
    is_aligned = bool(call.args[2])
    for size in reversed(sizes):
        names = ["coordinates"] if is_aligned or size <= 1 else ["coordinates", "product", "quotient"]
        plan += [Scratch(size * itemsize, f"{name} {size} {len(plan)}") for name in names]
        plan += [Free(one.name) for one in plan[-len(names) :] if isinstance(one, Scratch)]
    return (*plan, Out(0))


def roll(call: KernelCall) -> Plan:
    """Plan one tensor per dimension, which are rolled one after the other.

    Source: aten/src/ATen/native/TensorTransformations.h (``roll_common``), torch 2.9-2.13.
    """
    dims = call.args[2] if len(call.args) > 2 else call.kwargs.get("dims", ())
    size = call.outputs[0].untyped_storage().nbytes()
    steps = [Scratch(size, f"rolled {number}") for number in range(len(dims) - 1)]
    return (*steps, Out(0))


def where(call: KernelCall) -> Plan:
    """Plan copies of values that have another type than the result, or that are numbers in host memory.

    Source: aten/src/ATen/native/TensorCompare.cpp (``where_self_out``), torch 2.9-2.13.
    """
    named, result = bound(call), call.outputs[0]
    values = [(name, named[name]) for name in ("self", "other") if isinstance(named[name], torch.Tensor)]
    cast = [(name, each) for name, each in values if each.is_meta and each.dtype != result.dtype]
    moved = [(name, each) for name, each in values if not each.is_meta]
    plan: list[Scratch | Out] = [Scratch(each.numel() * result.itemsize, f"{name} cast") for name, each in cast]
    plan += [Scratch(result.itemsize, f"{name} on the GPU") for name, _ in moved]
    return (*plan, Out(0))
