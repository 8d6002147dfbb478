"""Values that are known although tensors have no data: what came with the batch, and what follows from it.

Token ids, masks and labels come from the host with their values, positions from ``arange``.  Operations on such small
tensors are run on the host as well, so that ``attention_mask.all()`` is answered as a run on a GPU would answer it.
Numbers with a point are known where they follow from integers, truths and constants alone: ``(1 - mask) * lowest``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

_Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype]
_LARGEST = 1 << 26
"""Numbers in the largest tensor whose values are followed: four masks of attention over 4096 tokens."""
_AT_ONCE = 1 << 16
"""Numbers in the largest tensor whose values are computed before anyone asks for them; most masks are never asked."""

_FACTORIES = frozenset({"aten::arange", "aten::zeros", "aten::ones", "aten::full", "aten::scalar_tensor"})
_BESIDE = frozenset({"aten::new_zeros", "aten::new_ones", "aten::new_full"})
"""Factories that take nothing but the kind of a tensor from it."""


def _place(tensor: torch.Tensor) -> _Place:
    """Which view of its storage a tensor is: Python may meet one as different objects (autograd's saved tensors)."""
    return int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype


class _Later:
    """One output of an operation on known values, computed when it is asked for; ``None`` where it cannot be."""

    def __init__(self, run: Callable[[], list[torch.Tensor]], index: int, shape: torch.Size) -> None:
        self._run: Callable[[], list[torch.Tensor]] | None = run
        self._index, self._shape = index, shape
        self._value: torch.Tensor | None = None

    def get(self) -> torch.Tensor | None:
        """The value."""
        if self._run is not None:
            results, self._run = self._run(), None
            found = results[self._index] if self._index < len(results) else None
            self._value = found if found is not None and found.shape == self._shape and not found.is_meta else None
        return self._value


class Values:
    """Knows the values of some tensors without data, as tensors on the host."""

    def __init__(self) -> None:
        self._known: dict[int, dict[_Place, torch.Tensor | _Later]] = {}
        self._waiting: weakref.WeakSet[_Later] = weakref.WeakSet()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def learn(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """A tensor came from the host with its values; large ones are not remembered, nor several numbers with a point:
        they are data."""
        largest = 1 if value.is_floating_point() or value.is_complex() else _LARGEST
        if not value.is_meta and value.numel() <= largest:
            self._remember(tensor, value)

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor, if they are known."""
        found = self._held(tensor)
        return found.get() if isinstance(found, _Later) else found

    def _held(self, tensor: torch.Tensor) -> torch.Tensor | _Later | None:
        views = self._known.get(tensor.untyped_storage()._cdata) if self._known else None
        return views.get(_place(tensor)) if views else None

    def _remember(self, tensor: torch.Tensor, value: torch.Tensor | _Later) -> None:
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
        if tensors and self._held(tensors[0]) is None and not func._schema.is_mutable:
            return
        if any(t.numel() > _LARGEST for t in outputs):
            return
        if not tensors and func._schema.name not in _FACTORIES | _BESIDE:
            return
        held = [self._held(t) for t in tensors]
        if any(one is None for one in held):
            for tensor in (*outputs, *_written(func, args)):
                self._forget(tensor.untyped_storage()._cdata)
            return
        waits = any(isinstance(one, _Later) for one in held) or any(t.numel() > _AT_ONCE for t in outputs)
        run = self._running(func, args, kwargs)
        if waits and not func._schema.is_mutable:
            self._remember_later(run, outputs)
            return
        if func._schema.is_mutable:
            for later in list(self._waiting):  # what they are made of is about to change
                later.get()
        for tensor, value in zip(outputs, run(), strict=False):
            if value.shape == tensor.shape and not value.is_meta:
                self._remember(tensor, value)

    def _remember_later(self, run: Callable[[], list[torch.Tensor]], outputs: Sequence[torch.Tensor]) -> None:
        once = cache(run)
        for index, tensor in enumerate(outputs):
            later = _Later(once, index, tensor.shape)
            self._waiting.add(later)
            self._remember(tensor, later)

    def _running(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], list[torch.Tensor]]:
        """The operation on values as they are now; no results where the host cannot run it."""
        host = {"device": torch.device("cpu")} if kwargs.get("device") is not None else {}
        values = self._values(args)

        def run() -> list[torch.Tensor]:
            try:
                return _flat(func(*_now(values), **{**kwargs, **host}))
            except (RuntimeError, NotImplementedError, TypeError):
                return []

        return run

    def _values(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._held(value) if value.is_meta else value
        if isinstance(value, (list, tuple)):
            return type(value)(self._values(v) for v in value)
        return value


def _now(value: Any) -> Any:
    """Arguments with the values that were waited for."""
    if isinstance(value, _Later):
        return value.get()
    if isinstance(value, (list, tuple)):
        return type(value)(_now(v) for v in value)
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
