"""Scaled-dot-product attention as CUDA runs it, above autograd, so that autograd records the same graph.

Source: aten/src/ATen/native/transformers/attention.cpp (``scaled_dot_product_attention``,
``_scaled_dot_product_attention_math``), torch 2.9-2.15.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from trainatomy.catalog.versions import behaviour
from trainatomy.errors import SimulationError
from trainatomy.operators.allocation.arguments import is_half
from trainatomy.operators.allocation.sdpa_choice import Backend, SdpFlags, choose_sdpa, is_fused_beside_a_mask

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainatomy.operators.allocation.plan import Processor

_aten = torch.ops.aten
_MASK_ALIGNMENT = 8
_CUDNN_MINUS_INFINITY = -65504.0


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    processor: Processor,
    flags: SdpFlags,
    misses_a_mask: Callable[[], object] = lambda: None,
) -> torch.Tensor:
    """Return attention [B, H, S, Dv] of query [B, H, S, D], key [B, Hk, T, D] and value [B, Hk, T, Dv].

    Without a batch, [H, S, D], they are given one for the fused kernels since torch 2.14, which take no others.
    ``misses_a_mask`` is called where all scores are stored, and would not be beside a mask.
    """
    if query.is_nested or key.is_nested or value.is_nested:
        raise SimulationError("scaled_dot_product_attention of nested tensors cannot be simulated; use padded tensors")
    tensors = query, key, value
    if all(t.dim() == 3 for t in tensors) and behaviour("fused_attention_batches", processor.torch_version):
        (query, key, value), attn_mask = (t.unsqueeze(0) for t in tensors), _with_batch(attn_mask)
        options = attn_mask, dropout_p, is_causal, scale, enable_gqa
        made = sdpa(query, key, value, *options, processor=processor, flags=flags, misses_a_mask=misses_a_mask)
        return made.squeeze(0)
    with_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    backend = choose_sdpa(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, processor, with_gradient, flags
    )
    if backend == "math" and enable_gqa and attn_mask is None and is_fused_beside_a_mask(query, processor, flags):
        misses_a_mask()
    mask = _additive(attn_mask, query.dtype, backend)
    if backend == "flash":
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if backend == "math":
        return _math(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa, flags)
    if backend == "efficient":
        if mask is not None:
            mask = _aligned(mask).expand(*query.shape[:3], key.shape[2])
        kernel = _aten._scaled_dot_product_efficient_attention
        return kernel(query, key, value, mask, with_gradient, dropout_p, is_causal, scale=scale)[0]
    kernel = _aten._scaled_dot_product_cudnn_attention
    return kernel(query, key, value, mask, with_gradient, dropout_p, is_causal, False, scale=scale)[0]


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


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> torch.Tensor:
    """Run flash attention: heads are padded to a multiple of 8 (``pad_last_dim``) and the output is cut again.

    The scale is that of the unpadded heads.
    """
    dim = query.shape[-1]
    padding = -dim % 8
    scale = 1.0 / math.sqrt(dim) if scale is None else scale
    if padding:
        query, key, value = (_aten.pad(tensor, [0, padding]) for tensor in (query, key, value))
    out: torch.Tensor = _aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return out[..., :dim] if padding else out


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """Pad and cut a mask whose strides are not multiples of 8 (``preprocess_mask``, ``pad_bias``)."""
    if mask.stride(-1) == 1 and all(stride % _MASK_ALIGNMENT == 0 for stride in mask.stride()[:-1]):
        return mask
    last = mask.shape[-1]
    return _aten.pad(mask, [0, _MASK_ALIGNMENT - last % _MASK_ALIGNMENT])[..., :last]


def _math(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    flags: SdpFlags,
) -> torch.Tensor:
    """Run ``_scaled_dot_product_attention_math``: 16-bit inputs compute in fp32 unless that was switched off.

    The attention weights are cast back too, as a second result that nobody uses: before the last product, as GCC
    evaluates the arguments of ``make_tuple`` from the right (assumed).
    """
    dtype = query.dtype
    if not flags.half_precision_math:
        query, key, value = (t.to(torch.float32) if is_half(t) else t for t in (query, key, value))
    scaling = math.sqrt(1.0 / math.sqrt(query.shape[-1]) if scale is None else abs(scale))
    scaled = query * (-scaling if scale is not None and scale < 0 else scaling)  # besides query, which stays allocated
    if is_causal:
        if mask is not None:
            raise ValueError("scaled_dot_product_attention: attn_mask and is_causal=True cannot be given together")
        mask = scaled.new_ones((query.shape[-2], key.shape[-2]), dtype=torch.bool).tril()
        mask = _additive(mask, query.dtype, "math")
    if enable_gqa:
        key, value = (_repeat_heads(tensor, query.shape[-3]) for tensor in (key, value))
    weights = torch.matmul(scaled, key.transpose(-2, -1) * scaling)
    if mask is not None:
        weights.add_(mask)
    weights = _aten._safe_softmax(weights, -1)
    if dropout_p > 0.0:
        weights = torch.native_dropout(weights, dropout_p, True)[0]
    _unused = weights.to(dtype)
    return torch.matmul(weights, value).to(dtype)


def _repeat_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat each of [B, Hk, T, D] heads to [B, H, T, D] (``pre_process_group_query_attention_input``)."""
    return tensor if tensor.shape[-3] == heads else tensor.repeat_interleave(heads // tensor.shape[-3], -3)
