"""Ledger of the allocation of the trace that each storage lies in."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch


class Ledger:
    """The allocations of all storages on the GPU; a storage that dies releases its own."""

    def __init__(self, release: Callable[[int], None]) -> None:
        """Take the function that writes that the allocation of a number is released."""
        self._release = release
        self._entries: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def number_at(self, key: int) -> int | None:
        """Return the allocation of the storage with this key; None if it has none, as in host memory."""
        entry = self._entries.get(key)
        return entry[0] if entry else None

    def assign(self, storage: torch.UntypedStorage, number: int) -> None:
        """Let an allocation belong to a storage from now on."""
        key = storage._cdata

        def died(_: object) -> None:
            if self.number_at(key) == number:
                del self._entries[key]
                self._release(number)

        self._entries[key] = (number, weakref.ref(storage, died))

    def take(self, storage: torch.UntypedStorage) -> int | None:
        """Take the allocation of a storage away from it, without a release; None if it has none."""
        entry = self._entries.pop(storage._cdata, None)
        return entry[0] if entry else None

    def forget(self, number: int) -> None:
        """Let the storage of an allocation die without a release, as the trace has it already."""
        for key, (known, _) in self._entries.items():
            if known == number:
                del self._entries[key]
                return

    def stand_in(self, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, number: int) -> torch.Tensor:
        """Return a tensor for an allocation that is in the trace already."""
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            tensor = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            self.assign(tensor.untyped_storage(), number)
        return tensor
