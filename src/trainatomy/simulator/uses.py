"""Whether the autograd engine holds the only reference to a gradient.

Seen from inside a dispatch mode a tensor has more references than the engine's own (Python's wrapper, the call's
arguments); how many more depends on PyTorch's version, so a gradient that is known to be exclusive is looked at once,
to compare with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def _counts(tensor: torch.Tensor) -> tuple[int, int]:
    own = getattr(tensor, "_use_count", None)
    return (own() if own is not None else 0), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


class _Look(TorchDispatchMode):
    """Writes down the counts of what the engine adds."""

    seen: tuple[int, int] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name == "aten::add" and torch._C._current_graph_task_id() != -1:
            self.seen = _counts(args[0])
        return result


class UseCounts:
    """Knows what exclusive looks like in this version of PyTorch."""

    def __init__(self) -> None:
        with torch._C.DisableTorchFunction(), _Look() as look:
            leaf = torch.empty(2, device="meta", requires_grad=True)
            middle = leaf * 2
            (middle.sin() + middle.cos()).backward(torch.empty(2, device="meta"))
        self._exclusive = look.seen

    def exclusive(self, tensor: torch.Tensor) -> bool:
        """Whether nobody but the engine holds the tensor or its storage."""
        return self._exclusive is not None and _counts(tensor) == self._exclusive


def is_dense(tensor: torch.Tensor) -> bool:
    """Non-overlapping and dense: the strides, sorted, are the running products of the sizes."""
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(tensor.stride(), tensor.shape, strict=True) if sz != 1):
        if stride != expected:
            return False
        expected *= size
    return True
