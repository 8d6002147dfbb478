"""Follow what the ranks of a recorded training communicate, so that its allocations get the labels of a simulated one.

PyTorch gives the address of neither a bucket nor a gathered weight.  But its Python calls every collective of FSDP,
ZeRO and pipelines with the tensors that it sends and receives, FSDP takes and frees gathered weights by resizing their
storages, and DDP allocates buckets where its reducer is made, and where that makes them anew.  The functions that do
so are replaced by ones that say so first; they allocate nothing and keep no tensor.

Sources: torch/csrc/distributed/c10d/init.cpp and reducer.cpp, torch/nn/parallel/distributed.py, torch/distributed/fsdp
(torch 2.9-2.13).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Protocol
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

_COLLECTIVES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)
"""Methods of a process group whose tensors are buffers.  What ``send`` sends is a stage's own output."""


class CommunicationObserver(Protocol):
    """Listener that is told of communication."""

    def communicates(self, tensors: list[torch.Tensor]) -> None:
        """Take note of the tensors of a collective that begins."""

    def gathered(self, storage: torch.UntypedStorage) -> None:
        """Take note of a storage that took memory for a whole weight."""

    def buckets_begin(self) -> None:
        """Take note that what is allocated until ``buckets_end`` are buckets."""

    def buckets_end(self) -> None:
        """Take note that they are allocated."""


@contextlib.contextmanager
def followed(observer: CommunicationObserver) -> Iterator[None]:
    """Tell ``observer`` of all communication in the block."""
    c10d: Any = torch._C._distributed_c10d
    with contextlib.ExitStack() as stack:

        def patch(target: Any, name: str, made: Callable[[Callable[..., Any], Any], Any]) -> None:
            if (original := getattr(target, name, None)) is not None:
                stack.enter_context(mock.patch.object(target, name, made(original, observer)))

        for name in _COLLECTIVES:
            patch(c10d.ProcessGroup, name, _collective)
        patch(torch.UntypedStorage, "resize_", _resizing)
        patch(c10d.Reducer, "_rebuild_buckets", _allocating_buckets)
        patch(dist, "Reducer", _allocating_buckets)
        patch(dist, "_broadcast_coalesced", _allocating_buckets)
        yield


def _collective(original: Callable[..., Any], observer: CommunicationObserver) -> Callable[..., Any]:
    """Return a collective that tells of its tensors."""

    def communicate(group: Any, *arguments: Any, **keywords: Any) -> Any:
        observer.communicates([one for one in tree_leaves((arguments, keywords)) if isinstance(one, torch.Tensor)])
        return original(group, *arguments, **keywords)

    return communicate


def _resizing(original: Callable[..., Any], observer: CommunicationObserver) -> Callable[..., Any]:
    """Return ``UntypedStorage.resize_`` that tells of storages that took memory."""

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        before = storage.nbytes()
        result = original(storage, size)
        if size and before != size:
            observer.gathered(storage)
        return result

    return resize_


def _allocating_buckets(original: Callable[..., Any], observer: CommunicationObserver) -> Callable[..., Any]:
    """Return a function that allocates buckets, between two notes."""

    @wraps(original)
    def allocate(*arguments: Any, **keywords: Any) -> Any:
        observer.buckets_begin()
        try:
            return original(*arguments, **keywords)
        finally:
            observer.buckets_end()

    return allocate
