"""Convolutions through cuDNN: copies into its memory format, gradients, workspaces.

Sources: aten/src/ATen/native/Convolution.cpp (``_convolution``, ``convolution_backward``), ConvUtils.h
(``cudnn_conv_suggest_memory_format``), cudnn/ConvShared.cpp and cudnn/Conv_v8.cpp, torch 2.9-2.13. With
``cudnn.benchmark`` the first call tries all plans (``generate_and_filter_plans``).

The sizes of cuDNN's own workspaces are what its library answers where it is installed (``Processor.cudnn``), else those
of the trees in ``cudnn``. Depthwise convolutions of contiguous images run ATen's kernel
(native/cuda/DepthwiseConv2d.cu), which allocates nothing; those of channels-last images, and some in fp16, run in
cuDNN.

A convolution does not fail for lack of a workspace: PyTorch catches the error and tries the next of the plans that
cuDNN's heuristics offer, then those of its fallback list (``try_configs``; see ``trainatomy.allocator.replay``). It
keeps the first that runs for all calls of the same thread with equal operation, shapes, type, layout, strides, padding,
dilation and groups. The workspaces of the next plans are not documented. Assumed: the next one needs no workspace, as
implicit products exist for all three operations. This is the optimistic bound: a training that is predicted to run out
of memory will, and one that is predicted to fit thanks to this rule may still fail or need more retries.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from trainatomy.catalog.gpus import has_recorded_engines
from trainatomy.catalog.versions import behaviour
from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind
from trainatomy.operators.allocation.cudnn.copies import is_cudnn_depthwise
from trainatomy.operators.allocation.cudnn.learned import workspace
from trainatomy.operators.allocation.cudnn.missing import is_unanswered, missing_engine, missing_workspace
from trainatomy.operators.allocation.cudnn.unnamed import missing_parts, unnamed_workspaces
from trainatomy.operators.allocation.plan import (
    HALF_TYPES,
    Free,
    KernelCall,
    Out,
    Plan,
    Processor,
    Scratch,
    Trial,
    bound,
    dense_bytes,
    layout_of,
)
from trainatomy.operators.allocation.reduction import SUM

if TYPE_CHECKING:
    from trainatomy.operators.allocation.cudnn.heuristics import EnginePlan

PLANS_TIMED, _ALL_PLANS = 10, 10_000
"""Plans that ``cudnn.benchmark`` times by default, and with a limit of 0 (``torch.backends.cudnn.benchmark_limit``)."""
_HOPPER = (9, 0)
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def convolution(call: KernelCall) -> Plan:
    """Plan copies of input and weight into cuDNN's memory format, the output, the workspace.

    A bias is added in place.
    """
    named = bound(call)
    tensors = [named["input"], named["weight"]]
    wanted = memory_format(*tensors)
    copies = [Scratch(dense_bytes(t), "contiguous") for t in tensors if not t.is_contiguous(memory_format=wanted)]
    return [*copies, Out(0), *_workspace("forward", call.outputs[0], wanted, named, call.processor)]


def convolution_backward(call: KernelCall) -> Plan:
    """Plan copies into cuDNN's memory format, then each gradient with a workspace; the bias gradient is a sum."""
    named = bound(call)
    data, weight, grad = named["input"], named["weight"], named["grad_output"]
    wanted = memory_format(data, weight)
    strided = [tensor for tensor in (data, weight, grad) if not tensor.is_contiguous(memory_format=wanted)]
    plan: list[Out | Scratch | Free | Trial] = [Scratch(dense_bytes(tensor), "contiguous") for tensor in strided]
    plan += _gradients(grad, wanted, named, call)
    if named["output_mask"][2]:
        plan += _bias_gradient(grad, call, sum(named["output_mask"][:2]))
    return plan


def _depthwise_gradients(named: dict[str, Any]) -> list[Out | Scratch | Free]:
    """Plan the gradient of the weight first: that of the input gets its size later, from the kernel."""
    of_input, of_weight, _ = named["output_mask"]
    return [Out(1), Out(0)] if of_input and of_weight else [Out(0)] if of_input or of_weight else []


