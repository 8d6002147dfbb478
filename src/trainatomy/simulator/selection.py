"""Operations whose result is as large as values say, executed where the batch tells them: see ``values``.

``nonzero``, ``unique``, ``bincount``, ``repeat_interleave`` with repeats, ``masked_select`` and indexing with a bool
mask.  CUDA turns such a mask into indices first; so is it done here.
Source: aten/src/ATen/native/IndexingUtils.h (``expandTensors``), torch 2.9-2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainatomy.simulator.values import Values

_INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})
_BY_VALUES = frozenset(
    {"aten::_unique2", "aten::unique_consecutive", "aten::unique_dim", "aten::bincount", "aten::repeat_interleave"}
)
_MASKS = (torch.bool, torch.uint8)


class Selection:
    """Executes selections by known masks. ``hold(tensor, operation)`` puts what the device must keep on the tape."""

    def __init__(self, values: Values, hold: Callable[[torch.Tensor, str], object]) -> None:
        self._values = values
        self._hold = hold

    def run(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result, or None where the operation is no selection or its mask is not known."""
        if name == "aten::nonzero":
            return self._nonzero(args[0]) if args[0].is_meta else None
        if name == "aten::masked_select":
            mask = self._values.of(args[1])
            if mask is None:
                return None
            count = int(mask.expand(torch.broadcast_shapes(mask.shape, args[0].shape)).sum())
            return torch.empty(count, dtype=args[0].dtype, device="meta")
        if name in _BY_VALUES:
            return self._by_values(func, args, kwargs)
        if name in _INDEXING and any(isinstance(i, torch.Tensor) and i.dtype in _MASKS for i in args[1]):
            indices = self._expanded(args[1])
            return None if indices is None else func(args[0], indices, *args[2:], **kwargs)
        return None

    def _nonzero(self, tensor: torch.Tensor) -> torch.Tensor | None:
        value = self._values.of(tensor) if tensor.is_meta else tensor
        if value is None:
            return None
        places = value.nonzero()
        found = torch.empty(places.shape, dtype=torch.long, device="meta")
        self._values.learn(found, places)
        return found

    def _by_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = self._values.of(args[0]) if args[0].is_meta else None
        if value is None:
            return None
        known = func(value, *args[1:], **kwargs)
        several = known if isinstance(known, tuple) else (known,)
        found = tuple(torch.empty(each.shape, dtype=each.dtype, device="meta") for each in several)
        for tensor, each in zip(found, several, strict=True):
            self._values.learn(tensor, each)
        return found if isinstance(known, tuple) else found[0]

    def _expanded(self, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None] | None:
        """Masks as one index for each of their dimensions; None if a mask is not known."""
        expanded: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in _MASKS:
                expanded.append(index)
                continue
            places = self._nonzero(index)
            if places is None:
                return None
            self._hold(places, "aten::nonzero")
            expanded.extend(places.unbind(1))
        return expanded
