"""Memory-efficient attention (CUTLASS): accumulators in forward, row sums and a workspace in backward.

Shapes: B batch, H query heads, Hk key heads, S queries, T keys, D and Dv head dimensions; tensors come as [B, H, S, D],
kernels see [B, S, H, D].

Sources: aten/src/ATen/native/transformers/cuda/attention.cu and attention_backward.cu,
mem_eff_attention/{kernel_forward.h,kernel_backward.h,kernels/cutlassB.h}, torch 2.9-2.13.  Of grouped queries (2.14)
the pull request was read (https://github.com/pytorch/pytorch/pull/191085): each query head writes gradients of keys and
values of its own, and a kernel adds those of a group up.  That they have the input's type and are allocated behind the
gradients is assumed, as in flash attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from trainatomy.allocator.sizes import round_up
from trainatomy.operators.allocation.arguments import (
    FLOAT_BYTES,
    bound,
    ceil_div,
    dense_bytes,
    deterministic,
    is_half,
)
from trainatomy.operators.allocation.plan import Free, KernelCall, Out, Plan, Scratch

if TYPE_CHECKING:
    import torch

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

    The accumulator has the output's shape. Seed and offset stay on the CPU outside of a CUDA graph.
    """
    named = bound(call)
    query, value = named["query"], named["value"]
    plan: list[Out | Scratch | Free] = [Out(0), Out(1), Out(2, 0), Out(3, 0)]
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
