"""Values that are known although tensors have no data: what came with the batch, and what follows from it.

Token ids, masks and labels come from the host with their values, positions from ``arange``.  Operations on such small
tensors are run on the host as well, so that ``attention_mask.all()`` is answered as a run on a GPU would answer it.
Numbers with a point are known where they follow from integers, truths and constants alone: ``(1 - mask) * lowest``.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

_Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype]
_LARGEST = 1 << 24
"""Numbers in the largest tensor whose values are followed: one mask of attention over 4096 tokens."""

_FACTORIES = frozenset({"aten::arange", "aten::zeros", "aten::ones", "aten::full", "aten::scalar_tensor"})
_BESIDE = frozenset({"aten::new_zeros", "aten::new_ones", "aten::new_full"})
"""Factories that take nothing but the kind of a tensor from it."""


def _place(tensor: torch.Tensor) -> _Place:
    """Which view of its storage a tensor is: Python may meet one as different objects (autograd's saved tensors)."""
    return int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype


class Values:
    """Knows the values of some tensors without data, as tensors on the host."""

    def __init__(self) -> None:
        self._known: dict[int, dict[_Place, torch.Tensor]] = {}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def learn(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """A tensor came from the host with its values; large ones are not remembered, nor several numbers with a point:
        they are data."""
        largest = 1 if value.is_floating_point() or value.is_complex() else _LARGEST
        if not value.is_meta and value.numel() <= largest:
            self._remember(tensor, value)

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor, if they are known."""
        views = self._known.get(tensor.untyped_storage()._cdata) if self._known else None
        return views.get(_place(tensor)) if views else None

    def _remember(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = {}

            def died(_: object, key: int = key) -> None:
                self._forget(key)

            self._storages[key] = weakref.ref(storage, died)
        self._known[key][_place(tensor)] = value

    def _forget(self, key: int) -> None:
        self._known.pop(key, None)
        self._storages.pop(key, None)

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Sequence[torch.Tensor]) -> None:
        """An operation ran on tensors without data: run it on their values if all are known, else forget what it
        overwrote."""
        if func._schema.name in _BESIDE:
            args = (torch.empty(0, dtype=args[0].dtype), *args[1:])
        tensors = [a for a in _flat(args) if a.is_meta]
        if tensors and self.of(tensors[0]) is None and not func._schema.is_mutable:
            return
        if any(t.numel() > _LARGEST for t in outputs):
            return
        if not tensors and func._schema.name not in _FACTORIES | _BESIDE:
            return
        if not all(self.of(t) is not None for t in tensors):
            for tensor in (*outputs, *_written(func, args)):
                self._forget(tensor.untyped_storage()._cdata)
            return
        try:
            host = {"device": torch.device("cpu")} if kwargs.get("device") is not None else {}
            result = func(*self._values(args), **{**kwargs, **host})
        except (RuntimeError, NotImplementedError):
            return
        for tensor, value in zip(outputs, _flat(result), strict=False):
            if value.shape == tensor.shape and not value.is_meta:
                self._remember(tensor, value)

    def _values(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.of(value) if value.is_meta else value
        if isinstance(value, (list, tuple)):
            return type(value)(self._values(v) for v in value)
        return value


def _written(func: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors without data that an operation overwrites."""
    if not func._schema.is_mutable:
        return []
    written = (
        value
        for argument, value in zip(func._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return [tensor for value in written for tensor in _flat(value) if tensor.is_meta]


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.layout == torch.strided else []
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _flat(v)]
    return []
