"""Matrix products through cuBLAS: copies of operands whose strides it does not support.

Sources: aten/src/ATen/native/cuda/Blas.cpp and cuBlasCommonArgs.h (``prepare_matrix_for_cublas``,
``prepare_batch_matrix_for_cublas``), torch 2.9-2.13. The bias of ``addmm`` allocates nothing: cuBLASLt adds it in its
epilogue, or it is broadcast into the output first. Workspaces are kept and counted separately (``workspaces.py``). Left
out: conjugated operands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainatomy.operators.allocation.arguments import bound, dense_bytes
from trainatomy.operators.allocation.plan import KernelCall, Out, Plan, Scratch

if TYPE_CHECKING:
    import torch


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
