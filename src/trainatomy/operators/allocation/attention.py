"""Flash attention and cuDNN's attention: allocations besides gradients and outputs.

Shapes: B batch, H query heads, Hk key heads, S queries, T keys, D head dimension. Tensors come as [B, H, S, D]; the
flash kernels work on their transposed view [B, S, H, D].

Sources: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp (``mha_fwd``, ``mha_bwd``), attention.cu and
attention_backward.cu, aten/src/ATen/native/cudnn/MHA.cpp, torch 2.9-2.13; cudnn-frontend 1.23,
node/scaled_dot_product_flash_attention.h (``get_fe_workspace_size_node``).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trainatomy.allocator.sizes import round_up
from trainatomy.operators.allocation.arguments import FLOAT_BYTES, bound, ceil_div, dense_bytes, deterministic
from trainatomy.operators.allocation.plan import Free, KernelCall, Out, Plan, Scratch

if TYPE_CHECKING:
    import torch

CUDNN_PLAN_BYTES = 256
"""Bytes of cuDNN's execution plan, forward and backward: measured on an H200 with cuDNN 9.19 (B 1, H 16, S
512, D 64, fp16). Other shapes are assumed alike; anything up to 512 bytes is one block of the allocator."""


def flash_forward(call: KernelCall) -> Plan:
    """Plan out, logsumexp [B, H, S] fp32, accumulators of a split over keys, rng state and an unused scalar.

    The rng state has 16 bytes, the scalar 8. With dropout the rng state is allocated a second time before the first is
    freed.
    """
    named = bound(call)
    query, key = named["query"], named["key"]
    output, logsumexp, rng_state, unused = 0, 1, 2, 3
    plan: list[Out | Scratch | Free] = [Out(output), Out(logsumexp)]
    splits = 1 if named["dropout_p"] > 0 else key_splits(query, key, call.processor.multiprocessors)
    if splits > 1:
        batch, heads, queries, dim = query.shape
        rows = splits * batch * heads * queries * FLOAT_BYTES
        plan += [Scratch(rows, "softmax_lse_accum"), Scratch(rows * _rounded_head(dim), "out_accum")]
    if named["dropout_p"] > 0:
        plan += [Scratch(16, "rng_state"), Out(unused), Out(rng_state), Free("rng_state")]
    else:
        plan += [Out(rng_state), Out(unused)]
    return plan


def flash_backward(call: KernelCall) -> Plan:
    """Plan copies of grad_out and out that are not dense as [B, S, H, D], the three gradients and buffers.

    Buffers are fp32: softmax_d [B, H, ⌈S⌉₁₂₈], dq_accum [B, ⌈S⌉₁₂₈, H, Dr] (⌈multiprocessors / B·H⌉ of them with
    deterministic algorithms). With grouped queries, dk and dv for all H heads follow in the input's type.
    """
    named = bound(call)
    query, key = named["query"], named["key"]
    batch, heads, queries, dim = query.shape
    rows = batch * heads * round_up(queries, 128)
    strided = [name for name in ("grad_out", "out") if not named[name].transpose(1, 2).is_contiguous()]
    plan: list[Out | Scratch | Free] = [Scratch(dense_bytes(named[name]), f"contiguous_{name}") for name in strided]
    plan += [Out(0), Out(1), Out(2), Scratch(rows * FLOAT_BYTES, "softmax_d")]
    splits = ceil_div(call.processor.multiprocessors, batch * heads) if deterministic() else 1
    plan.append(Scratch(splits * rows * _rounded_head(dim) * FLOAT_BYTES, "dq_accum"))
    if key.shape[1] != heads:
        expanded = batch * key.shape[2] * heads * dim * query.element_size()
        plan += [Scratch(expanded, "dk_expanded"), Scratch(expanded, "dv_expanded")]
    return plan


def cudnn_forward(call: KernelCall) -> Plan:
    """Plan seed and offset (8 bytes each), out, logsumexp and, with several queries, the plan's workspace.

    The logsumexp is [B, H, S, 1] fp32 and exists where a backward follows.
    """
    output, logsumexp, seed, offset = 0, 1, 2, 3
    named = bound(call)
    saved = None if named["compute_log_sumexp"] else 0
    workspace = [] if named["query"].shape[2] == 1 else [Scratch(CUDNN_PLAN_BYTES, "cudnn_workspace")]
    return [Out(seed), Out(offset), Out(output), Out(logsumexp, saved), *workspace]


def cudnn_backward(call: KernelCall) -> Plan:
    """Plan a copy of grad_out whose last dimension is strided, the gradients, and one workspace.

    workspace = dq_accum B·H·S·D·4 + softmax_sum B·H·S·4 + the bytes of cuDNN's execution plan; with grouped queries dk
    and dv for all H heads in the input's type are added (assumed: cuDNN does not say whether its plan holds them).
    """
    named = bound(call)
    query, key, value, grad = named["query"], named["key"], named["value"], named["grad_out"]
    batch, heads, queries, dim = query.shape
    workspace = batch * heads * queries * (dim + 1) * FLOAT_BYTES + CUDNN_PLAN_BYTES
    if key.shape[1] != heads:
        workspace += batch * heads * key.shape[2] * (dim + value.shape[3]) * query.element_size()
    copy = [] if grad.stride(-1) == 1 else [Scratch(dense_bytes(grad), "contiguous_grad_out")]
    return [Out(0), Out(1), Out(2), *copy, Scratch(workspace, "cudnn_workspace")]


def safe_softmax(call: KernelCall) -> Plan:
    """Plan the softmax, a bool per score that is minus infinity, a bool per row of such scores, and a zero.

    Source: aten/src/ATen/native/transformers/attention.cpp.
    """
    scores = bound(call)["self"]
    rows = math.prod(scores.shape[:-1])
    zero = call.outputs[0].element_size()
    return [Out(0), Scratch(math.prod(scores.shape), "masked"), Scratch(rows, "masked_rows"), Scratch(zero, "zero")]


def _rounded_head(dim: int) -> int:
    """Return the head dimension of accumulators: multiples of 32 up to 192, then 256 (``head_size_rounded``)."""
    rounded = round_up(dim, 32)
    return rounded if rounded < 224 else 256


def key_splits(query: torch.Tensor, key: torch.Tensor, multiprocessors: int) -> int:
    """Return into how many parts the keys are split, so that few queries still fill the multiprocessors.

    Source: ``num_splits_heuristic``. The smallest number of parts whose last wave is at least 85 % as full as the best
    one's; 1 where blocks fill 80 % of 2·multiprocessors.
    """
    batch, heads, queries, dim = query.shape
    if queries == 1 and heads > key.shape[1]:
        heads, queries = key.shape[1], heads // key.shape[1]
    slots = 2 * multiprocessors
    blocks = batch * heads * ceil_div(queries, 64)
    if blocks >= 0.8 * slots:
        return 1
    key_blocks = ceil_div(key.shape[2], 256 if dim <= 64 else 128 if dim <= 128 else 64)
    candidates = [
        n
        for n in range(1, min(128, slots, key_blocks) + 1)
        if n == 1 or ceil_div(key_blocks, n) != ceil_div(key_blocks, n - 1)
    ]
    fill = {n: (blocks * n / slots) / math.ceil(blocks * n / slots) for n in candidates}
    best = max(fill.values(), default=0.0)
    return next((n for n in candidates if fill[n] >= 0.85 * best), 1)
