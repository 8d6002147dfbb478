"""Embedding lookups and their gradients."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from trainatomy.allocator.sizes import round_up
from trainatomy.catalog.versions import behaviour
from trainatomy.operators.allocation.arguments import (
    bound,
    ceil_div,
    compute_type,
    contiguous_copies,
    dense_bytes,
)
from trainatomy.operators.allocation.cub import radix_sort_pairs_bytes, scan_bytes, unique_by_key_bytes
from trainatomy.operators.allocation.plan import Free, KernelCall, Out, Plan, Scratch

if TYPE_CHECKING:
    import torch

_FEW_INDICES = 3072
_ROWS_PER_PARTIAL = 10
_BLOCK_AT_MOST = 1024
_WARP = 32
_ATOMIC_BLOCKS_PER_MULTIPROCESSOR = 4


def embedding(call: KernelCall) -> Plan:
    """Plan a copy of indices that cannot be viewed as one row (aten/src/ATen/native/Embedding.cpp, ``reshape``)."""
    indices = bound(call)["indices"]
    flat = indices.dim() <= 1 or _merges_to_one_row(indices)
    return [Out(0)] if flat else [Scratch(dense_bytes(indices), "flat indices"), Out(0)]


def embedding_dense_backward(call: KernelCall) -> Plan:
    """Plan the gradient of the table; up to 3072 indices need nothing but contiguous copies.

    More indices are sorted together with their positions and cut into segments of equal indices and partial segments of
    at most 10 rows, whose sums (fp32 for 16-bit gradients) are added up at the end. With n indices, V rows of width H,
    s = min(n, V) segments and p = ⌊n/10⌋ + s partial segments, the largest buffer holds p·H sums.

    Source: aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu, torch 2.9-2.13.
    """
    named = bound(call)
    indices, by_frequency = named["indices"], named["scale_grad_by_freq"]
    copies = contiguous_copies(indices, named["grad_output"])
    if indices.numel() <= _FEW_INDICES and not by_frequency:
        return [*copies, Out(0)]
    size = indices.dtype.itemsize
    return [*copies, *_sorted(call, indices.numel(), size, by_frequency), *_summed(call, indices.numel(), size)]


def _sorted(call: KernelCall, count: int, index_bytes: int, by_frequency: bool) -> list[Scratch | Free]:
    size = count * index_bytes
    plan: list[Scratch | Free] = [Scratch(size, name) for name in ("sorted indices", "original places", "range")]
    workspace = radix_sort_pairs_bytes(count, index_bytes, index_bytes, call.processor.capability)
    plan += [Scratch(workspace, "sort"), Free("sort"), Free("range")]
    if by_frequency:
        by_key = scan_bytes(count, index_bytes)
        plan.append(Scratch(size, "count"))
        plan += [Scratch(by_key, "count up"), Free("count up"), Scratch(by_key, "count down"), Free("count down")]
    return plan


def _summed(call: KernelCall, count: int, index_bytes: int) -> list[Out | Scratch | Free]:
    weight = call.outputs[0]
    rows, width = weight.shape
    segments = min(count, rows)
    partial = count // _ROWS_PER_PARTIAL + segments
    capability = call.processor.capability
    plan: list[Out | Scratch | Free] = [
        Out(0),
        Scratch(count * index_bytes, "segment offsets"),
        Scratch(8, "number of segments"),
        Scratch(count * index_bytes, "unique keys"),
        Scratch(unique_by_key_bytes(count, index_bytes, capability), "unique"),
        Free("unique"),
        Free("unique keys"),
        Scratch(segments * index_bytes, "partial segments"),
        Scratch(segments * index_bytes, "partial segments before"),
        Scratch(scan_bytes(segments, index_bytes), "scan"),
        Free("scan"),
        Scratch(8, "number of partial segments"),
        Scratch(partial * index_bytes, "partial segment offsets"),
    ]
    compute = compute_type(weight.dtype)
    if _adds_atomically(call, segments, partial, width):
        plan.append(Scratch(partial * index_bytes, "segment of partial"))
        if compute != weight.dtype:
            plan.append(Scratch(weight.numel() * compute.itemsize, "gradient in the compute type"))
    else:
        plan.append(Scratch(partial * width * compute.itemsize, "partial sums"))
    return plan


def _adds_atomically(call: KernelCall, segments: int, partial: int, width: int) -> bool:
    """Return whether few long segments are added with atomics, without partial sums.

    Deterministic algorithms are assumed to be off.
    """
    if not behaviour("embedding_backward_adds_atomically", call.processor.torch_version):
        return False
    wide = round_up(width, _WARP)
    grid = ceil_div(segments * wide, min(wide, _BLOCK_AT_MOST))
    return grid < call.processor.multiprocessors * _ATOMIC_BLOCKS_PER_MULTIPROCESSOR and partial > grid * 4


def _merges_to_one_row(tensor: torch.Tensor) -> bool:
    """Return whether ``reshape(-1)`` is a view: every dimension longer than 1 steps over the next exactly."""
    spans = [(stride, stride * size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    return all(outer[0] == inner[1] for outer, inner in itertools.pairwise(spans))
