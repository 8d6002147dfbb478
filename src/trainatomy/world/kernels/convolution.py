"""Convolutions through cuDNN: copies into its memory format, gradients, workspaces.

Sources: aten/src/ATen/native/Convolution.cpp (``_convolution``, ``convolution_backward``), ConvUtils.h
(``cudnn_conv_suggest_memory_format``), cudnn/ConvShared.cpp and cudnn/Conv_v8.cpp, torch 2.9-2.13, ``cudnn.benchmark``
off.

Which engine cuDNN's heuristics choose is not documented, and each has a workspace of its own.  Assumed here: on cards
with tensor cores for the type, engines work on channels-last data, so that contiguous (NCHW) tensors are transformed in
the workspace: input, weight and output once each; channels-last tensors and all else need no workspace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainatomy.world.kernels.operands import bound, dense_bytes, is_half
from trainatomy.world.kernels.plan import Call, Free, Out, Plan, Scratch
from trainatomy.world.kernels.table_a import RULES_A

if TYPE_CHECKING:
    from trainatomy.world.kernels.plan import Processor

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def convolution(call: Call) -> Plan:
    """Copies of input and weight that are not in cuDNN's memory format, the output, the workspace.  A bias is added in
    place."""
    named = bound(call)
    tensors = [named["input"], named["weight"]]
    wanted = memory_format(*tensors)
    copies = [Scratch(dense_bytes(t), "contiguous") for t in tensors if not t.is_contiguous(memory_format=wanted)]
    return [*copies, Out(0), *_workspace([*tensors, call.outputs[0]], wanted, named, call.processor)]


def convolution_backward(call: Call) -> Plan:
    """Copies into cuDNN's memory format, then each gradient with a workspace of its own; that of the bias is a sum."""
    named = bound(call)
    data, weight, grad = named["input"], named["weight"], named["grad_output"]
    wanted = memory_format(data, weight)
    strided = [tensor for tensor in (data, weight, grad) if not tensor.is_contiguous(memory_format=wanted)]
    plan: list[Out | Scratch | Free] = [Scratch(dense_bytes(tensor), "contiguous") for tensor in strided]
    of_input, of_weight, of_bias = named["output_mask"]
    index = 0
    for wants in (of_input, of_weight):
        if wants:
            workspace = _workspace([data, weight, grad], wanted, named, call.processor)
            plan += [Out(index), *workspace, *(Free(item.name) for item in workspace)]
            index += 1
    if of_bias:
        plan += _bias_gradient(grad, call, index)
    return plan


def memory_format(data: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """cuDNN computes channels-last where input or weight are, but for doubles
    (``cudnn_conv_suggest_memory_format``)."""
    last = _CHANNELS_LAST.get(weight.dim())
    if last is None or data.dtype == torch.float64:
        return torch.contiguous_format
    return last if any(_suggests(tensor, last) for tensor in (data, weight)) else torch.contiguous_format


def _suggests(tensor: torch.Tensor, last: torch.memory_format) -> bool:
    """Strides are channels-last and not contiguous too (``suggest_memory_format``)."""
    return tensor.is_contiguous(memory_format=last) and not tensor.is_contiguous()


def _workspace(
    tensors: list[torch.Tensor], wanted: torch.memory_format, named: dict[str, Any], processor: Processor
) -> list[Scratch]:
    """The transformed copies of ``tensors`` that the engine is assumed to need; none for depthwise convolutions."""
    depthwise = named["groups"] > 1 and named["groups"] == named["input"].shape[1]
    if wanted is not torch.contiguous_format or depthwise or not _has_tensor_cores(tensors[0], processor):
        return []
    return [Scratch(sum(dense_bytes(tensor) for tensor in tensors), "cudnn_workspace")]


def _has_tensor_cores(tensor: torch.Tensor, processor: Processor) -> bool:
    """16-bit types from Volta on (bfloat16 from Ampere); fp32 from Ampere on, as cuDNN may use TF32 unless told
    otherwise."""
    if tensor.dtype == torch.float16:
        return processor.capability >= (7, 0)
    return processor.capability >= (8, 0) and (
        is_half(tensor) or (tensor.dtype == torch.float32 and torch.backends.cudnn.allow_tf32)
    )


def _bias_gradient(grad: torch.Tensor, call: Call, index: int) -> list[Out | Scratch | Free]:
    """``grad_output.sum`` over all dimensions but the channels', and what that reduction takes."""
    dimensions = [dimension for dimension in range(grad.dim()) if dimension != 1]
    func = torch.ops.aten.sum.dim_IntList
    total = Call(func, (grad, dimensions), {}, (call.outputs[index],), call.processor)
    plan = RULES_A["aten::sum"](total)
    return [Out(index, item.bytes) if isinstance(item, Out) else item for item in plan]
