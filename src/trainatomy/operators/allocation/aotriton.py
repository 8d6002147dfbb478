"""Fused attention on AMD GPUs: flash and memory-efficient attention are both AOTriton's kernels there.

Shapes: B batch, H query heads, S queries, T keys, D and Dv head dimensions.

AOTriton has three ways to compute gradients, which its tuning tables choose by the GPU, the type, the lengths (in
powers of two) and the mask: one kernel, which needs nothing; two kernels, with a number for each row of the scores; and
AITER's kernels, which also accumulate the queries' gradient in fp32.  ``_way`` sums up these tables: of their 2,592
entries in 16 bits of gfx90a, gfx942 and gfx950 for equal lengths from 256 on it meets 87 %.  In 10 % a number for each
row is too many or missing, in 3 % the accumulator.

Sources: aten/src/ATen/native/transformers/hip/flash_attn/aot/mha_all_aot.hip (``mha_fwd_aot``, ``mha_bwd_aot``),
attention.cu and attention_backward.cu of transformers/cuda (``USE_ROCM``), torch 2.13; AOTriton 0.12b, which torch 2.13
is built with: v3src/flash/attn_bwd.cc, aiter_bwd.cc, v3src/util.cc and v3python/database/op_database.sqlite3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from trainatomy.operators.allocation.plan import (
    FLOAT_BYTES,
    Free,
    KernelCall,
    Out,
    Plan,
    Scratch,
    bound,
    dense_bytes,
    is_half,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

Way = Literal["one kernel", "two kernels", "AITER"]

SUPPORTED = frozenset({"gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1201"})
"""Architectures with kernels that need no ``TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1``."""
EXPERIMENTAL = frozenset({"gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1152", "gfx1153", "gfx1200"})
"""Those that need it (``isArchExperimentallySupported``)."""

_COUNTER_BYTES = 4
_LONG = 8
_AITER = frozenset({"gfx942", "gfx950"})
_AITER_HEADS = range(49, 193)
_AITER_LONGER_THAN = 2048
_LONGEST_IN_ONE_KERNEL = {  # by the largest head dimension: on gfx9, on others
    48: (1 << 62, 1 << 62),
    64: (4096, 1024),
    128: (2048, 1024),
    192: (1024, 1024),
    256: (512, 512),
    512: (0, 0),
}


def flash_forward(call: KernelCall) -> Plan:
    """Plan out, seed and offset (8 bytes each, also without dropout), logsumexp [B, H, S] fp32 and a counter."""
    named = bound(call)
    counter = [Scratch(_COUNTER_BYTES, "counter")] if named["is_causal"] and named["query"].shape[2] > 1 else []
    return [Out(0), Out(2), Out(3), Out(1), *counter]


def flash_backward(call: KernelCall) -> Plan:
    """Plan copies of grad_out and out that are not dense as [B, S, H, D], gradients, [B, H, S] fp32 and ``_kernel``.

    Grouped queries need no gradients for all heads.
    """
    named = bound(call)
    strided = [name for name in ("grad_out", "out") if not named[name].transpose(1, 2).is_contiguous()]
    copies = [Scratch(dense_bytes(named[name]), f"contiguous_{name}") for name in strided]
    return [*copies, Out(0), Out(1), Out(2), Scratch(_rows(named["query"]), "softmax_d"), *_kernel(call, named, False)]


def efficient_forward(call: KernelCall) -> Plan:
    """Plan out, a second time before the first is freed, logsumexp [B, H, S] fp32 and a counter.

    Seed and offset (8 bytes each) come first with dropout, else they stay on the CPU.
    """
    named = bound(call)
    query = named["query"]
    saved = _rows(query) if named["compute_log_sumexp"] else 0
    numbers = [Out(2, _LONG), Out(3, _LONG)] if named["dropout_p"] else [Out(2, 0), Out(3, 0)]
    counter = [Scratch(_COUNTER_BYTES, "counter")] if named["is_causal"] else []
    first = Scratch(dense_bytes(call.outputs[0]), "first result")
    return [*numbers, first, Out(0), Free("first result"), Out(1, saved), *counter]


def efficient_backward(call: KernelCall) -> Plan:
    """Plan a copy of grad_out that is not dense as [B, S, H, Dv], the gradients and ``_kernel``."""
    named = bound(call)
    grad, has_mask = named["grad_out_"], named["attn_bias"] is not None
    copies = [] if grad.transpose(1, 2).is_contiguous() else [Scratch(dense_bytes(grad), "contiguous_grad_out")]
    return [*copies, *(Out(index) for index in range(len(call.outputs))), *_kernel(call, named, has_mask)]


def _kernel(call: KernelCall, named: Mapping[str, Any], has_mask: bool) -> list[Scratch]:
    """Plan what the kernels of a backward pass take: a number for each row, and AITER's accumulator of dq in fp32."""
    query, key = named["query"], named["key"]
    way = _way(query, key, call.processor.architecture, plain=not has_mask and not named["dropout_p"])
    accumulator = [Scratch(query.numel() * FLOAT_BYTES, "dq_acc")] if way == "AITER" else []
    return accumulator if way == "one kernel" else [*accumulator, Scratch(_rows(query), "delta")]


def _way(query: torch.Tensor, key: torch.Tensor, architecture: str, *, plain: bool) -> Way:
    """Return how gradients are computed; ``plain``: with neither dropout nor a mask that is a tensor."""
    dim, lengths = query.shape[3], (query.shape[2], key.shape[2])
    if (
        architecture in _AITER
        and plain
        and is_half(query)
        and dim in _AITER_HEADS
        and query.shape[1] == key.shape[1]
        and min(lengths) > _AITER_LONGER_THAN
    ):
        return "AITER"
    limits = next((limits for head, limits in _LONGEST_IN_ONE_KERNEL.items() if dim <= head), (0, 0))
    return "one kernel" if max(lengths) <= limits[not architecture.startswith("gfx9")] else "two kernels"


def _rows(query: torch.Tensor) -> int:
    """Return the bytes of a number in fp32 for each row of the scores."""
    batch, heads, queries, _ = query.shape
    return batch * heads * queries * FLOAT_BYTES
