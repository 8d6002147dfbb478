"""Location of meta tensors: host memory, or the memory of a GPU.

A meta tensor has no address, so its location is kept here.  Every storage belongs to the GPU except those that were
marked as the host's: a model before it is moved, a tensor that came back by ``.cpu()``, a pinned buffer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

NESTED = "Nested tensors (torch.nested) are not simulated: pad the batch instead."
"""The refusal of tensors that have no single storage."""


def storage_key(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, valid while it lives.  Call with torch functions disabled."""
    return storage_of(tensor)._cdata


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return a tensor's storage; of a wrapper of ``torch.func``, that of the tensor inside."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return storage_of(_inner(tensor))


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a wrapper of ``torch.func`` (``vmap``, ``grad``, ``jvp``) holds."""
    functorch: Any = torch._C._functorch
    if not functorch.is_functorch_wrapped_tensor(tensor):
        raise NotImplementedError(f"{tensor.layout} tensors have no storage")
    inner: torch.Tensor = functorch.get_unwrapped(tensor)
    return inner


def forgetting(table: dict[int, Any], key: int) -> Callable[[object], None]:
    """Return a callback for a weak reference to a storage: it drops ``key`` before another storage can have it."""
    return lambda _: table.pop(key, None)


class HostMemory:
    """Host memory that activations take: storages that are marked while hooks pack what autograd saves.

    PyTorch rounds each pinned block up to a power of two and keeps it for later ones of that size.
    Source: aten/src/ATen/core/CachingHostAllocator.h, ``allocate`` and ``get_free_block``, torch 2.9-2.13.

    Attributes:
        counts: True while a hook packs.
        pageable: Most bytes that are not pinned, at once.
        on_block: Called with the bytes of each new pinned block.
    """

    def __init__(self) -> None:
        self.counts = False
        self.on_block: Callable[[int], object] = lambda size: None
        self.pageable = 0
        self._live = 0
        self._blocks: dict[int, int] = {}
        self._most: dict[int, int] = {}

    @property
    def pinned(self) -> int:
        """Bytes of all pinned blocks: of each size, as many as were needed at once."""
        return sum(size * count for size, count in self._most.items())

    def hold(self, storage: torch.UntypedStorage, *, pinned: bool) -> None:
        """Count a new storage until it dies."""
        needed = storage.nbytes()
        if not needed:
            return
        if pinned:
            size = 1 << (needed - 1).bit_length()
            self._blocks[size] = self._blocks.get(size, 0) + 1
            if self._blocks[size] > self._most.get(size, 0):
                self._most[size] = self._blocks[size]
                self.on_block(size)
            weakref.finalize(storage, self._release_block, size).atexit = False
        else:
            self._live += needed
            self.pageable = max(self.pageable, self._live)
            weakref.finalize(storage, self._release, needed).atexit = False

    def _release_block(self, size: int) -> None:
        self._blocks[size] -= 1

    def _release(self, size: int) -> None:
        self._live -= size


class GatheredArrays:
    """Arrays on the host with the outputs that an evaluation gathers: kept to its end, and joined by copying them.

    Attributes:
        most: Most bytes of them that an evaluation held at once.
    """

    def __init__(self) -> None:
        self.most = self._kept = 0

    def begin(self) -> None:
        """Begin an evaluation."""
        self._kept = 0

    def keep(self, size: int) -> None:
        """Add outputs that came to the host."""
        self._kept += size
        self.most = max(self.most, self._kept)

    def join(self, joined: int) -> None:
        """Join two arrays in a third one of this size, beside which they still exist."""
        self.most = max(self.most, self._kept + joined)


class Storages:
    """Storages of meta tensors that are not in the memory of the process's first GPU, held by weak references.

    Attributes:
        host_memory: Host memory that activations take.
    """

    def __init__(self) -> None:
        self.host_memory = HostMemory()
        self._host: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._pinned: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._others: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Return whether a meta tensor stands for one in GPU memory."""
        return not self._host or storage_key(tensor) not in self._host

    def any_on_host(self) -> bool:
        """Return whether any meta tensor stands for one in host memory."""
        return bool(self._host)

    def is_host_key(self, key: int) -> bool:
        """Return whether the storage with this key stands for host memory."""
        return key in self._host

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether a meta tensor stands for one in pinned host memory."""
        return bool(self._pinned) and storage_key(tensor) in self._pinned

    def mark_host(self, tensors: Iterable[torch.Tensor], *, pinned: bool = False) -> None:
        """Let these meta tensors stand for tensors in host memory."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._host:
                self._host[key] = weakref.ref(storage, forgetting(self._host, key))
                if pinned:
                    self._pinned[key] = weakref.ref(storage, forgetting(self._pinned, key))
                if self.host_memory.counts:
                    self.host_memory.hold(storage, pinned=pinned)

    def mark_device(self, tensor: torch.Tensor) -> None:
        """Let a meta tensor stand for one in GPU memory."""
        self._host.pop(storage_key(tensor), None)

    def gpu_of(self, tensor: torch.Tensor) -> int | None:
        """Return the index of the GPU that a tensor was put on (``put_on``); None for the process's first one."""
        found = self._others.get(storage_key(tensor)) if self._others else None
        return found[0] if found else None

    def put_on(self, tensor: torch.Tensor, gpu: int) -> None:
        """Let a new meta tensor stand for one on another GPU than the process's first; views of it stay there."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._others:
            self._others[key] = gpu, weakref.ref(storage, forgetting(self._others, key))
