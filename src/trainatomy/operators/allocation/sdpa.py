"""Scaled-dot-product attention as CUDA runs it, above autograd, so that autograd records the same graph.

Source: aten/src/ATen/native/transformers/attention.cpp (``scaled_dot_product_attention``,
``_scaled_dot_product_attention_math``), torch 2.9-2.15.

The choice of the kernel of scaled-dot-product attention on a CUDA GPU.

Reproduces ``select_sdp_backend`` of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and the checks of
sdp_utils_cpp.h for dense tensors, torch 2.9-2.15, with the cuDNN of PyTorch's wheels on PyPI; on AMD GPUs torch 2.13
and 2.14 with AOTriton 0.12, on whose kernels flash and memory-efficient attention run there.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from trainatomy.catalog.versions import behaviour
from trainatomy.errors import SimulationError
from trainatomy.operators.allocation import aotriton
from trainatomy.operators.allocation.plan import HALF_TYPES, Processor, deterministic, is_half

if TYPE_CHECKING:
    from collections.abc import Callable

    Decide = Callable[[Callable[[Processor], Any]], Any]
    """Returns the answer of a function on the GPU, where an execution may serve others with the same answer."""


Backend = Literal["flash", "efficient", "cudnn", "math", "overrideable"]

_DEFAULT_ORDER: tuple[Backend, ...] = ("flash", "efficient", "math", "cudnn", "overrideable")
_CUDNN_FIRST: tuple[Backend, ...] = ("cudnn", "flash", "efficient", "math")
_BY_NUMBER: dict[int, Backend] = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}
_OLDEST_CUDNN_PREFERRED = 91500
_NEWEST_CUDNN_WITH_SMALL_HEADS = 92200
_LARGEST_HEAD_ON_AMD = 512
_DROPOUT_STEPS = 16
"""Probabilities of dropout between 0 and 1 that all of cuDNN's kernels of attention can tell apart."""


@dataclass(frozen=True, slots=True)
class SdpFlags:
    """The switches of ``torch.backends.cuda`` and ``torch.nn.attention.sdpa_kernel``.

    ``order`` is None unless the user set one.
    """

    flash: bool = True
    efficient: bool = True
    math: bool = True
    cudnn: bool = True
    half_precision_math: bool = False
    deterministic: bool = False
    order: tuple[Backend, ...] | None = None

    @classmethod
    def current(cls) -> SdpFlags:
        """Return the switches of this process."""
        cuda = torch.backends.cuda
        order = tuple(_BY_NUMBER[number] for number in torch._C._get_sdp_priority_order())
        return cls(
            flash=cuda.flash_sdp_enabled(),
            efficient=cuda.mem_efficient_sdp_enabled(),
            math=cuda.math_sdp_enabled(),
            cudnn=cuda.cudnn_sdp_enabled(),
            half_precision_math=cuda.fp16_bf16_reduction_math_sdp_allowed(),
            deterministic=deterministic(),
            order=None if order == _DEFAULT_ORDER else order,
        )


