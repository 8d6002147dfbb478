"""Matrix products through cuBLAS: copies of operands whose strides it does not support.

Sources: aten/src/ATen/native/cuda/Blas.cpp and cuBlasCommonArgs.h (``prepare_matrix_for_cublas``,
``prepare_batch_matrix_for_cublas``), torch 2.9-2.13. The bias of ``addmm`` allocates nothing: cuBLASLt adds it in its
epilogue, or it is broadcast into the output first. Workspaces are kept and counted separately (``workspaces.py``). Left
out: conjugated operands.

Grouped matrix products (mixtures of experts): argument arrays and CUTLASS' workspace.

Sources: aten/src/ATen/native/cuda/{GroupedBlas.cpp,GroupMM.cu} (``bf16bf16_grouped_gemm_impl_sm90_sm100``), torch
2.9-2.13; CUTLASS 3, gemm/collective/sm90_mma_array_tma_gmma_ss_warpspecialized.hpp and
epilogue/collective/sm90_epilogue_array_tma_warpspecialized.hpp.

Linear algebra on CUDA: solving with the factors of a matrix.

Gradients of distances of pairs (``pdist``, ``cdist``): a buffer with a part for each pair, and its sum.

Source: aten/src/ATen/native/cuda/DistanceKernel.cu (``pdist_backward_kernel_impl``, ``cdist_backward_kernel_impl``),
torch 2.9-2.13.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from trainatomy.allocator.blocks import round_up
from trainatomy.operators.allocation.above_autograd import one_operation
from trainatomy.operators.allocation.plan import Free, KernelCall, Out, Plan, Processor, Scratch, bound, dense_bytes
from trainatomy.operators.allocation.reduction import InputGeometry, reduction_iterator, reduction_scratch, sum_kernel


def matrix_product(call: KernelCall) -> Plan:
    """Plan ``mm`` and ``addmm`` [M, K] x [K, N]: the output, then dense copies of mat2 and mat1 if needed."""
    named = bound(call)
    first = named["mat1"] if "mat1" in named else named["self"]
    copies = [matrix for matrix in (named["mat2"], first) if not _blas_supports(matrix)]
    return [Out(0), *(Scratch(dense_bytes(matrix), "operand") for matrix in copies)]


def batched_product(call: KernelCall) -> Plan:
    """Plan ``bmm`` and ``baddbmm`` [B, M, K] x [B, K, N]: the output, then dense copies of operands if needed.

    The output is row-major, so cuBLAS (column-major) computes its transpose with the operands exchanged, unless N is 1.
    """
    named = bound(call)
    first = named["batch1"] if "batch1" in named else named["self"]
    second = named["batch2"] if "batch2" in named else named["mat2"]
    _, rows, inner = first.shape
    columns = second.shape[2]
    if columns == 1:
        operands = [(first, rows, inner), (second, inner, columns)]
    else:
        operands = [(second, columns, inner), (first, inner, rows)]
    exchanged = columns != 1
    copies = [matrix for matrix, m, n in operands if not _blas_supports_batch(matrix, m, n, exchanged)]
    return [Out(0), *(Scratch(dense_bytes(matrix), "operand") for matrix in copies)]


def _blas_supports(matrix: torch.Tensor) -> bool:
    """Return whether rows or columns are dense and do not overlap."""
    if _dense(matrix):
        return True
    rows, columns = matrix.shape
    by_row, by_column = matrix.stride()
    return (by_row == 1 and by_column >= max(1, rows)) or (by_column == 1 and by_row >= max(1, columns))


def _dense(matrix: torch.Tensor) -> bool:
    """Return ``is_non_overlapping_and_dense``: some order of the dimensions makes it contiguous."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(matrix.stride(), matrix.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _blas_supports_batch(batch: torch.Tensor, m: int, n: int, exchanged: bool) -> bool:
    """Return whether cuBLAS supports the strides of [B, ., .]; contiguous batches without stride 0 always."""
    strides = batch.stride()
    fast, leading = (2, 1) if exchanged else (1, 2)
    if strides[fast] == 1 and strides[leading] >= max(1, m):
        return True
    if strides[leading] == 1 and strides[fast] >= max(1, n):
        return True
    return batch.is_contiguous() and strides[1] != 0 and strides[2] != 0


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
    return types == {torch.bfloat16} and processor.capability[0] in (9, _BLACKWELL) and not processor.is_amd


_LONG = 8


def lu_solve(call: KernelCall) -> Plan:
    """Plan two triangular solves with the factors of a matrix, unless cuSOLVER or a batched kernel solves at once.

    The permutation of the rows is made from the pivots, and for the matrix itself it is inverted; the right side is
    permuted into a copy.  Its gradient, that of ``slogdet`` and ``det`` too, is such a solution.

    Source: aten/src/ATen/native/cuda/linalg/BatchLinearAlgebra.cpp (``lu_solve_kernel``), torch 2.9-2.13.
    """
    named = bound(call)
    factors, right = named["LU"], call.outputs[0]
    transposed = named["left"] == named["adjoint"]
    rows = factors.shape[-1]
    columns = right.shape[-1] if named["left"] else right.shape[-2]
    batch = math.prod(right.shape[:-2])
    if not _by_triangles(rows, columns, batch, transposed):
        return [Out(0)]
    permutation = rows * _LONG
    plan: Plan = [Out(0), Scratch(permutation, "positions")]
    if batch > 1:
        plan = [*plan, Scratch(batch * permutation, "permutation"), Free("positions")]
    if transposed:
        return [*plan, Scratch(dense_bytes(right), "copy")]
    inverse = [Scratch(permutation, "positions of the inverse"), Scratch(batch * permutation, "inverse")]
    return [*plan, *inverse, Scratch(dense_bytes(right), "permuted")]


def _by_triangles(rows: int, columns: int, batch: int, transposed: bool) -> bool:
    """Return whether PyTorch solves by two triangular solves."""
    if rows == columns:
        return rows > 16
    if rows <= 8:
        return False
    if rows <= 64:
        looped = batch <= 2 and (columns <= 64 or transposed or rows <= 32)
        return not looped and columns > 8
    return rows > 128 or columns > 2


def pdist_backward(call: KernelCall) -> Plan:
    """Plan a part of the gradient for each other row."""
    rows, columns = bound(call)["self"].shape
    return _summed(call, [rows - 1, rows, columns], 0)


def cdist_backward(call: KernelCall) -> Plan:
    """Plan a part of the gradient for each row of the other tensor."""
    (rows, columns), others = bound(call)["x1"].shape[-2:], bound(call)["x2"].shape[-2]
    batch = call.outputs[0].numel() // max(1, rows * columns)
    return _summed(call, [batch, others, rows, columns], 1)


def _summed(call: KernelCall, sizes: list[int], dim: int) -> Plan:
    """Plan the gradient, the buffer, and what its sum along ``dim`` takes; nothing is computed for p = 0."""
    result = call.outputs[0]
    if bound(call)["p"] == 0 or 0 in sizes:
        return [Out(0)]
    buffer = torch.empty(sizes, dtype=result.dtype, device="meta")
    layout = InputGeometry(tuple(sizes), buffer.stride(), result.itemsize, 0)
    iterator = reduction_iterator(layout, tuple(position == dim for position in range(len(sizes))), (result.itemsize,))
    kernel = sum_kernel(result.dtype)
    return [
        Out(0),
        Scratch(buffer.nbytes, "part of each pair"),
        *reduction_scratch(iterator, kernel, call.processor, result.itemsize),
    ]
