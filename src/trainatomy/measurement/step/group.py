"""The process group of a rank whose training is measured.

Follow what the ranks of a recorded training communicate, so that its allocations get the labels of a simulated one.

PyTorch gives the address of neither a bucket nor a gathered weight.  But its Python calls every collective of FSDP,
ZeRO and pipelines with the tensors that it sends and receives, FSDP takes and frees gathered weights by resizing their
storages, and DDP allocates buckets where its reducer is made, and where that makes them anew.  The functions that do
so are replaced by ones that say so first; they allocate nothing and keep no tensor.

Sources: torch/csrc/distributed/c10d/init.cpp and reducer.cpp, torch/nn/parallel/distributed.py, torch/distributed/fsdp
(torch 2.9-2.13).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import init_process_group
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.utils._pytree import tree_leaves

from trainatomy.errors import DeviceError
from trainatomy.measurement.process.job import RUN_VARIABLE

if TYPE_CHECKING:
    from trainatomy.workload.parallel import ParallelSpec


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


BACKEND = "nccl"
OFFLOADING_BACKEND = "cpu:gloo,cuda:nccl"
"""With FSDP's weights in host memory, the norm of their gradients is a collective of the CPU."""
COLLECTIVE_SECONDS = 300.0
"""Seconds that a rank waits for the others before NCCL ends its process."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """This process among those of a training.

    Attributes:
        rank: Its number.
        local_rank: Its number on this machine, which is the index of its GPU.
        size: The number of processes.
        store: The store that all of them share (``torch.distributed.Store``); ``None`` for a process that is alone.
    """

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    store: Any = None

    def wait_for_all(self) -> None:
        """Wait until every rank has come here: a rank that ends takes memory with it that others may still read."""
        if self.store is not None:
            self.store.set(f"here {self.rank}", "")
            self.store.wait([f"here {rank}" for rank in range(self.size)])

    def agree(self, key: str, value: float) -> float:
        """Return rank 0's value in every rank, without using the GPU."""
        if self.store is None:
            return value
        if self.rank == 0:
            self.store.set(key, repr(value))
            return value
        return float(self.store.get(key))


def place_of(parallel: ParallelSpec) -> RankGroup:
    """Return the place that torchrun gave this process.

    Raises:
        DeviceError: torchrun did not start it, or not with as many processes as the training has.
    """
    if parallel.processes == 1:
        return RankGroup()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size != parallel.world_size:
        raise DeviceError(
            f"parallel.gpus: the training has {parallel.world_size} processes, and torchrun started {size}"
        )
    return RankGroup(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), size)


def join(place: RankGroup, *, offloads: bool = False) -> RankGroup:
    """Join the process group of this run; a process that is alone has none.

    Nobody leaves the group: that would wait for ranks that may have failed, and the process ends anyway.

    Args:
        place: The place of this process.
        offloads: The training keeps weights in host memory.
    """
    if place.size == 1:
        return place
    timeout = timedelta(seconds=COLLECTIVE_SECONDS)
    shared, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
    store = PrefixStore(f"run {os.environ.get(RUN_VARIABLE, '0')}", shared)
    backend = OFFLOADING_BACKEND if offloads else BACKEND
    init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return RankGroup(place.rank, place.local_rank, place.size, PrefixStore("trainatomy", store))


def join_alone() -> None:
    """Make a process group of this process alone, which DeepSpeed's engine needs on one GPU as well."""
    store: Any = dist.HashStore  # type: ignore[attr-defined]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    os.environ.update(alone)  # accelerate looks for them; nothing listens at the port
    dist.init_process_group(BACKEND, store=store(), rank=0, world_size=1)


def first_collective() -> None:
    """Run an all-reduce of one number, which makes NCCL connect the GPUs and take its memory."""
    dist.all_reduce(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()
