"""The process group of a rank whose training is measured."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from trainatomy.errors import DeviceError
from trainatomy.measurement.process.job import RUN_VARIABLE

if TYPE_CHECKING:
    from trainatomy.workload.parallel import ParallelSpec

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
    from torch.distributed import init_process_group
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    timeout = timedelta(seconds=COLLECTIVE_SECONDS)
    shared, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
    store = PrefixStore(f"run {os.environ.get(RUN_VARIABLE, '0')}", shared)
    backend = OFFLOADING_BACKEND if offloads else BACKEND
    init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return RankGroup(place.rank, place.local_rank, place.size, PrefixStore("trainatomy", store))


def join_alone() -> None:
    """Make a process group of this process alone, which DeepSpeed's engine needs on one GPU as well."""
    import torch.distributed as dist

    store: Any = dist.HashStore  # type: ignore[attr-defined]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    os.environ.update(alone)  # accelerate looks for them; nothing listens at the port
    dist.init_process_group(BACKEND, store=store(), rank=0, world_size=1)


def first_collective() -> None:
    """Run an all-reduce of one number, which makes NCCL connect the GPUs and take its memory."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()
