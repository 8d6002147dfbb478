"""Location of meta tensors: host memory, or the memory of a GPU.

A meta tensor has no address, so its location is kept here.  Every storage belongs to the GPU except those that were
marked as the host's: a model before it is moved, a tensor that came back by ``.cpu()``, a pinned buffer.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from trainatomy.results.host import NOTHING_KEPT, HostKind, HostPhaseName, KeptOnHost, block_bytes

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


class PinnedBlocks:
    """Pinned blocks (``block_bytes``), which PyTorch keeps for later ones of their size."""

    def __init__(self) -> None:
        self._live: dict[int, int] = {}
        self._most: dict[int, int] = {}

    @property
    def total(self) -> int:
        """Bytes of all blocks: of each size, as many as were needed at once."""
        return sum(size * count for size, count in self._most.items())

    def take(self, needed: int) -> int:
        """Take a block for so many bytes; return its size if it is a new one, else 0."""
        size = block_bytes(needed)
        self._live[size] = self._live.get(size, 0) + 1
        if self._live[size] <= self._most.get(size, 0):
            return 0
        self._most[size] = self._live[size]
        return size

    def give_back(self, needed: int) -> None:
        """Give the block for so many bytes back."""
        self._live[block_bytes(needed)] -= 1


class HostMemory:
    """Host memory that meta tensors stand for: activations, and what a training keeps there beside them.

    Activations are the storages that are marked while hooks pack what autograd saves.

    Attributes:
        counts: True while a hook packs.
        pageable: Most bytes of activations that are not pinned, at once.
        on_block: Called with the bytes of each new pinned block of activations.
        stage: Returns the stage of the loop (``TraceWriter.stage``).
        is_mapped: True while weights are made that are read from files, which the kernel maps.
        kept: The most that is kept beside activations, by phase.
        paged: Managed memory, which the driver moves between host and GPU.
        on_drive: What is kept in files on a drive in its place (DeepSpeed's NVMe offload).
    """

    def __init__(self) -> None:
        self.counts = self.is_mapped = False
        self.on_block: Callable[[int], object] = lambda size: None
        self.stage: Callable[[], str] = lambda: "load"
        self.pageable = self.paged = self.on_drive = 0
        self.kept: dict[HostPhaseName, KeptOnHost] = {}
        self._phase: HostPhaseName = "loading"
        self._live = 0
        self._activations, self._blocks = PinnedBlocks(), PinnedBlocks()
        self._kinds: dict[int, tuple[HostKind, int]] = {}
        self._sizes: dict[HostKind, int] = {"anonymous": 0, "mapped": 0, "pinned": 0}

    @property
    def pinned(self) -> int:
        """Bytes of all pinned blocks of activations."""
        return self._activations.total

    def hold(self, storage: torch.UntypedStorage, *, pinned: bool) -> None:
        """Count a new storage of activations until it dies."""
        needed = storage.nbytes()
        if not needed:
            return
        if pinned:
            if size := self._activations.take(needed):
                self.on_block(size)
            weakref.finalize(storage, self._activations.give_back, needed).atexit = False
        else:
            self._live += needed
            self.pageable = max(self.pageable, self._live)
            weakref.finalize(storage, self._release, needed).atexit = False

    def _release(self, size: int) -> None:
        self._live -= size

    def keep(self, key: int, size: int, *, pinned: bool) -> None:
        """Count a storage that is none of activations, until ``drop``; single numbers do not count."""
        if size <= _NUMBER_BYTES:
            return
        self.look()  # what there was until now belongs to this phase, too
        kind: HostKind = "pinned" if pinned else "mapped" if self.is_mapped else "anonymous"
        self._kinds[key] = kind, size
        if pinned:
            self._blocks.take(size)
        else:
            self._sizes[kind] += size
        self.look()

    @contextlib.contextmanager
    def reading(self, *, is_mapped: bool) -> Iterator[None]:
        """Count what is made in the block as weights in a file that the kernel maps, or not."""
        before, self.is_mapped = self.is_mapped, is_mapped
        try:
            yield
        finally:
            self.is_mapped = before

    def pass_through(self, size: int) -> None:
        """Count pages of files that are mapped for a moment, beside what is kept."""
        with self.reading(is_mapped=True):
            self.keep(_PASSING, size, pinned=False)
        self.drop(_PASSING)

    def drop(self, key: int) -> None:
        """Count a storage no longer: it is dead, or stands for memory of the GPU now."""
        if (found := self._kinds.pop(key, None)) is None:
            return
        self.look()
        kind, size = found
        if kind == "pinned":
            self._blocks.give_back(size)
        else:
            self._sizes[kind] -= size

    def look(self) -> None:
        """Note what is kept now, in the phase of the loop's stage; the stage ``host`` is one within a phase."""
        if (stage := self.stage()) != "host":
            self._phase = _PHASES.get(stage, "training")
        before, sizes = self.kept.get(self._phase, NOTHING_KEPT), self._sizes
        now = KeptOnHost(sizes["anonymous"], sizes["mapped"], self._blocks.total)
        self.kept[self._phase] = KeptOnHost(*map(max, before, now))


_PASSING = -1
"""Key of what no storage stands for."""
_NUMBER_BYTES = 16
"""Largest storage of a single number."""
_PHASES: dict[str, HostPhaseName] = {
    "load": "loading",
    "evaluation": "evaluation",
    "saving": "saving",
    "restoring": "restoring",
}
"""Phases of the host by stages of the loop; others are of the training's steps."""


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
        host_memory: Host memory that they stand for.
        pins: True while what is marked lies in pinned memory.
        is_leaving: True while tensors are made that count as the host's only until they arrive on the GPU.
    """

    def __init__(self) -> None:
        self.host_memory = HostMemory()
        self.pins = self.is_leaving = False
        self._nowhere: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._host: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._pinned: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._others: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    @contextlib.contextmanager
    def leaving(self) -> Iterator[None]:
        """Make tensors in the block that arrive on the GPU after it."""
        before, self.is_leaving = self.is_leaving, True
        try:
            yield
        finally:
            self.is_leaving = before

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Return whether a meta tensor stands for one in GPU memory."""
        return not self._host or storage_key(tensor) not in self._host

    def any_on_host(self) -> bool:
        """Return whether any meta tensor stands for one in host memory."""
        return bool(self._host)

    def is_host_key(self, key: int) -> bool:
        """Return whether the storage with this key stands for host memory."""
        return key in self._host

    def take_data(self, tensor: torch.Tensor) -> None:
        """Let a tensor be one of PyTorch's meta device, in place of weights that hooks keep elsewhere (accelerate)."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._nowhere[key] = weakref.ref(storage, forgetting(self._nowhere, key))

    def has_data(self, tensor: torch.Tensor) -> bool:
        """Return whether a meta tensor stands for one with data."""
        return not self._nowhere or storage_key(tensor) not in self._nowhere

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether a meta tensor stands for one in pinned host memory."""
        return bool(self._pinned) and storage_key(tensor) in self._pinned

    def mark_host(self, tensors: Iterable[torch.Tensor], *, pinned: bool = False, takes_memory: bool = True) -> None:
        """Let these meta tensors stand for tensors in host memory; of the meta device, they take none."""
        pinned = pinned or self.pins
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._host:
                self._host[key] = weakref.ref(storage, self._forgetting(key))
                if pinned:
                    self._pinned[key] = weakref.ref(storage, forgetting(self._pinned, key))
                if self.host_memory.counts:
                    self.host_memory.hold(storage, pinned=pinned)
                elif takes_memory and not self.is_leaving:
                    self.host_memory.keep(key, storage.nbytes(), pinned=pinned)

    def _forgetting(self, key: int) -> Callable[[object], None]:
        def forget(_: object) -> None:
            self._host.pop(key, None)
            self.host_memory.drop(key)

        return forget

    def mark_device(self, tensor: torch.Tensor) -> None:
        """Let a meta tensor stand for one in GPU memory."""
        key = storage_key(tensor)
        if self._host.pop(key, None) is not None:
            self.host_memory.drop(key)

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