def _gradients(
    grad: torch.Tensor, wanted: torch.memory_format, named: dict[str, Any], call: KernelCall
) -> Sequence[Out | Scratch | Free | Trial]:
    """Plan the gradient of the input, then of the weight, each with a workspace of its own."""
    if _is_depthwise(named) and not call.processor.is_amd:
        one = _cudnn_convolution(named["input"], named["weight"], grad, False, named, call.processor)
        if _runs_in_aten(one, wanted, named):
            return _depthwise_gradients(named)
    plan: list[Out | Scratch | Free | Trial] = []
    kinds: tuple[Kind, Kind] = ("input gradient", "weight gradient")
    wanted_kinds = [kind for kind, wants in zip(kinds, named["output_mask"], strict=False) if wants]
    for number, kind in enumerate(wanted_kinds):
        workspace = _workspace(kind, grad, wanted, named, call.processor)
        plan += [Out(number), *workspace, *(Free(item.name) for item in workspace if isinstance(item, Scratch))]
    return plan


def memory_format(data: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """Return channels-last if input or weight are, except for doubles (``cudnn_conv_suggest_memory_format``)."""
    last = _CHANNELS_LAST.get(weight.dim())
    if last is None or data.dtype == torch.float64 or _is_miopen_contiguous():
        return torch.contiguous_format
    return last if last in (layout_of(data), layout_of(weight)) else torch.contiguous_format


def _is_miopen_contiguous() -> bool:
    """Return whether MIOpen convolves, and does so in contiguous memory (``miopen_conv_suggest_memory_format``)."""
    return torch.version.hip is not None and os.environ.get("PYTORCH_MIOPEN_SUGGEST_NHWC") != "1"


def _is_depthwise(named: dict[str, Any]) -> bool:
    """Return whether every channel is a group."""
    return named["groups"] > 1 and named["groups"] == named["input"].shape[1] and not named["transposed"]


def _workspace(
    kind: Kind, output: torch.Tensor, wanted: torch.memory_format, named: dict[str, Any], processor: Processor
) -> list[Scratch | Trial]:
    """Plan cuDNN's workspace for ``kind``, if it needs any; MIOpen's are not known.

    With ``cudnn.benchmark`` the first call of a kind tries all plans (``get_plans_from_find``). Which of them is the
    fastest is not known; assumed: the one that the heuristics would choose.
    """
    if processor.is_amd:
        return []
    data, weight = named["input"], named["weight"]
    tries = torch.backends.cudnn.benchmark
    if processor.cudnn is None and not tries and not _has_tensor_cores(data.dtype, processor):
        return []
    if named["transposed"]:  # the gradient of the input of a convolution from ``output`` to ``data``
        swapped: dict[Kind, Kind] = {"forward": "input gradient", "input gradient": "forward"}
        kind, data, output = swapped.get(kind, kind), output, data
    one = _cudnn_convolution(data, weight, output, wanted is not torch.contiguous_format, named, processor)
    if _runs_in_aten(one, wanted, named):
        return []
    size, choice = workspace_bytes(kind, one, processor), (kind, one.key)
    key = kind, one.key, _is_deterministic(), _allows_tf32(processor)
    scratch = Scratch(size, "cudnn_workspace", choice)
    if not tries:
        return [Trial(key), scratch] if size else [Trial(key)]
    tried = plans_named(kind, one, size, processor)
    tf32, offered = _allows_tf32(processor), _offered(kind, one, processor)
    sizes = (*tried, *unnamed_workspaces(kind, one, offered, tf32=tf32))
    return [Trial(key, sizes, _plans_timed(), choice), scratch]


def plans_named(kind: Kind, one: Convolution, chosen: int, processor: Processor) -> tuple[int, ...]:
    """Return the workspaces of the plans that cuDNN's library names, which ``cudnn.benchmark`` tries.

    That of the chosen one comes first, and is alone where the library is not installed.
    """
    sizes = [plan.workspace + missing_parts(kind, one, plan) for plan in _offered(kind, one, processor)]
    return tuple(sizes) if chosen in sizes[:1] else (chosen, *sizes)


def _offered(kind: Kind, one: Convolution, processor: Processor) -> tuple[EnginePlan, ...]:
    if processor.cudnn is None:
        return ()
    return processor.cudnn.offered(kind, one, tf32=_allows_tf32(processor), deterministic=_is_deterministic())


def _plans_timed() -> int:
    """Return how many plans ``cudnn.benchmark`` times; a build without CUDA does not know PyTorch's default."""
    limit = torch.backends.cudnn.benchmark_limit
    return PLANS_TIMED if limit is None else limit or _ALL_PLANS


def workspace_bytes(kind: Kind, one: Convolution, processor: Processor) -> int:
    """Return the bytes of a workspace: as cuDNN answers where it can be asked and has a plan, else by trees."""
    if processor.cudnn is not None:
        found = processor.cudnn.plan(kind, one, tf32=_allows_tf32(processor), deterministic=_is_deterministic())
        if found is not None and (size := _answered(kind, one, found, processor)) is not None:
            return size
    return workspace(kind, one) if _has_tensor_cores(one.dtype, processor) else 0


def _answered(kind: Kind, one: Convolution, plan: EnginePlan, processor: Processor) -> int | None:
    """Return the bytes that a plan has on a GPU, of which cuDNN answered without a driver; None: trees decide."""
    assert processor.cudnn is not None
    recorded = processor.capability == _HOPPER and has_recorded_engines(processor.cudnn.version)
    usual = recorded and _allows_tf32(processor) and not _is_deterministic()
    engine = missing_engine(kind, one, plan) if usual else None
    if engine is None and is_unanswered(one):
        return None
    if engine and (size := missing_workspace(kind, one, engine)) is not None:
        return size
    return plan.workspace + missing_parts(kind, one, plan)


def settings_of_plans(processor: Processor) -> dict[str, bool]:
    """Return the settings of PyTorch that decide which plans of cuDNN it tries."""
    return {"tf32": _allows_tf32(processor), "deterministic": _is_deterministic()}


def _is_deterministic() -> bool:
    """Return whether PyTorch leaves out plans whose results may differ from run to run."""
    return torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()


def _runs_in_aten(one: Convolution, wanted: torch.memory_format, named: dict[str, Any]) -> bool:
    """Return whether ATen's depthwise kernel runs the convolution, instead of cuDNN."""
    return _is_depthwise(named) and wanted is torch.contiguous_format and not is_cudnn_depthwise(one)


def _cudnn_convolution(
    data: torch.Tensor, weight: torch.Tensor, output: torch.Tensor, last: bool, named: dict[str, Any], on: Processor
) -> Convolution:
    """Return the convolution as cuDNN is called; one dimension is passed as the second of two (``view4d``)."""
    row = weight.dim() == 3
    shapes = [torch.Size((*t.shape[:2], 1, *t.shape[2:])) if row else t.shape for t in (data, weight, output)]
    strides, padding, dilation = named["stride"], named["padding"], named["dilation"]
    if row:
        strides, padding, dilation = [1, *strides], [0, *padding], [1, *dilation]
    return Convolution(
        data=shapes[0],
        weight=shapes[1],
        output=shapes[2],
        dtype=data.dtype,
        strides=strides,
        padding=padding,
        dilation=dilation,
        groups=named["groups"],
        transposed=named["transposed"],
        channels_last=last,
        multiprocessors=on.multiprocessors,
        level_factors=on.level_factors,
    )


def _has_tensor_cores(dtype: torch.dtype, processor: Processor) -> bool:
    """Return whether tensor cores may run the type.

    16-bit types from Volta on (bfloat16 from Ampere); fp32 from Ampere on, where cuDNN may use TF32 by default.
    """
    if dtype == torch.float16:
        return processor.capability >= (7, 0)
    return processor.capability >= (8, 0) and (
        dtype in HALF_TYPES or (dtype == torch.float32 and _allows_tf32(processor))
    )


def _allows_tf32(processor: Processor) -> bool:
    """Return whether cuDNN's convolutions may use TF32, their default.

    ``torch.backends.fp32_precision`` sets the precision of all backends.  In releases where it does not reach
    convolutions, a setting that equals it is taken for one that came from it.
    """
    backends: Any = torch.backends
    setting = backends.cudnn.conv.fp32_precision
    if setting == backends.fp32_precision and not behaviour(
        "fp32_precision_reaches_convolutions", processor.torch_version
    ):
        return True
    return bool(setting == "tf32")


def _bias_gradient(grad: torch.Tensor, call: KernelCall, index: int) -> list[Out | Scratch | Free | Trial]:
    """Plan ``grad_output.sum`` over all dimensions but the channels."""
    dimensions = [dimension for dimension in range(grad.dim()) if dimension != 1]
    func = torch.ops.aten.sum.dim_IntList
    total = KernelCall(func, (grad, dimensions), {}, (call.outputs[index],), call.processor)
    plan = SUM(total)
    return [Out(index, item.bytes) if isinstance(item, Out) else item for item in plan]
