"""What is answered where the value of a tensor is asked for, and there is none.

Where the batch does not tell (see ``values``), a number is 0 and a truth is True, except what follows from ``isnan``
and ``isinf`` or from ``< 0``, which is False: a training without padding, overflow or NaN takes these ways
(``mask.all()``, ``found_inf``, ``isnan(loss)``, ``(variance < 0).any()``).  Whether a mask is padding at the end alone,
so that a ``nn.TransformerEncoder`` may leave it out in inference, is not looked at: it is kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainatomy.errors import SimulationError
from trainatomy.simulator.storages import forgetting
from trainatomy.simulator.values import Values

_COMPARED: dict[str, Callable[..., bool]] = {"aten::equal": torch.equal, "aten::allclose": torch.allclose}
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


PATIENCE = 10_000
"""Truths without a known answer that a run may ask for; a training asks for a few in each of its steps."""


def assumed(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor | None:
    """What a computed tensor holds on the host: each number with a point is 0, and takes no memory; None for integers
    and truths, which say how large something is, or how often."""
    if not tensor.is_floating_point():
        return None
    return torch.zeros((), dtype=dtype or tensor.dtype, device="cpu").expand(tensor.shape)


class Answers:
    """Answers for one world. ``None`` means: run the operation."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._unknown = 0
        self._false: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def answer(self, name: str, args: tuple[Any, ...]) -> bool | int | float | None:
        """The answer to an operation that asks for a value of a meta tensor."""
        if name == "aten::_local_scalar_dense" or name == "aten::is_nonzero":
            return self._scalar(args[0]) if args[0].is_meta else None
        if name == "aten::_nested_tensor_from_mask_left_aligned":
            return False
        if name in _COMPARED and (args[0].is_meta or args[1].is_meta):
            known = [self._values.of(t) if t.is_meta else t for t in args[:2]]
            return True if known[0] is None or known[1] is None else _COMPARED[name](*known, *args[2:])
        return None

    def learn(self, name: str, args: tuple[Any, ...], outputs: Sequence[torch.Tensor]) -> None:
        """Remember what is known to be False."""
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        kept = self._false and name in _KEEPS_FALSE and all(self._is_false(t) for t in tensors)
        below_zero = name == "aten::lt" and isinstance(args[1], (int, float)) and args[1] <= 0
        if name in _MAKES_FALSE or kept or below_zero:
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
            self._unknown += 1
            if self._unknown > PATIENCE:
                raise SimulationError(
                    f"it was asked {PATIENCE:,} times whether something computed is true, which is not known in a run "
                    "without a GPU: a loop that ends when a computed value is small enough does not end here.\n"
                    "Measure this model with `trainatomy measure`, or give the loop a fixed length"
                )
            return not self._is_false(tensor)
        return 0.0 if tensor.is_floating_point() else 0