@dataclass(frozen=True, slots=True)
class Attention:
    """A call of ``scaled_dot_product_attention``, with its arguments' names, and what else decides about it.

    Attributes:
        query: [B, H, S, D].
        key: [B, Hk, T, D].
        value: [B, Hk, T, Dv].
        processor: The GPU.
        flags: The switches of the process.
        requires_grad: Whether a gradient will flow to query, key or value.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    processor: Processor = field(kw_only=True)
    flags: SdpFlags = field(kw_only=True)
    requires_grad: bool = field(default=False, kw_only=True)


def choose_sdpa(call: Attention) -> Backend:
    """Return the backend of one call.

    Raises:
        SimulationError: every backend that supports the call is switched off.
    """
    able = {"flash": _can_use_flash, "efficient": _efficient, "cudnn": _cudnn, "math": lambda _: call.flags.math}
    for backend in _order(call.processor, call.flags):
        if backend in able and able[backend](call):
            return backend
    raise SimulationError(
        "scaled_dot_product_attention: no kernel that is switched on takes these tensors "
        f"(query {tuple(call.query.shape)} {call.query.dtype}); allow another one with torch.nn.attention.sdpa_kernel"
    )


def is_fused_beside_a_mask(call: Attention) -> bool:
    """Return whether attention with grouped queries, which no fused kernel takes, is fused where there is a mask.

    Beside a mask, models of transformers repeat keys and values for each query head (``use_gqa_in_sdpa``, 5.17), so
    that they have the shape of the query.
    """
    query = call.query
    gradient = query.requires_grad
    return _efficient(
        Attention(query, query, query, processor=call.processor, flags=call.flags, requires_grad=gradient)
    )


def _order(processor: Processor, flags: SdpFlags) -> tuple[Backend, ...]:
    """Return the priorities: cuDNN first on compute capability 9 and 10 with cuDNN above 9.15.

    Source: ``check_prefer_cudnn_attention``.
    """
    if flags.order is not None:
        return flags.order
    cudnn: int = behaviour("cudnn_of_the_wheel", processor.torch_version)
    prefer = cudnn > _OLDEST_CUDNN_PREFERRED and processor.capability[0] in (9, 10) and not processor.is_amd
    return _CUDNN_FIRST if prefer else _DEFAULT_ORDER


def _can_use_flash(call: Attention) -> bool:
    """Return ``can_use_flash_attention``."""
    heads = {tensor.shape[-1] for tensor in (call.query, call.key, call.value)}
    return (
        call.flags.flash
        and _four_dimensions(call)
        and call.attn_mask is None
        and len(heads) == 1
        and max(heads) <= (_LARGEST_HEAD_ON_AMD if call.processor.is_amd else 256)
        and _flash_runs_on(call.processor)
        and _flash_backward_exists(call)
        and (not call.is_causal or call.query.shape[-2] == call.key.shape[-2])
        and _same_type(call, HALF_TYPES)
        and _batch_and_heads(call, grouped=True)
        and _nonempty(call)
        and _unit_strides(call, ignore_single=True)
    )


def _flash_runs_on(processor: Processor) -> bool:
    """Return ``check_flash_attention_hardware_support``; on AMD GPUs both fused kernels ask AOTriton.

    Raises:
        SimulationError: Composable Kernel's attention is preferred, whose memory is not known.
    """
    if not processor.is_amd:
        return (8, 0) <= processor.capability <= (12, 1)
    if os.environ.get("TORCH_ROCM_FA_PREFER_CK") == "1":
        raise SimulationError(
            "TORCH_ROCM_FA_PREFER_CK=1: attention by Composable Kernel is not simulated; without it PyTorch's default, "
            "AOTriton, is"
        )
    experimental = os.environ.get("TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL") == "1"
    return processor.architecture in (
        aotriton.SUPPORTED | aotriton.EXPERIMENTAL if experimental else aotriton.SUPPORTED
    )


def _efficient_on_amd(call: Attention) -> bool:
    """Return ``can_use_mem_efficient_attention`` on an AMD GPU: heads of one size, a mask of bools or their type.

    AOTriton's kernels do not take grouped queries here.
    """
    dim = call.query.shape[-1]
    return (
        call.flags.efficient
        and _flash_runs_on(call.processor)
        and _four_dimensions(call)
        and dim == call.key.shape[-1] == call.value.shape[-1]
        and 0 < dim <= _LARGEST_HEAD_ON_AMD
        and dim % (8 if is_half(call.query) else 4) == 0
        and _nonempty(call)
        and _unit_strides(call, ignore_single=False)
        and _batch_and_heads(call, grouped=False)
        and _same_type(call, (torch.float32, *HALF_TYPES))
        and (call.attn_mask is None or call.attn_mask.dtype in (torch.bool, call.query.dtype))
    )


def _efficient(call: Attention) -> bool:
    """Return ``can_use_mem_efficient_attention``."""
    if call.processor.is_amd:
        return _efficient_on_amd(call)
    dim, value_dim = call.query.shape[-1], call.value.shape[-1]
    alignment = _gemm_alignment(call)
    types = (torch.float32, *HALF_TYPES) if call.processor.capability >= (8, 0) else (torch.float32, torch.float16)
    return (
        call.flags.efficient
        and (5, 0) <= call.processor.capability <= (12, 1)
        and _four_dimensions(call)
        and dim == call.key.shape[-1]
        and min(dim, value_dim) > 0
        and dim % alignment == value_dim % alignment == 0
        and _nonempty(call)
        and _unit_strides(call, ignore_single=False)
        and _batch_and_heads(call, grouped=_takes_grouped_queries(call))
        and _same_type(call, types)
    )


def _cudnn(call: Attention) -> bool:
    """Return ``can_use_cudnn_attention``; cuDNN 9.11 to 9.13 have no dropout."""
    return (
        call.flags.cudnn
        and not call.processor.is_amd
        and not call.flags.deterministic
        and _cudnn_dropout(call)
        and _four_dimensions(call)
        and _same_type(call, HALF_TYPES)
        and _mask_broadcasts(call)
        and (8, 0) <= call.processor.capability <= (12, 1)
        and _nonempty(call)
        and _unit_strides(call, ignore_single=True)
        and _batch_and_heads(call, grouped=True, same_key_value=False)
        and _cudnn_shapes(call)
    )


def _cudnn_dropout(call: Attention) -> bool:
    """Return whether cuDNN has a kernel with this dropout (``check_cudnn_dropout``)."""
    version = behaviour("cudnn_of_the_wheel", call.processor.torch_version)
    only_steps = behaviour("cudnn_attention_drops_in_steps", call.processor.torch_version)
    if call.dropout_p > 0 and 91100 < version < 91400:
        return False
    return not only_steps or float(call.dropout_p * _DROPOUT_STEPS).is_integer()


def _cudnn_shapes(call: Attention) -> bool:
    """Return ``check_cudnn_tensor_shapes`` and ``check_cudnn_d256_bprop_head_dim``.

    Heads up to 128, on Hopper 256 and on Blackwell 192 with values of 128, multiples of 8.  With cuDNN 9.23 and later,
    both GPUs have up to 256, but few sizes above 128 with a backward.
    """
    dim, value_dim = call.query.shape[-1], call.value.shape[-1]
    version = behaviour("cudnn_of_the_wheel", call.processor.torch_version)
    limit = 128
    if version > _NEWEST_CUDNN_WITH_SMALL_HEADS and _has_large_heads(call.processor.capability, version):
        limit = 256
        has_backward = max(dim, value_dim) <= limit // 2 or (dim, value_dim) in ((192, 128), (256, 256))
        if call.requires_grad and not has_backward:
            return False
    elif version >= 91000 and call.processor.capability == (9, 0):
        limit = 256
    elif version >= 91100 and call.processor.capability[0] == 10 and (dim, value_dim) == (192, 128):
        limit = 192
    return (
        max(dim, value_dim) <= limit
        and dim % 8 == value_dim % 8 == 0
        and call.key.shape[-2] != 1
        and (call.dropout_p == 0 or call.query.shape[-2] != 1)
    )


def _has_large_heads(capability: tuple[int, int], cudnn: int) -> bool:
    return capability == (9, 0) or (capability[0] == 10 and not (capability[1] == 7 and cudnn <= 92500))


def _mask_broadcasts(call: Attention) -> bool:
    """Return ``check_attn_mask_shape``.

    A mask without gradient, [S, T] or [B, H, S, T], every dimension full or 1.
    """
    if call.attn_mask is None:
        return True
    full = (*call.query.shape[:3], call.key.shape[-2])
    shape = call.attn_mask.shape
    fits = all(mask in (size, 1) for mask, size in zip(reversed(shape), reversed(full), strict=False))
    return not call.attn_mask.requires_grad and len(shape) in (2, 4) and fits


def _flash_backward_exists(call: Attention) -> bool:
    """Return whether flash attention has a backward for these heads.

    GPUs with little shared memory (8.6-8.9, 12.x) have none for heads of 193-224, nor above 224 with dropout.
    """
    dim = call.query.shape[-1]
    little = (8, 6) <= call.processor.capability <= (8, 9) or (12, 0) <= call.processor.capability <= (12, 1)
    return not (call.requires_grad and little and (192 < dim <= 224 or (dim > 224 and call.dropout_p > 0)))


def _gemm_alignment(call: Attention) -> int:
    """Return ``minimum_gemm_alignment``, in elements."""
    major = call.processor.capability[0]
    alignment = 4 if major >= 8 else 1
    if major >= 8 or (major == 7 and is_half(call.query)):
        alignment = max(alignment, 8 if is_half(call.query) else 4)
    return alignment


def _four_dimensions(call: Attention) -> bool:
    return call.query.dim() == call.key.dim() == call.value.dim() == 4


def _same_type(call: Attention, allowed: tuple[torch.dtype, ...]) -> bool:
    return call.query.dtype == call.key.dtype == call.value.dtype and call.query.dtype in allowed


def _nonempty(call: Attention) -> bool:
    return call.query.shape[-2] != 0 and call.key.shape[-2] != 0


def _unit_strides(call: Attention, ignore_single: bool) -> bool:
    """Return whether the last dimension is dense, also that of the mask."""
    dense = all(tensor.stride(-1) == 1 for tensor in (call.query, call.key, call.value))
    dense = dense or (ignore_single and call.query.shape[-1] == 1)
    return dense and (call.attn_mask is None or call.attn_mask.stride(-1) == 1)


def _takes_grouped_queries(call: Attention) -> bool:
    """Return whether memory-efficient attention takes grouped queries, and all kernels a single head of keys."""
    return bool(behaviour("efficient_attention_takes_grouped_queries", call.processor.torch_version))


def _batch_and_heads(call: Attention, grouped: bool, same_key_value: bool = True) -> bool:
    """Return whether batch sizes are equal, and heads are equal or grouped queries are supported."""
    query, key, value = (tensor.shape for tensor in (call.query, call.key, call.value))
    if not query[0] == key[0] == value[0]:
        return False
    if not (grouped and call.enable_gqa):
        is_broadcast = query[1] > 0 and key[1] == value[1] == 1 and _takes_grouped_queries(call)
        return query[1] == key[1] == value[1] or is_broadcast
    if same_key_value and key[1] != value[1]:
        return False
    return query[1] % key[1] == 0 and query[1] % value[1] == 0


_aten = torch.ops.aten
_MASK_ALIGNMENT = 8
_CUDNN_MINUS_INFINITY = -65504.0


def sdpa(
    call: Attention, misses_a_mask: Callable[[], object] = lambda: None, decide: Decide | None = None
) -> torch.Tensor:
    """Return attention [B, H, S, Dv].

    Without a batch, [H, S, D], tensors are given one for the fused kernels since torch 2.14, which take no others.
    ``misses_a_mask`` is called where all scores are stored, and would not be beside a mask; ``decide`` asks for what
    depends on the GPU.
    """
    decide = decide or (lambda question: question(call.processor))
    tensors = query, key, value = call.query, call.key, call.value
    if any(t.is_nested for t in tensors):
        raise SimulationError("scaled_dot_product_attention of nested tensors cannot be simulated; use padded tensors")
    if all(t.dim() == 3 for t in tensors) and behaviour("fused_attention_batches", call.processor.torch_version):
        query, key, value = (t.unsqueeze(0) for t in tensors)
        batched = replace(call, query=query, key=key, value=value, attn_mask=_with_batch(call.attn_mask))
        return sdpa(batched, misses_a_mask, decide).squeeze(0)
    with_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    backend = decide(lambda gpu: choose_sdpa(replace(call, requires_grad=with_gradient, processor=gpu)))
    stores_scores = backend == "math" and call.enable_gqa and call.attn_mask is None
    if stores_scores and decide(lambda gpu: is_fused_beside_a_mask(replace(call, processor=gpu))):
        misses_a_mask()
    mask = _additive(call.attn_mask, query.dtype, backend)
    if backend == "flash":
        return _flash(call)
    if backend == "math":
        return _math(call, mask)
    if backend == "efficient":
        if mask is not None:
            mask = _aligned(mask).expand(*query.shape[:3], key.shape[2])
        efficient = _aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, mask, with_gradient, call.dropout_p, call.is_causal, scale=call.scale)[0]
    cudnn = _aten._scaled_dot_product_cudnn_attention
    return cudnn(query, key, value, mask, with_gradient, call.dropout_p, call.is_causal, False, scale=call.scale)[0]


def _with_batch(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return a mask with as many dimensions as a batch of heads."""
    return mask if mask is None else mask[(None,) * (4 - mask.dim())]


