"""Operations that autograd runs in place on a GPU, but not under a dispatch mode.

The engine adds the second gradient of a tensor to the first in place if nobody else holds the first, and the backward
formulas of gather, index_select, indexing and value-selecting reductions fill zeros that they have just made.  Both
take a dispatch mode for a tensor subclass and make a new tensor instead, so that the recorder has to find these cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_MAKES_ZEROS = frozenset({"aten::new_zeros", "aten::zeros", "aten::zeros_like"})
_FILLS_ZEROS = frozenset(
    {"aten::scatter", "aten::scatter_add", "aten::index_add", "aten::index_put", "aten::select_scatter"}
)
_MAX_DISTANCE = 4
"""Operations from the zeros to the one that fills them: views of the gradient and the indices may come between."""


def _reference_counts(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the number of references to a tensor and to its storage."""
    use_count = getattr(tensor, "_use_count", None)
    references = use_count() if use_count is not None else 0
    return references, torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


class _CountProbe(TorchDispatchMode):
    """Notes the reference counts of the gradient that the engine adds to."""

    counts: tuple[int, int] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name == "aten::add" and torch._C._current_graph_task_id() != -1:
            self.counts = _reference_counts(args[0])
        return result


class GradientReferences:
    """Reference counts of a gradient that only the autograd engine holds.

    Inside a dispatch mode a tensor has more references than the engine's own (Python's wrapper, the call's arguments).
    How many more depends on the version of PyTorch, so it is found out once with a gradient that is known to be held
    by the engine alone.
    """

    def __init__(self) -> None:
        with torch._C.DisableTorchFunction(), torch.enable_grad(), _CountProbe() as probe:
            leaf = torch.empty(2, device="meta", requires_grad=True)
            middle = leaf * 2
            (middle.sin() + middle.cos()).backward(torch.empty(2, device="meta"))
        self._exclusive = probe.counts
        self._node: int | None = None
        self._first = 0

    def allocated(self, number: int) -> None:
        """Remember which allocation is the first of the running autograd node; ``number``: a new one."""
        node = torch._C._current_autograd_node()
        running = None if node is None else node._sequence_nr()
        if running != self._node:
            self._node, self._first = running, number

    def adds_in_place(self, first: torch.Tensor, number: int | None) -> bool:
        """Return whether the engine adds to the first of two gradients in place on a GPU.

        It does if nobody else holds the first; under a dispatch mode it never does.  What a node made itself is added
        by its own formula, which makes a new tensor, unless two of its gradients belong to one tensor.  Source:
        torch/csrc/autograd/input_buffer.cpp (``accumulate``, ``can_accumulate_inplace``), torch 2.9-2.13.

        Args:
            first: The first gradient.
            number: The allocation that holds it.
        """
        if not is_dense(first) or self._exclusive is None or _reference_counts(first) != self._exclusive:
            return False
        node = torch._C._current_autograd_node()
        if number is None or node is None or number < self._first or node._sequence_nr() != self._node:
            return True
        following = [one for one in node.next_functions if one[0] is not None]
        return len(set(following)) < len(following)


class FreshZeros:
    """Finds operations of the backward pass that fill the zeros made just before.

    Source: torch/csrc/autograd/FunctionsManual.cpp and aten/src/ATen/native (``areAnyTensorSubclassLike``), torch
    2.9-2.13.
    """

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
        """Look at one operation; call ``take_over(zeros, output)`` if CUDA would have filled the zeros in place."""
        if torch._C._current_graph_task_id() == -1:
            return
        self._age += 1
        if name in _MAKES_ZEROS:
            self._key, self._age = output.untyped_storage()._cdata, 0
            return
        target = args[0] if args else None
        if (
            name in _FILLS_ZEROS
            and self._key is not None
            and self._age <= _MAX_DISTANCE
            and isinstance(target, torch.Tensor)
        ):
            if target.untyped_storage()._cdata == self._key and target.shape == output.shape:
                take_over(target, output)
            self._key = None


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is non-overlapping and dense: its sorted strides are running products of the sizes."""
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(tensor.stride(), tensor.shape, strict=True) if sz != 1):
        if stride != expected:
            return False
        expected *= size
    return True
