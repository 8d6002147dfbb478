"""Values that are known although tensors have no data: what came with the batch, and what follows from it.

Token ids, masks and labels come from the host with their values, positions from ``arange``.  Operations on such small
tensors of integers and truths are run on the host as well, so that ``attention_mask.all()`` is answered as a run on a
GPU would answer it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

_LARGEST = 1 << 18
_FACTORIES = frozenset({"aten::arange", "aten::zeros", "aten::ones", "aten::full", "aten::scalar_tensor"})


class Values:
    """Knows the values of some tensors without data, as tensors on the host."""

    def __init__(self) -> None:
        self._known: Any = WeakIdKeyDictionary()

    def learn(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """A tensor came from the host with its values; large or floating ones are not remembered."""
        if not value.is_meta and not value.is_floating_point() and not value.is_complex() and value.numel() <= _LARGEST:
            self._known[tensor] = value

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor, if they are known."""
        value: torch.Tensor | None = self._known.get(tensor)
        return value

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Sequence[torch.Tensor]) -> None:
        """An operation ran on tensors without data: run it on their values if all are known, else forget what it
        overwrote."""
        tensors = [a for a in _flat(args) if a.is_meta]
        if tensors and tensors[0] not in self._known and not func._schema.is_mutable:
            return
        made_of_nothing = not tensors and func._schema.name not in _FACTORIES
        if made_of_nothing or any(t.is_floating_point() or t.numel() > _LARGEST for t in outputs):
            return
        if not all(t in self._known for t in tensors):
            for tensor in outputs:
                self._known.pop(tensor, None)
            return
        try:
            host = {"device": torch.device("cpu")} if kwargs.get("device") is not None else {}
            result = func(*self._values(args), **{**kwargs, **host})
        except (RuntimeError, NotImplementedError):
            return
        for tensor, value in zip(outputs, _flat(result), strict=False):
            if value.shape == tensor.shape and not value.is_meta:
                self._known[tensor] = value

    def _values(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._known[value] if value.is_meta else value
        if isinstance(value, (list, tuple)):
            return type(value)(self._values(v) for v in value)
        return value


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _flat(v)]
    return []
