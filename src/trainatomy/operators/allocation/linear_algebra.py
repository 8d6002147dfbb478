"""Linear algebra on CUDA: solving with the factors of a matrix."""

from __future__ import annotations

import math

from trainatomy.operators.allocation.arguments import bound, dense_bytes
from trainatomy.operators.allocation.plan import Free, KernelCall, Out, Plan, Scratch

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
