"""Flash attention and cuDNN's attention: allocations besides gradients and outputs.

Shapes: B batch, H query heads, Hk key heads, S queries, T keys, D head dimension. Tensors come as [B, H, S, D]; the
flash kernels work on their transposed view [B, S, H, D].

Sources: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp (``mha_fwd``, ``mha_bwd``), attention.cu and
attention_backward.cu, aten/src/ATen/native/cudnn/MHA.cpp, torch 2.9-2.13; cudnn-frontend 1.23,
node/scaled_dot_product_flash_attention.h (``get_fe_workspace_size_node``).

Memory-efficient attention (CUTLASS): accumulators in forward, row sums and a workspace in backward.

Shapes: B batch, H query heads, Hk key heads, S queries, T keys, D and Dv head dimensions; tensors come as [B, H, S, D],
kernels see [B, S, H, D].

Sources: aten/src/ATen/native/transformers/cuda/attention.cu and attention_backward.cu,
mem_eff_attention/{kernel_forward.h,kernel_backward.h,kernels/cutlassB.h}, torch 2.9-2.13.  Of grouped queries (2.14)
the pull request was read (https://github.com/pytorch/pytorch/pull/191085): each query head writes gradients of keys and
values of its own, and a kernel adds those of a group up.  That they have the input's type and are allocated behind the
gradients is assumed, as in flash attention.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from trainatomy.allocator.blocks import round_up
from trainatomy.operators.allocation import aotriton
from trainatomy.operators.allocation.plan import (
    FLOAT_BYTES,
    Free,
    KernelCall,
    Out,
    Plan,
    Scratch,
    bound,
    ceil_div,
    dense_bytes,
    deterministic,
    is_half,
)

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
    if call.processor.is_amd:
        return aotriton.flash_forward(call)
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
    if call.processor.is_amd:
        return aotriton.flash_backward(call)
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


_ANY = 65536
_TILE_HEADER_BYTES = 16


class Tile(NamedTuple):
    """A backward kernel: ``rows`` queries by ``columns`` keys a block, for heads up to ``largest_head``."""

    rows: int
    columns: int
    largest_head: int


_SMALL = (Tile(64, 64, 32), Tile(64, 64, 64), Tile(64, 64, 128), Tile(64, 64, _ANY))
_WIDE = (
    Tile(64, 64, 32),
    Tile(64, 64, 64),
    Tile(128, 64, 128),
    Tile(64, 64, 128),
    Tile(128, 64, _ANY),
    Tile(64, 64, _ANY),
)
_AMPERE_HALF = (
    Tile(64, 64, 32),
    Tile(64, 64, 64),
    Tile(128, 128, 128),
    Tile(64, 64, 128),
    Tile(128, 64, _ANY),
    Tile(64, 64, _ANY),
)
_ADA_HALF = (*_AMPERE_HALF[:2], Tile(128, 64, 96), *_AMPERE_HALF[2:])
_LITTLE_SHARED_MEMORY = ((7, 5), (8, 6), (8, 9), (12, 0), (12, 1))
"""GPUs with at most 100 KiB of shared memory per block: tiles of 128 rows do not fit (assumed, except for the tile made
for these GPUs)."""


def efficient_forward(call: KernelCall) -> Plan:
    """Plan out, logsumexp [B, H, ⌈S⌉₃₂] fp32 and, for 16-bit heads above 128, an fp32 accumulator.

    The accumulator has the output's shape. Seed and offset (8 bytes each) come first in a CUDA graph, and stay on the
    CPU outside of one (Note [Seed and Offset Device]).
    """
    if call.processor.is_amd:
        return aotriton.efficient_forward(call)
    named = bound(call)
    query, value = named["query"], named["value"]
    numbers, results = (Out(2), Out(3)), (Out(0), Out(1))
    plan: list[Out | Scratch | Free]
    plan = [*numbers, *results] if call.is_captured else [*results, Out(2, 0), Out(3, 0)]
    if is_half(query) and max(query.shape[3], value.shape[3]) > 128:
        batch, heads, queries, _ = query.shape
        plan.append(Scratch(batch * queries * heads * value.shape[3] * FLOAT_BYTES, "output_accum"))
    return plan


def efficient_backward(call: KernelCall) -> Plan:
    """Plan a copy of grad_out that is not dense as [B, S, H, Dv], gradients, delta [B, H, S] and a workspace.

    Kernels that do not compute delta themselves (all fp32 kernels) have it computed as ``(grad_out.float() *
    out.float()).sum(-1)``, transposed and copied. The gradient of a bias has its last dimension padded to 16. With
    grouped queries, gradients of keys and values for all H heads follow in the input's type.
    """
    if call.processor.is_amd:
        return aotriton.efficient_backward(call)
    named = bound(call)
    query, key, grad = named["query"], named["key"], named["grad_out_"]
    largest_head = max(query.shape[3], named["value"].shape[3])
    tile = backward_tile(query, largest_head, named["dropout_p"] > 0, call.processor.capability)
    plan: list[Out | Scratch | Free] = []
    if not grad.transpose(1, 2).is_contiguous():
        plan.append(Scratch(dense_bytes(grad), "contiguous_grad_out"))
    plan += [Out(index) for index in range(len(call.outputs))]
    if key.shape[1] != query.shape[1]:
        rows = query.shape[0] * key.shape[2] * query.shape[1] * query.element_size()
        plan += [
            Scratch(rows * key.shape[3], "grad_k_expanded"),
            Scratch(rows * named["value"].shape[3], "grad_v_expanded"),
        ]
    plan += _delta(query, grad, tile, call.processor.capability)
    workspace = workspace_bytes(query, key, named["value"], tile, call.processor.capability)
    if workspace:
        plan.append(Scratch(workspace, "workspace"))
    return [*plan, Free("delta")]


def backward_tile(query: torch.Tensor, largest_head: int, dropout: bool, capability: tuple[int, int]) -> Tile:
    """Return the first kernel in dispatch order that takes heads of ``largest_head`` and fits shared memory."""
    tiles: tuple[Tile, ...]
    if capability < (7, 0) or (capability < (8, 0) and not is_half(query)):
        tiles = _SMALL
    elif not is_half(query) or capability < (8, 0):
        tiles = _WIDE
    else:
        tiles = _ADA_HALF if capability in ((8, 6), (8, 9)) and not dropout else _AMPERE_HALF
    for tile in tiles:
        fits = tile.rows < 128 or capability not in _LITTLE_SHARED_MEMORY or tile.largest_head == 96
        if largest_head <= tile.largest_head and fits:
            return tile
    return tiles[-1]


def workspace_bytes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tile: Tile, capability: tuple[int, int]
) -> int:
    """Return ``Params::workspace_size()``: staging areas of the gradients per batch and head.

    grad_k and grad_v are staged in 16 bits where they are not kept in registers. grad_q has a tile of rows·columns
    floats with a 16-byte header for each block of queries and of head columns; before compute capability 7.0 (no split
    over keys) only 16-bit kernels stage it.
    """
    batch, heads, queries, dim = query.shape
    stages_keys = is_half(query) and tile.largest_head > tile.rows
    splits = _key_splits(batch * heads, key.shape[2], tile, stages_keys, capability)
    elements = 0
    if stages_keys:
        head_columns = round_up(dim, tile.rows) + round_up(value.shape[3], tile.rows)
        elements += splits * tile.columns * head_columns
    if capability >= (7, 0) or is_half(query):
        tile_floats = (_TILE_HEADER_BYTES + tile.rows * tile.columns * FLOAT_BYTES) // FLOAT_BYTES
        elements += ceil_div(queries, tile.rows) * ceil_div(dim, tile.columns) * tile_floats
    return batch * heads * round_up(elements, 4) * FLOAT_BYTES


def _key_splits(blocks: int, keys: int, tile: Tile, stages_keys: bool, capability: tuple[int, int]) -> int:
    """Return into how many parts the keys are split: one per tile, fewer where grad_k and grad_v are staged."""
    if capability < (7, 0) or deterministic():
        return 1
    splits = ceil_div(keys, tile.columns)
    if blocks >= 256 and keys <= 2 * tile.columns:
        splits = 1
    if stages_keys:
        splits = min(splits, 200 // blocks)
    return max(splits, 1)


def _delta(
    query: torch.Tensor, grad: torch.Tensor, tile: Tile, capability: tuple[int, int]
) -> list[Out | Scratch | Free]:
    """Plan the buffer of delta, after the product and its sum over the head where they are computed first."""
    batch, heads, queries, dim = grad.shape
    delta = batch * heads * queries * FLOAT_BYTES
    in_registers = tile.largest_head <= tile.rows
    volta = (7, 0) <= capability < (7, 5)
    if is_half(query) and (in_registers or not volta):
        return [Scratch(delta, "delta")]
    casts = ("grad_float", "out_float") if is_half(query) else ()
    if queries == 1 or heads == 1:  # the transposed sum is contiguous
        return [
            *(Scratch(delta * dim, name) for name in (*casts, "product")),
            Scratch(delta, "delta"),
            Free("product"),
            *(Free(name) for name in reversed(casts)),
        ]
    return [
        *(Scratch(delta * dim, name) for name in casts),
        Scratch(delta * dim, "product"),
        Scratch(delta, "sum"),
        Scratch(delta, "delta"),
        Free("sum"),
        Free("product"),
        *(Free(name) for name in reversed(casts)),
    ]