def _additive(mask: torch.Tensor | None, dtype: torch.dtype, backend: Backend) -> torch.Tensor | None:
    """Convert a bool mask to one to add: 0 where attention is allowed, else minus infinity.

    Source: ``convert_boolean_attn_mask``.
    """
    if mask is None or mask.dtype != torch.bool:
        return mask
    forbidden = _CUDNN_MINUS_INFINITY if backend == "cudnn" else -math.inf
    return torch.where(mask, 0.0, mask.new_full((), forbidden, dtype=dtype))


def _flash(call: Attention) -> torch.Tensor:
    """Run flash attention: heads are padded to a multiple of 8 (``pad_last_dim``) and the output is cut again.

    The scale is that of the unpadded heads.
    """
    query, key, value = call.query, call.key, call.value
    dim = query.shape[-1]
    padding = -dim % 8
    scale = 1.0 / math.sqrt(dim) if call.scale is None else call.scale
    if padding:
        query, key, value = (_aten.pad(tensor, [0, padding]) for tensor in (query, key, value))
    out: torch.Tensor = _aten._scaled_dot_product_flash_attention(
        query, key, value, call.dropout_p, call.is_causal, False, scale=scale
    )[0]
    return out[..., :dim] if padding else out


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """Pad and cut a mask whose strides are not multiples of 8 (``preprocess_mask``, ``pad_bias``)."""
    if mask.stride(-1) == 1 and all(stride % _MASK_ALIGNMENT == 0 for stride in mask.stride()[:-1]):
        return mask
    last = mask.shape[-1]
    return _aten.pad(mask, [0, _MASK_ALIGNMENT - last % _MASK_ALIGNMENT])[..., :last]


