"""Which tensors without data live on the host, and which on the device.

A meta tensor has no address; where it would live is a matter of bookkeeping.  Everything belongs to the device, except
storages that were marked as the host's: a model before it is moved, a tensor that came back by ``.cpu()``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage, valid while it lives. Call with torch functions disabled."""
    return tensor.untyped_storage()._cdata


def forgetting(table: dict[int, Any], key: int) -> Callable[[object], None]:
    """What a weak reference calls when its storage dies: the key is dropped, before another storage can take it."""
    return lambda _: table.pop(key, None)


class Storages:
    """The host's storages among meta tensors, forgotten as they die."""

    def __init__(self) -> None:
        self._host: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a meta tensor stands for one in GPU memory."""
        return not self._host or storage_key(tensor) not in self._host

    def mark_host(self, tensors: Iterable[torch.Tensor]) -> None:
        """These meta tensors stand for tensors in host memory."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._host:
                self._host[key] = weakref.ref(storage, forgetting(self._host, key))

    def forget(self, tensor: torch.Tensor) -> None:
        """A meta tensor that was taken for the host's stands for one on the device."""
        self._host.pop(storage_key(tensor), None)
