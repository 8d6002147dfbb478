"""Elementwise operators whose kernels take scratch, or take their results in another order than they return them.

Most take none: type promotion, broadcasting and copies between layouts happen inside the kernel (``gpu_kernel`` casts
as it loads), and inputs are never copied to a common type on CUDA (ATen/TensorIterator.cpp, ``compute_types``).
"""

from __future__ import annotations

from trainatomy.operators.allocation.arguments import bound, dense_bytes
from trainatomy.operators.allocation.plan import KernelCall, Out, Plan, Scratch


def native_dropout(call: KernelCall) -> Plan:
    """The mask is allocated before the result (aten/src/ATen/native/cuda/Dropout.cu, ``dropout_cuda``).

    Not so where nothing is random: evaluation and p = 1.
    """
    named = bound(call)
    if named["train"] is False or named["p"] == 1:
        return [Out(0), Out(1)]
    return [Out(1), Out(0)]


def isinf(call: KernelCall) -> Plan:
    """|x| = ∞, with |x| as a tensor of its own (aten/src/ATen/native/TensorCompare.cpp)."""
    return [Scratch(dense_bytes(bound(call)["self"]), "absolute value"), Out(0)]


def roll(call: KernelCall) -> Plan:
    """Along several dimensions one after the other, each into a tensor of its own.

    Source: aten/src/ATen/native/TensorTransformations.h (``roll_common``), torch 2.9-2.13.
    """
    dims = call.args[2] if len(call.args) > 2 else call.kwargs.get("dims", ())
    size = call.outputs[0].untyped_storage().nbytes()
    steps = [Scratch(size, f"rolled {number}") for number in range(len(dims) - 1)]
    return (*steps, Out(0))
