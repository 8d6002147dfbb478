"""Grouped matrix products (mixtures of experts): argument arrays and CUTLASS' workspace.

Sources: aten/src/ATen/native/cuda/{GroupedBlas.cpp,GroupMM.cu} (``bf16bf16_grouped_gemm_impl_sm90_sm100``), torch
2.9-2.13; CUTLASS 3, gemm/collective/sm90_mma_array_tma_gmma_ss_warpspecialized.hpp and
epilogue/collective/sm90_epilogue_array_tma_warpspecialized.hpp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainatomy.allocator.sizes import round_up
from trainatomy.operators.allocation.arguments import bound
from trainatomy.operators.allocation.plan import KernelCall, Out, Plan, Scratch
from trainatomy.operators.allocation.whole import one_operation

if TYPE_CHECKING:
    from trainatomy.operators.allocation.plan import Processor

_POINTER_BYTES = 8
_STRIDE_BYTES = 8
_PROBLEM_BYTES = 12
_TENSOR_MAP_BYTES = 128
_SMALL = 128
_BLACKWELL = 10


class _ProductOfEachGroup(torch.autograd.Function):
    """``_grouped_mm`` for autograd: operands are saved, and each gradient has its operand's layout."""

    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, second: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(first, second, offs)
        with one_operation("aten::_grouped_mm", first, second, offs) as results:
            results.append(product := first.new_empty(first.shape[0], second.shape[2]))
        return product

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        first, second, _ = ctx.saved_tensors
        of_first = of_second = None
        if ctx.needs_input_grad[0]:
            with one_operation("aten::_grouped_mm", gradients[0], second.transpose(-2, -1)) as results:
                results.append(of_first := torch.empty_like(first))
        if ctx.needs_input_grad[1]:
            with one_operation("aten::_grouped_mm", first.transpose(-2, -1), gradients[0]) as results:
                results.append(of_second := torch.empty_like(second))
        return of_first, of_second, None


def grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Run ``torch._grouped_mm`` of [S, K] and [G, K, N] in any type, above autograd.

    PyTorch's meta kernel refuses all types but bfloat16.
    """
    ragged = mat_a.dim() == 2 and mat_b.dim() == 3
    if mat_a.dtype == torch.bfloat16 or not ragged or bias is not None or out_dtype not in (None, mat_a.dtype):
        return torch.ops.aten._grouped_mm(mat_a, mat_b, offs, bias, out_dtype)
    product: torch.Tensor = _ProductOfEachGroup.apply(mat_a, mat_b, offs)
    return product


def grouped_product(call: KernelCall) -> Plan:
    """Plan the output of ``_grouped_mm``, its rows padded to 16 bytes, and the arguments of each group.

    The arguments are allocated in bfloat16 on Hopper and Blackwell. Other types and GPUs run one product for each
    group, written into the output, after reading the offsets on the CPU: nothing more.
    """
    named = bound(call)
    first, second = named["self"], named["mat2"]
    if not _has_kernel(first, second, named["out_dtype"], call.processor):
        return [Out(0)]
    groups = (
        named["offs"].shape[0]
        if first.dim() == second.dim() == 2
        else max(first, second, key=torch.Tensor.dim).shape[0]
    )
    argument_bytes = round_up(groups, 2) * 3 * _POINTER_BYTES + groups * (_PROBLEM_BYTES + 3 * _STRIDE_BYTES)
    maps = _tensor_maps(first, second, groups, call.processor) * _TENSOR_MAP_BYTES * call.processor.multiprocessors
    return [Out(0), Scratch(argument_bytes, "group_arguments"), Scratch(maps, "workspace")]


def _tensor_maps(first: torch.Tensor, second: torch.Tensor, groups: int, processor: Processor) -> int:
    """Return the bytes of tensor map descriptors: two operands, a source and an output per multiprocessor.

    Hopper's cooperative kernel has two warp groups that write, each with an output of its own, and runs unless a group
    has few rows or columns (``dispatch_bf16_grouped_kernel_on_tile_size``). Blackwell's kernels are assumed to have
    four descriptors.
    """
    rows, columns = first.shape[-2], second.shape[-1]
    if second.dim() == 3 and first.dim() == 2:
        rows //= groups
    elif second.dim() == 2 and first.dim() == 3:
        columns //= groups
    small = rows <= _SMALL or columns <= _SMALL
    return 4 if small or processor.capability[0] == _BLACKWELL else 5


def _has_kernel(first: torch.Tensor, second: torch.Tensor, out_dtype: torch.dtype | None, processor: Processor) -> bool:
    """Return whether the kernel that takes one launch supports the operands (``use_fast_path``)."""
    types = {first.dtype, second.dtype, out_dtype or torch.bfloat16}
    return types == {torch.bfloat16} and processor.capability[0] in (9, _BLACKWELL)