def _math(call: Attention, given_mask: torch.Tensor | None) -> torch.Tensor:
    """Run ``_scaled_dot_product_attention_math``: 16-bit inputs compute in fp32 unless that was switched off.

    The attention weights are cast back too, as a second result that nobody uses: before the last product, as GCC
    evaluates the arguments of ``make_tuple`` from the right (assumed).
    """
    query, key, value, mask = call.query, call.key, call.value, given_mask  # freed in this order
    dtype, scale = query.dtype, call.scale
    if not call.flags.half_precision_math:
        query, key, value = (t.to(torch.float32) if is_half(t) else t for t in (query, key, value))
    scaling = math.sqrt(1.0 / math.sqrt(query.shape[-1]) if scale is None else abs(scale))
    scaled = query * (-scaling if scale is not None and scale < 0 else scaling)  # besides query, which stays allocated
    if call.is_causal:
        if mask is not None:
            raise ValueError("scaled_dot_product_attention: attn_mask and is_causal=True cannot be given together")
        mask = scaled.new_ones((query.shape[-2], key.shape[-2]), dtype=torch.bool).tril()
        mask = _additive(mask, query.dtype, "math")
    if call.enable_gqa:
        heads = query.shape[-3]
        key, value = (_repeat_heads(tensor, heads) for tensor in (key, value))
    weights = torch.matmul(scaled, key.transpose(-2, -1) * scaling)
    if mask is not None:
        weights.add_(mask)
    weights = _aten._safe_softmax(weights, -1)
    if call.dropout_p > 0.0:
        weights = torch.native_dropout(weights, call.dropout_p, True)[0]
    _unused = weights.to(dtype)
    return torch.matmul(weights, value).to(dtype)


def _repeat_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat each of [B, Hk, T, D] heads to [B, H, T, D] (``pre_process_group_query_attention_input``)."""
    return tensor if tensor.shape[-3] == heads else tensor.repeat_interleave(heads // tensor.shape[-3], -3)
