"""FlexAttention's compiled forward and backward: the buffers of Inductor's wrapper, in its order.

Source: torch 2.9-2.13, torch/_inductor/kernel/flex/flex_attention.py and flex_decoding.py (lowerings),
torch/_higher_order_ops/flex_attention.py (autocast, what is saved) and
torch/_functorch/_aot_autograd/runtime_wrappers.py (layouts of incoming gradients); the order was read from wrappers
that Inductor of 2.11, 2.12 and 2.13 wrote.

Memory with which Inductor tries the settings of a kernel before the kernel runs for the first time.

A kernel that Inductor writes has several settings (how many numbers a block of threads computes, how many warps), which
are timed on its first call.  Between two runs a buffer as large as the L2 cache is overwritten, so that each of them
reads from memory.  It is released soon, but its segment stays, and later allocations are made in it.

Source: torch 2.11-2.13, torch/_inductor/runtime/benchmarking.py (``InductorBenchmarker.benchmark_gpu``) and
triton_heuristics.py (``CachingAutotuner.run``).  The kernels of attention itself have one setting, and are not tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainatomy.catalog.versions import behaviour
from trainatomy.operators.allocation.above_autograd import one_operation
from trainatomy.operators.allocation.plan import Processor

OPERATION = "inductor::tuning"
_COMPILED_SIZES = 2
"""Sizes that a graph is compiled for: with the second, its sizes become variables (``automatic_dynamic_shapes``)."""


class Tuning:
    """First calls of the compiled kernels of one process.

    Args:
        buffer_bytes: Returns the size of the L2 cache; None: not known, and nothing is allocated.
    """

    def __init__(self, buffer_bytes: Callable[[], int | None]) -> None:
        self.buffer_bytes = buffer_bytes
        self._sizes: dict[str, set[object]] = {}

    def call(self, kernel: str, *results: Tensor) -> None:
        """Allocate and release the buffer if ``kernel`` was not compiled for results of these sizes yet."""
        if (size := self.buffer_bytes()) is None:
            return
        sizes = self._sizes.setdefault(kernel, set())
        found = tuple((each.shape, each.dtype) for each in results)
        if found in sizes or len(sizes) == _COMPILED_SIZES:
            return
        sizes.add(found)
        with one_operation(OPERATION, bytes=0):
            torch.empty(size // 4, dtype=torch.int32, device="cuda")


FORWARD, BACKWARD = "flex::attention", "flex::attention_backward"
_SHORT_QUERIES = 128
"""Fewer queries are a case for the kernel that splits the keys (``_use_flex_decoding``)."""
_UNROLLED = 8
"""Parts from which sums over them are reductions (``unroll_reductions_threshold``)."""
_ALIGNMENT_BYTES = 16
"""Inputs of a compiled graph that lie elsewhere are copied (``copy_misaligned_inputs``)."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Settings of a compiled call.

    Attributes:
        processor: Properties of the GPU, and the release of PyTorch.
        dtype: What autocast casts queries, keys and values to; None: nothing.
        trains: Backward may follow.
        returns_sums: The call returns the logarithms of the softmax's sums.
        held: Tensors of the mask and of ``score_mod``, which backward reads as well.
        kept: Share of the blocks of scores that the mask keeps.
        parts: Parts that the keys are split into for few queries; 0: the kernel for many queries runs.
        tuning: First calls of kernels.
    """

    processor: Processor
    dtype: torch.dtype | None
    trains: bool
    returns_sums: bool
    held: tuple[Tensor, ...]
    kept: float
    parts: int
    tuning: Tuning


def run(query: Tensor, key: Tensor, value: Tensor, kernel: Kernel) -> tuple[Tensor, Tensor | None]:
    """Run a compiled call; returns the output and, where it is asked for, the logarithms of sums."""
    as_strided = behaviour("compiled_backward_keeps_strides", kernel.processor.torch_version)
    boxed = behaviour("compiled_backward_frees_gradients_early", kernel.processor.torch_version)
    function = _Boxed if boxed and hasattr(torch.autograd.Function, "boxed_grads_call") else _Attention
    out, *sums = function.apply(query, key, value, kernel, as_strided)
    return out, next(iter(sums), None)


def parts_of_keys(query: Tensor, value: Tensor, mask_heads: int, multiprocessors: int) -> int:
    """Return into how many parts the keys are split so that few queries fill the GPU; 0 where they are not.

    Args:
        query: [batch, heads, length, head].
        value: [batch, heads of keys, length, head].
        mask_heads: Heads of the block mask.
        multiprocessors: Of the GPU.
    """
    heads, shared = query.shape[1], query.shape[1] // value.shape[1]
    fits = mask_heads == 1 or (shared == 1 and mask_heads == heads)
    if query.shape[2] >= _SHORT_QUERIES or not fits or shared & (shared - 1):
        return 0
    return max(1, multiprocessors // max(1, query.shape[0] * value.shape[1]) * 2)


def dense_strides(size: Sequence[int], like: Tensor) -> list[int]:
    """Return dense strides in the order of another tensor's, with the last dimension innermost.

    Source: ``infer_dense_strides``.
    """
    order = sorted(range(len(size)), key=lambda dimension: like.stride(dimension))  # stable, as ``get_fill_order``
    if order[0] != len(size) - 1:
        order.remove(len(size) - 1)
        order.insert(0, len(size) - 1)
    strides, step = [0] * len(size), 1
    for dimension in order:
        strides[dimension] = step
        step *= size[dimension]
    return strides


class _Attention(torch.autograd.Function):
    """The compiled graph of ``flex_attention`` and of its backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, as_strided: bool) -> Any:
        ctx.dtypes = tuple(each.dtype for each in (query, key, value))
        ctx.cast = [index for index, dtype in enumerate(ctx.dtypes) if kernel.dtype not in (None, dtype)]
        query, key, value = (_input(each, kernel) for each in (query, key, value))
        compute = _split if kernel.parts else _whole
        out, sums, returned = compute(query, key, value, kernel)
        if kernel.trains:
            ctx.save_for_backward(query, key, value, out, sums, *kernel.held)
        ctx.kernel, ctx.as_strided = replace(kernel, held=()), as_strided  # they are released with the saved tensors
        return (out, returned) if returned is not None else (out,)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Differentiate; the engine holds the gradients until the end."""
        return _differentiate(ctx, list(grads))


class _Boxed(_Attention):
    """The same with gradients in a list, from which backward drops them early."""

    boxed_grads_call = True

    @staticmethod
    def backward(ctx: Any, grads: Any) -> Any:  # type: ignore[override]
        """Differentiate; ``grads`` is a list that the engine keeps no copy of."""
        return _differentiate(ctx, grads)


def _input(tensor: Tensor, kernel: Kernel) -> Tensor:
    """Return an input as the kernel reads it."""
    dtype = kernel.dtype
    if dtype is not None and tensor.dtype != dtype:
        with one_operation("inductor::kernel", tensor, bytes=None) as results:
            cast = tensor.new_empty_strided(tensor.shape, dense_strides(tensor.shape, tensor), dtype=dtype)
            results.append(cast)
        kernel.tuning.call("cast of an input", cast)
        return cast
    if tensor.storage_offset() * tensor.element_size() % _ALIGNMENT_BYTES:
        return tensor.clone(memory_format=torch.preserve_format)
    return tensor


def _whole(query: Tensor, key: Tensor, value: Tensor, kernel: Kernel) -> tuple[Tensor, Tensor, Tensor | None]:
    """Allocate what the kernel for many queries does: sums, maxima, the output.

    The logarithms that are returned are written over the maxima.
    """
    with one_operation(FORWARD, query, key, value, kept=kernel.kept) as results:
        sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        maxima = torch.empty_like(sums)
        out = _output(query, value)
        results += [out, sums]
    if not kernel.returns_sums:
        return out, sums, None
    with one_operation("inductor::kernel", sums, bytes=None) as results:
        results.append(maxima)
    kernel.tuning.call("logarithms", maxima)
    return out, sums, maxima


def _split(query: Tensor, key: Tensor, value: Tensor, kernel: Kernel) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Allocate what the kernel for few queries does: results of each part of the keys, then those of all."""
    batch, heads, queries = query.shape[:3]
    parts = (batch, kernel.parts, heads, queries)
    with one_operation(FORWARD, query, key, value, kept=kernel.kept) as results:
        part_maxima = query.new_empty(parts, dtype=torch.float32)
        part_sums = torch.empty_like(part_maxima)
        accumulated = query.new_empty((*parts, value.shape[3]), dtype=torch.float32)
        results.append(accumulated)
    del results
    moved = accumulated.nbytes + part_maxima.nbytes + part_sums.nbytes
    with one_operation("inductor::kernel", bytes=moved):
        if kernel.parts == 1:  # nothing to reduce
            out = _output(query, value)
            del accumulated
            sums, returned = _sums(query, kernel)
            return out, sums, returned
        masked = query.new_empty((batch, 1, heads, queries), dtype=torch.bool) if kernel.parts < _UNROLLED else None
        maxima = query.new_empty((batch, 1, heads, queries), dtype=torch.float32)
        total = query.new_empty(query.shape[:3], dtype=torch.float32)
        sums, returned = _sums(query, kernel)
        del part_sums
        out = _output(query, value)
        del part_maxima
        del accumulated
        del maxima
        del masked, total
    return out, sums, returned


