"""FlashAttention 2's functions on meta tensors, so that ``flash_attention_2`` runs where its library is not installed.

The library's kernels are compiled, but what it allocates around them is in its C++ and Python, which these functions
follow: outputs, the logarithms of the softmax's sums, accumulators of a split over keys, the state of random numbers,
and in backward the gradients and their accumulators.  transformers' own code around the functions runs as it is.

Source: flash-attn 2.8, csrc/flash_attn/flash_api.cpp (``mha_fwd``, ``mha_varlen_fwd``, ``mha_bwd``,
``mha_varlen_bwd``), flash_attn/flash_attn_interface.py and flash_attn/bert_padding.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from trainatomy.allocator.blocks import round_up
from trainatomy.errors import SimulationError
from trainatomy.operators.allocation.above_autograd import one_operation
from trainatomy.operators.allocation.attention import key_splits
from trainatomy.operators.allocation.plan import Processor, ceil_div
from trainatomy.simulator.adapters.adapter import Adapter

NAME = "flash_attention_2"
NOTE = (
    f"{NAME} allocates what the source code of flash-attn 2.8 does, and is timed as PyTorch's kernel of the same "
    "algorithm; neither has been measured yet"
)
_AMPERE, _MOST_HEAD = (8, 0), 256
GLOBALS = (
    "_flash_fn",
    "_flash_varlen_fn",
    "_flash_with_kvcache_fn",
    "_pad_fn",
    "_unpad_fn",
    "_process_flash_kwargs_fn",
    "_loaded_implementation",
)
"""What transformers keeps of the package for the whole process."""


@contextlib.contextmanager
def simulated_flash_attention(processor: Processor) -> Iterator[None]:
    """Let transformers find FlashAttention 2 in a workload; in scripts, libraries find the whole package.

    Raises:
        SimulationError: The GPU is older than Ampere, which the library does not support.
    """
    check_gpu(processor)
    from transformers import PreTrainedModel, modeling_flash_attention_utils, modeling_utils

    dense, varlen = flash_functions(processor.multiprocessors)
    functions = (dense, varlen, None, pad_input, None)
    with contextlib.ExitStack() as stack:
        for name in GLOBALS:
            stack.enter_context(mock.patch.object(modeling_flash_attention_utils, name, None))
        imports = mock.patch.object(modeling_flash_attention_utils, "_lazy_imports", lambda *a, **k: functions)
        stack.enter_context(imports)
        found = mock.patch.object(PreTrainedModel, "_flash_attn_import_error", lambda model, **keywords: None)
        stack.enter_context(found)
        if hasattr(
            modeling_utils, "is_kernels_available"
        ):  # else the kernel comes from the hub where it can be fetched
            stack.enter_context(mock.patch.object(modeling_utils, "is_kernels_available", lambda *_: False))
        yield


def check_gpu(processor: Processor) -> None:
    """Refuse a GPU that the library does not support, or whose kernels of it are not known.

    Raises:
        SimulationError: It is older than Ampere.
        WorkloadError: It is an AMD GPU.
    """
    processor.need_cuda("flash_attention_2 (the package flash-attn)")
    if tuple(processor.capability) < _AMPERE:
        raise SimulationError(f"{NAME} needs an Ampere GPU or a newer one: use sdpa")


def flash_functions(multiprocessors: int) -> tuple[Any, Any]:
    """Return ``flash_attn_func`` and ``flash_attn_varlen_func``, of a GPU with so many multiprocessors."""

    def flash_attn_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
    ) -> Tensor:
        settings = _Settings(dropout_p, causal, deterministic, multiprocessors)
        out: Tensor = _Attention.apply(q, k, v, None, q.shape[1], settings)
        return out

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: Any,
        max_seqlen_k: Any,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
    ) -> Tensor:
        settings = _Settings(dropout_p, causal, deterministic, multiprocessors)
        out: Tensor = _Attention.apply(q, k, v, cu_seqlens_q, None, settings)
        return out

    return flash_attn_func, flash_attn_varlen_func


def packed_functions(multiprocessors: int) -> dict[str, Any]:
    """Return the functions that take queries, keys and values, or keys and values, as one tensor."""

    def settings(dropout: float, options: dict[str, Any]) -> _Settings:
        return _Settings(dropout, options.get("causal", False), options.get("deterministic", False), multiprocessors)

    def flash_attn_qkvpacked_func(qkv: Tensor, dropout_p: float = 0.0, *_: Any, **options: Any) -> Tensor:
        out: Tensor = _PackedAttention.apply(None, qkv, None, settings(dropout_p, options))
        return out

    def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, dropout_p: float = 0.0, *_: Any, **options: Any) -> Tensor:
        out: Tensor = _PackedAttention.apply(q, kv, None, settings(dropout_p, options))
        return out

    def flash_attn_varlen_qkvpacked_func(
        qkv: Tensor, cu_seqlens: Tensor, max_seqlen: Any, dropout_p: float = 0.0, *_: Any, **options: Any
    ) -> Tensor:
        out: Tensor = _PackedAttention.apply(None, qkv, cu_seqlens, settings(dropout_p, options))
        return out

    def flash_attn_varlen_kvpacked_func(
        q: Tensor,
        kv: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: Any,
        max_seqlen_k: Any,
        dropout_p: float = 0.0,
        *_: Any,
        **options: Any,
    ) -> Tensor:
        out: Tensor = _PackedAttention.apply(q, kv, cu_seqlens_q, settings(dropout_p, options))
        return out

    return {one.__name__: one for one in (
        flash_attn_qkvpacked_func, flash_attn_kvpacked_func,
        flash_attn_varlen_qkvpacked_func, flash_attn_varlen_kvpacked_func,
    )}  # fmt: skip


class _Settings(NamedTuple):
    """Arguments of a call that are no tensors, and the multiprocessors of the GPU."""

    dropout: float
    causal: bool
    deterministic: bool
    multiprocessors: int


class _Attention(torch.autograd.Function):
    """``FlashAttnFunc``, and ``FlashAttnVarlenFunc`` where ``starts`` says where each sequence starts."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, queries: Any, how: _Settings
    ) -> Tensor:
        head = q.shape[-1]
        if q.dtype not in (torch.float16, torch.bfloat16) or head > _MOST_HEAD:
            raise SimulationError(
                f"{NAME} takes float16 and bfloat16 and heads of at most {_MOST_HEAD}, found "
                f"{str(q.dtype).removeprefix('torch.')} and {head}: train in bf16, or use sdpa"
            )
        if head % 8:
            q, k, v = (functional.pad(each, [0, -head % 8]) for each in (q, k, v))
        with one_operation(
            "aten::_scaled_dot_product_flash_attention",
            *(_priced(each, starts) for each in (q, k, v)),
            dropout_p=how.dropout,
            is_causal=how.causal,
        ) as results:
            out = torch.empty_like(q)
            results.append(out)
            shape = (q.shape[1], q.shape[0]) if starts is not None else (q.shape[0], q.shape[2], q.shape[1])
            sums = q.new_empty(shape, dtype=torch.float32)
            held = [] if starts is not None or how.dropout > 0 else _split(q, k, how.multiprocessors)
            state = q.new_empty((2,), dtype=torch.int64)
            del held
        ctx.save_for_backward(q, k, v, out, sums, state, *(() if starts is None else (starts,)))
        ctx.how, ctx.head, ctx.queries = how, head, queries
        return out[..., :head]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        saved = ctx.saved_tensors  # once: a checkpoint refuses to unpack them again
        dq, dk, dv = (torch.empty_like(each) for each in saved[:3])
        _Attention.fill(ctx, saved, grad, dq, dk, dv)
        return dq[..., : ctx.head], dk[..., : ctx.head], dv[..., : ctx.head], None, None, None

    @staticmethod
    def fill(ctx: Any, saved: Sequence[Tensor], grad: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Compute the gradients of queries, keys and values into these."""
        q, k, v, out, _, _, *rest = saved
        starts = rest[0] if rest else None
        if ctx.head % 8:
            grad = functional.pad(grad, [0, -ctx.head % 8])
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        with one_operation(
            "aten::_scaled_dot_product_flash_attention_backward",
            *(_priced(each, starts) for each in (grad, q, k, v, out)),
            dropout_p=ctx.how.dropout,
            is_causal=ctx.how.causal,
        ) as results:
            results.extend((dq, dk, dv))
            held = _accumulators(q, k, starts, ctx.how)
            del held


class _PackedAttention(torch.autograd.Function):
    """``FlashAttnQKVPackedFunc`` and ``FlashAttnKVPackedFunc``: some of the three are one tensor, and one gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor | None, packed: Tensor, starts: Tensor | None, how: _Settings) -> Tensor:
        ctx.shape, ctx.has_queries = packed.shape, q is not None
        parts = list(packed.detach().unbind(-3))
        queries = parts.pop(0) if q is None else q
        return _Attention.forward(ctx, queries, parts[0], parts[1], starts, None, how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        saved = ctx.saved_tensors
        q = saved[0]
        shape = (*ctx.shape[:-1], q.shape[-1])
        queries = torch.empty_like(q) if ctx.has_queries else None
        packed = q.new_empty(shape)
        parts = packed.unbind(-3)
        _Attention.fill(ctx, saved, grad, *(parts if queries is None else (queries, *parts)))
        return None if queries is None else queries[..., : ctx.head], packed[..., : ctx.head], None, None


def _split(q: Tensor, k: Tensor, multiprocessors: int) -> list[Tensor]:
    """Return accumulators of the outputs of parts of the keys, where few queries are split (``set_params_splitkv``)."""
    batch, queries, heads, head = q.shape
    parts = key_splits(q.transpose(1, 2), k.transpose(1, 2), multiprocessors)
    if parts == 1:
        return []
    sums = q.new_empty((parts, batch, heads, queries), dtype=torch.float32)
    return [sums, q.new_empty((parts, batch, heads, queries, _rounded_head(head)), dtype=torch.float32)]


def _accumulators(q: Tensor, k: Tensor, starts: Tensor | None, how: _Settings) -> list[Tensor]:
    """Return what a backward allocates beside gradients: sums, gradients of queries, and of keys for each head."""
    heads, head = q.shape[-2:]
    if starts is None:
        batch, rows = q.shape[0], round_up(q.shape[1], 128)
        sums: tuple[int, ...] = (batch, heads, rows)
        gradients: tuple[int, ...] = (batch, rows, heads, _rounded_head(head))
    else:
        batch = starts.shape[0] - 1
        rows = q.shape[0] + 128 * batch
        sums, gradients = (heads, rows), (rows, heads, _rounded_head(head))
    held = [q.new_empty(sums, dtype=torch.float32)]
    if how.deterministic:
        gradients = (ceil_div(how.multiprocessors, batch * heads), *gradients)
    held.append(q.new_empty(gradients, dtype=torch.float32))
    if k.shape[-2] != heads:
        held += [k.new_empty((*k.shape[:-2], heads, head)) for _ in range(2)]
    return held


def _rounded_head(head: int) -> int:
    """Return the size of a head in accumulators (``head_size_rounded``)."""
    return round_up(head, 32 if head <= 128 else 64)


def _priced(tensor: Tensor, starts: Tensor | None) -> Tensor:
    """Return a tensor as the time of attention is computed from: [sequences, heads, length, size].

    Sequences of different lengths count with their mean length.
    """
    if starts is None:
        return tensor.transpose(1, 2)
    count = max(1, starts.shape[0] - 1)
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        shape = (count, tensor.shape[1], ceil_div(tensor.shape[0], count), tensor.shape[2])
        return torch.empty(shape, dtype=tensor.dtype, device="meta")


class IndexPutFirstAxis(torch.autograd.Function):
    """``flash_attn.bert_padding.IndexPutFirstAxis``."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, indices: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(indices)
        output = values.new_zeros(rows, *values.shape[1:])
        output[indices] = values
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        return grad[indices], None, None


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put tokens back to their places in padded sequences."""
    padded: Tensor = IndexPutFirstAxis.apply(hidden_states, indices, batch * seqlen)
    return padded.view(batch, seqlen, *padded.shape[1:])


ADAPTER = Adapter(
    is_used=lambda workload, _: workload.model.attn_implementation == NAME,
    simulated=lambda process, workload: simulated_flash_attention(process.processor),
    notes=lambda workload, model: (NOTE,),
    before_model=True,
)
