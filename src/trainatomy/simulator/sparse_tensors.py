"""Operators on sparse tensors (gradients of ``nn.Embedding(sparse=True)``), as dense operators like those of CUDA.

PyTorch's kernels for sparse tensors without data return empty ones, or there are none.  Sources:
aten/src/ATen/native/sparse/cuda/SparseCUDATensor.cu (``_coalesce_sparse_cuda``), SparseCUDATensorMath.cu
(``add_out_sparse_cuda``, ``add_out_dense_sparse_cuda``), ../SparseTensorMath.cpp (``_mul_dense_sparse_out``),
../SparseTensor.cpp (``sparse_mask``), torch 2.9-2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainatomy.simulator.data_dependent import DataDependentSizes
from trainatomy.simulator.values import Values

_aten: Any = torch.ops.aten
_SORTED_TOGETHER = 2048
"""Keys that a block of the merge sort sorts (cub/device/dispatch/tuning/tuning_merge_sort.cuh)."""

NAMES = ("aten::clone", "aten::_coalesce", "aten::add", "aten::add_", "aten::sparse_mask")
"""Operators that ``SparseOperators`` may run."""


def is_sparse(value: object) -> bool:
    """Return whether a value is a sparse tensor on the GPU."""
    return isinstance(value, torch.Tensor) and value.layout == torch.sparse_coo and value.is_meta


class SparseOperators:
    """Runs operators on sparse tensors; where it is not known which indices are equal, all are taken to differ.

    Args:
        values: Known values.
        sizes: Is told where that is assumed (``DataDependentSizes.assumes``).
    """

    def __init__(self, values: Values, sizes: DataDependentSizes) -> None:
        self._values, self._sizes = values, sizes
        self._operators: dict[str, Callable[..., torch.Tensor]] = dict(
            zip(NAMES, (self._clone, self._coalesce, self._add, self._add_in_place, self._mask), strict=True)
        )

    def find(self, name: str, args: tuple[Any, ...]) -> Callable[..., torch.Tensor] | None:
        """Return the function that runs an operator on these arguments, None if none of them is sparse."""
        return self._operators.get(name) if any(map(is_sparse, args[:2])) else None

    def _clone(self, tensor: torch.Tensor, **_: Any) -> torch.Tensor:
        """Copy a tensor; the first gradient of a parameter is taken as it is, if its values are contiguous.

        Source: torch/csrc/autograd/functions/accumulate_grad.h (``accumulateGrad``), which counts references that
        modes keep.
        """
        indices, values = tensor._indices(), tensor._values()
        if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled() or not values.is_contiguous():
            indices, values = _aten.clone(indices), _aten.clone(values)
        return _made(tensor, indices, values, coalesced=tensor.is_coalesced())

    def _add(self, tensor: torch.Tensor, other: torch.Tensor, alpha: float = 1) -> torch.Tensor:
        """Join rows and indices of two sparse tensors, or add to a copy of a dense one."""
        if not is_sparse(tensor):
            return self._add_in_place(_aten.clone(tensor), other, alpha)
        values = other._values() if alpha == 1 else _aten.mul(other._values(), alpha)
        indices = _aten.cat([tensor._indices(), other._indices()], 1)
        return _made(tensor, indices, _aten.cat([tensor._values(), values], 0))

    def _add_in_place(self, tensor: torch.Tensor, other: torch.Tensor, alpha: float = 1) -> torch.Tensor:
        if is_sparse(tensor):
            joined = self._add(tensor, other, alpha)
            with torch._C._DisableTorchDispatch():
                tensor.data = joined
            return tensor
        dims = other.sparse_dim()
        rows = tensor.view(-1, *tensor.shape[dims:])
        _aten.index_add_(rows, 0, self._flat(other), _contiguous(other._values()), alpha=alpha)
        return tensor

    def _coalesce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sort the indices with merge sort, and add rows of equal ones."""
        count, values = tensor._nnz(), tensor._values()
        if count < 2:
            return _made(tensor, _aten.clone(tensor._indices()), _aten.clone(values), coalesced=True)
        known = self._values.of(tensor._indices(), with_data=True)
        flat = self._flat(tensor)
        flat = _aten.clone(flat) if tensor.sparse_dim() == 1 else flat
        order, offsets = (torch.empty(count, dtype=torch.long, device="meta") for _ in range(2))
        sorting = 2 * count * flat.itemsize + -(-count // _SORTED_TOGETHER) * 8
        torch.empty(sorting, dtype=torch.uint8, device="meta")
        if known is None and self._sizes.assumes is not None:
            self._sizes.assumes("aten::_coalesce")
        with torch._C._DisableTorchDispatch():
            unique = None if known is None else torch.unique(known, dim=1)
        left = count if unique is None else unique.shape[1]
        summed = values.new_empty((left, *values.shape[1:]))
        values = _contiguous(values)
        indices = flat[:left].view(1, left)
        if tensor.sparse_dim() > 1:
            indices = torch.empty((tensor.sparse_dim(), left), dtype=torch.long, device="meta")
        del order, offsets
        if unique is not None:
            self._values.learn(indices, unique)
        return _made(tensor, indices, summed, coalesced=True)

    def _mask(self, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Pick the rows of a dense tensor that a sparse one has, by a product with ones."""
        indices = mask._indices()
        picked = _aten.index(tensor, [indices[dim] for dim in range(mask.sparse_dim())])
        ones = torch.ones(1, dtype=picked.dtype, device="meta")
        return _made(mask, indices, _aten.mul(picked, ones), coalesced=mask.is_coalesced())

    def _flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the indices of a tensor as one number for each row."""
        indices = tensor._indices()
        return indices[0] if tensor.sparse_dim() == 1 else _aten.sum(indices, [0])


def new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``tensor.new(indices, values, size)``, which PyTorch does not know for tensors without data."""
    if len(args) < 3 or args[0].layout != torch.sparse_coo:
        return func(*args, **kwargs)
    return torch.sparse_coo_tensor(*args[1:], check_invariants=False)


def _contiguous(values: torch.Tensor) -> torch.Tensor:
    return values if values.is_contiguous() else _aten.clone(values, memory_format=torch.contiguous_format)


def _made(like: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, *, coalesced: bool = False) -> torch.Tensor:
    """Return a sparse tensor of the shape of another one."""
    return _aten._sparse_coo_tensor_with_dims_and_tensors(
        like.sparse_dim(),
        like.dense_dim(),
        like.shape,
        indices,
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
        is_coalesced=coalesced,
    )
