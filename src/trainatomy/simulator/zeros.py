"""Zeros that a backward formula has just made, to fill them in place.

The formulas of gather, index_select, indexing and value-selecting reductions scatter a gradient into fresh zeros.  On
CUDA they write in place; under a dispatch mode, which counts as a tensor subclass, they make another tensor. Source:
torch/csrc/autograd/FunctionsManual.cpp and aten/src/ATen/native (``areAnyTensorSubclassLike``), torch 2.9-2.13.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_MAKES = frozenset({"aten::new_zeros", "aten::zeros", "aten::zeros_like"})
_FILLS = frozenset({"aten::scatter", "aten::scatter_add", "aten::index_add", "aten::index_put", "aten::select_scatter"})
#: Views of the gradient and of the indices may come between the two.
_BETWEEN = 4


class FreshZeros:
    """Remembers the zeros that were made last in backward."""

    def __init__(self) -> None:
        self._key: int | None = None
        self._age = 0

    def follow(
        self,
        name: str,
        args: tuple[object, ...],
        output: torch.Tensor,
        take_over: Callable[[torch.Tensor, torch.Tensor], bool],
    ) -> None:
        """Look at an operation; ``take_over(zeros, output)`` is called for one that fills the zeros in place on
        CUDA."""
        if torch._C._current_graph_task_id() == -1:
            return
        self._age += 1
        if name in _MAKES:
            self._key, self._age = output.untyped_storage()._cdata, 0
            return
        target = args[0] if args else None
        if name in _FILLS and self._key is not None and self._age <= _BETWEEN and isinstance(target, torch.Tensor):
            if target.untyped_storage()._cdata == self._key and target.shape == output.shape:
                take_over(target, output)
            self._key = None