def _sums(query: Tensor, kernel: Kernel) -> tuple[Tensor | None, Tensor | None]:
    """Return the logarithms of sums: those that backward reads, and those that the call returns."""
    shape = query.shape[:3]
    sums = query.new_empty(shape, dtype=torch.float32) if kernel.trains else None
    return sums, query.new_empty(shape, dtype=torch.float32) if kernel.returns_sums else None


def _output(query: Tensor, value: Tensor) -> Tensor:
    size = (*query.shape[:3], value.shape[3])
    return query.new_empty_strided(size, dense_strides(size, query))


def _incoming(grad: Tensor, out: Tensor, *, as_strided: bool) -> Tensor:
    """Return the output's gradient in the layout that the graph was compiled for.

    That is the output's since AOTAutograd guesses so (``guess_tangent_strides_as_outputs``), a contiguous one before.
    """
    if not as_strided:
        return grad.contiguous()
    if grad.stride() == out.stride():
        return grad
    return grad.new_empty_strided(out.shape, out.stride()).copy_(grad)


def _differentiate(ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Allocate what the graph of backward does; ``grads`` is emptied as it drops them."""
    kernel: Kernel = ctx.kernel
    query, key, value, out, sums, *held = ctx.saved_tensors
    ctx.maybe_clear_saved_tensors()
    grads[0] = _incoming(grads[0], out, as_strided=ctx.as_strided)
    with one_operation("inductor::kernel", out, *grads, bytes=None) as results:
        products = torch.empty_like(sums)
        results.append(products)
    kernel.tuning.call("products", products)
    del out, grads[1:]
    with one_operation(BACKWARD, grads[0], query, key, value, kept=kernel.kept) as results:
        gradients = [
            each.new_empty_strided(each.shape, dense_strides(each.shape, each)) for each in (query, value, key)
        ]
        results.extend(gradients)
    grad_query, grad_value, grad_key = gradients
    del products, gradients, results
    named = [query, key, value]
    del query, key, value
    for index in (*ctx.cast, None, *(each for each in range(3) if each not in ctx.cast)):  # casts have other names
        if index is None:
            del sums
        else:
            named[index] = None
    del held
    grads.clear()
    wanted = [grad_query, grad_key, grad_value]
    del grad_query, grad_key, grad_value
    for index, dtype in enumerate(ctx.dtypes):
        if wanted[index].dtype != dtype and ctx.needs_input_grad[index]:
            with one_operation("inductor::kernel", wanted[index], bytes=None) as results:
                results.append(
                    wanted[index].new_empty_strided(wanted[index].shape, wanted[index].stride(), dtype=dtype)
                )
                wanted[index] = results[0]
            del results
            kernel.tuning.call("cast of a gradient", wanted[index])
    return (*wanted, None, None)
