"""Multi-tensor (``_foreach_*``), fused optimizer and gradient scaler kernels."""

from __future__ import annotations

from trainatomy.world.kernels.arguments import bound, ceil_div, compute_type, tensor_list
from trainatomy.world.kernels.plan import Call, Free, Out, Plan, Scratch

_CHUNK = 65536


def foreach_norm(call: Call) -> Plan:
    """For every tensor as many accumulators (compute type) as the largest has chunks of 65,536 elements; the results.

    bytes = tensors · ⌈largest / 65536⌉ · size of the compute type.
    aten/src/ATen/native/cuda/ForeachReduceOp.cu, ``foreach_tensor_norm_cuda`` (torch 2.9-2.13), ``…_max_cuda``.
    """
    tensors = tensor_list(bound(call)["self"])
    results = [Out(index) for index in range(len(call.outputs))]
    chunks = max((ceil_div(tensor.numel(), _CHUNK) for tensor in tensors), default=0)
    if not chunks:
        return results
    dtype = compute_type(call.outputs[0].dtype)
    return [Scratch(len(tensors) * chunks * dtype.itemsize, "chunk norms"), *results, Free("chunk norms")]
