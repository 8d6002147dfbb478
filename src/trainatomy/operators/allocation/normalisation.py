"""Layer, RMS, batch and group norm: contiguous copies, partial sums of weight gradients, per-channel coefficients."""

from __future__ import annotations

import torch

from trainatomy.operators.allocation.plan import (
    Free,
    KernelCall,
    Out,
    Plan,
    Scratch,
    bound,
    ceil_div,
    compute_type,
    contiguous_copies,
    dense_bytes,
    layout_of,
)
from trainatomy.operators.allocation.reduction import InputGeometry, Kernel, reduction_iterator, reduction_scratch

_MANY_ROWS = 64 * 1024
_ROWS_PER_BLOCK = 32
_BLOCKS_AT_MOST = 32 * 1024


def layer_norm(call: KernelCall) -> Plan:
    """Plan copies of inputs that are not contiguous, before the results, for layer norm and RMS norm.

    Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu (``layer_norm_cuda``); the statistics have the compute type
    (fp32).
    """
    named = bound(call)
    copies = contiguous_copies(named["input"], named["weight"], named.get("bias"))
    return [*copies, *(Out(index) for index in range(len(call.outputs)))]


def layer_norm_backward(call: KernelCall) -> Plan:
    """Plan ``native_layer_norm_backward`` and ``_fused_rms_norm_backward``.

    With more than 65,536 rows M and few columns N (⌊N/w⌋ < ⌊multiprocessors/2⌋) the gradients of weight and bias are
    summed over min(⌈M/32⌉, ⌊32768/⌈N/w⌉⌋) parts, then these into new tensors; those allocated before are dropped. A
    block has w columns: as many as a warp has threads.

    Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu (``LaunchGammaBetaBackwardCUDAKernel``).
    """
    named = bound(call)
    input_ = named["input"]
    copies = contiguous_copies(input_, named["weight"], named.get("bias"))
    gradient = contiguous_copies(named["grad_out"], name="gradient")
    columns = 1
    for size in named["normalized_shape"]:
        columns *= size
    rows = input_.numel() // max(columns, 1)
    first = 1 if named["output_mask"][0] else 0
    weights = range(first, len(call.outputs))
    wide = call.processor.warp_size
    blocks_wide = columns // wide
    if rows <= _MANY_ROWS or blocks_wide >= call.processor.multiprocessors // 2 or not weights:
        return [*copies, *(Out(index) for index in range(len(call.outputs))), *gradient]
    parts = min(ceil_div(rows, _ROWS_PER_BLOCK), _BLOCKS_AT_MOST // ceil_div(columns, wide))
    inputs = [Out(index) for index in range(first)]
    return [*copies, *inputs, *_dropped(call, weights), *gradient, *_summed(call, weights, parts)]


def _dropped(call: KernelCall, weights: range) -> list[Scratch]:
    return [Scratch(dense_bytes(call.outputs[index]), f"dropped {index}") for index in weights]


def _summed(call: KernelCall, weights: range, parts: int) -> list[Out | Scratch | Free]:
    """Plan partial sums [parts, N] of every weight gradient, then the sum of each over the parts."""
    plan: list[Out | Scratch | Free] = []
    plan += [Scratch(parts * dense_bytes(call.outputs[index]), f"partial sums {index}") for index in weights]
    for index in weights:
        result = call.outputs[index]
        size = result.dtype.itemsize
        shape = (parts, result.numel())
        iterator = reduction_iterator(InputGeometry(shape, (result.numel(), 1), size), (True, False), (size,))
        kernel = Kernel(compute_type(result.dtype).itemsize, size, 8 if size == 2 else 4)
        plan += [Out(index), *reduction_scratch(iterator, kernel, call.processor, size), Free(f"dropped {index}")]
    return plan


def group_norm(call: KernelCall) -> Plan:
    """Plan scale and shift [N, C] in the compute type, if there are weights and more than one pixel.

    Source: aten/src/ATen/native/cuda/group_norm_kernel.cu (``GroupNormKernelImplInternal``).
    """
    named = bound(call)
    results = [Out(index) for index in range(len(call.outputs))]
    weighted = named["weight"] is not None or named["bias"] is not None
    if named["HxW"] == 1 or not weighted:
        return results
    channels = named["N"] * named["C"] * compute_type(named["input"].dtype).itemsize
    return [*results, Scratch(channels, "scale"), Scratch(channels, "shift")]


def group_norm_backward(call: KernelCall) -> Plan:
    """Plan sums ds, db [N, C]; for the input c2, c3 [N, G] and, with a weight, c1 [N, C].

    All in the compute type; a single pixel needs c2 and c3 alone. The c1 that newer versions save for channels-last is
    kept.

    Source: aten/src/ATen/native/cuda/group_norm_kernel.cu (``GroupNormBackwardKernelImplInternal``).
    """
    named = bound(call)
    size = compute_type(named["input"].dtype).itemsize
    channels, groups = named["N"] * named["C"] * size, named["N"] * named["group"] * size
    plan: list[Out | Scratch | Free] = [Out(index) for index in range(len(call.outputs))]
    if named["HxW"] > 1:
        plan += [Scratch(channels, "ds"), Scratch(channels, "db")]
    if named["output_mask"][0]:
        plan += [Scratch(groups, "c2"), Scratch(groups, "c3")]
        if named["HxW"] > 1 and named["weight"] is not None:
            plan.append(Scratch(channels, "c1"))
        plan += [Free("c3"), Free("c2")]
    return plan


def batch_norm(call: KernelCall) -> Plan:
    """Plan the results of batch norm and, in cuDNN's backward, a copy of a gradient in another layout.

    Sources: ATen/native/cuda/Normalization.cu (``batch_norm_cuda``, ``batch_norm_backward_cuda``) for contiguous
    images; ATen/native/cudnn/BatchNorm.cpp (``cudnn_batch_norm_backward``). Left out: the staging buffers of
    channels-last statistics, and cuDNN's workspace and reserve, which are empty in its spatial mode (NCHW) but not in
    the persistent one (channels last). In inference no statistics are saved: the tensors returned in their place are
    empty (``cudnn_batch_norm``).
    """
    if call.func._schema.name == "aten::native_batch_norm" and not call.args[5]:
        return [Out(0), *(Out(number, 0) for number in range(1, len(call.outputs)))]
    return [*_gradient_copies(call), *(Out(index) for index in range(len(call.outputs)))]


def _gradient_copies(call: KernelCall) -> list[Scratch]:
    named = bound(call)
    gradient, data, weight = named.get("grad_out"), named["input"], named.get("weight")
    if gradient is None or weight is None or not runs_on_cudnn(data, weight):
        return []
    lies_alike = gradient.is_contiguous(memory_format=layout_of(data))
    return [] if lies_alike else [Scratch(dense_bytes(gradient), "gradient")]


def runs_on_cudnn(data: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether cuDNN runs the batch norm of ``data`` [N, C, …].

    It takes images, no bfloat16, and half precision only with weights in fp32 (ATen/native/Normalization.cpp,
    ``_select_batch_norm_backend``).
    """
    types = (data.dtype, weight.dtype)
    narrow = data.dtype == torch.float16 and weight.dtype != torch.float32
    return data.dim() >= 3 and torch.bfloat16 not in types and not narrow
