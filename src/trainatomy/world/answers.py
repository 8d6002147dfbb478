"""What is answered where the value of a tensor is asked for, and there is none.

Where the batch does not tell (see ``values``), a number is 0 and a truth is True, except what follows from ``isnan``
and ``isinf``, which is False: a training without padding, overflow or NaN takes these ways (``mask.all()``,
``found_inf``, ``isnan(loss)``).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from trainatomy.world.storages import forgetting
from trainatomy.world.values import Values

_MAKES_FALSE = frozenset({"aten::isnan", "aten::isinf"})
_KEEPS_FALSE = frozenset(
    {
        "aten::any",
        "aten::all",
        "aten::logical_or",
        "aten::bitwise_or",
        "aten::__or__",
        "aten::logical_and",
        "aten::to",
        "aten::_to_copy",
    }
)


class Answers:
    """Answers for one world. ``None`` means: run the operation."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._false: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def answer(self, name: str, args: tuple[Any, ...]) -> bool | int | float | None:
        """The answer to an operation that asks for a value of a meta tensor."""
        if name == "aten::_local_scalar_dense" or name == "aten::is_nonzero":
            return self._scalar(args[0]) if args[0].is_meta else None
        if name == "aten::equal" and (args[0].is_meta or args[1].is_meta):
            known = [self._values.of(t) if t.is_meta else t for t in args[:2]]
            return True if known[0] is None or known[1] is None else torch.equal(known[0], known[1])
        return None

    def learn(self, name: str, args: tuple[Any, ...], outputs: Sequence[torch.Tensor]) -> None:
        """Remember what is known to be False."""
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        kept = self._false and name in _KEEPS_FALSE and all(self._is_false(t) for t in tensors)
        if name in _MAKES_FALSE or kept:
            for tensor in outputs:
                storage = tensor.untyped_storage()
                key = storage._cdata
                self._false[key] = weakref.ref(storage, forgetting(self._false, key))

    def _is_false(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._false

    def _scalar(self, tensor: torch.Tensor) -> bool | int | float:
        known = self._values.of(tensor)
        if known is not None:
            return known.item()
        if tensor.dtype == torch.bool:
            return not self._is_false(tensor)
        return 0.0 if tensor.is_floating_point() else 0
