"""A process group of any size in one process: its collectives complete at once, and nothing is sent.

Place of a simulated process among the processes of a training.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import debug
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainatomy.errors import WorkloadError

_NO_LINKS: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class Topology:
    """Rank of one process, and the GPUs of the machines that the training runs on.

    Ranks are placed as ``torchrun`` does: one process for each GPU, machine after machine.

    Attributes:
        rank: Rank of this process, from 0.
        world_size: Number of processes.
        gpus_per_node: GPUs that each machine shows to a process (``torch.cuda.device_count()``).
        mesh: Dimensions of the device mesh as (name, size), outermost first; their product is ``world_size``.  Empty:
            one dimension.
        links: Bytes per second that a GPU sends over its links, by their names in the GPU's data file ("nvlink",
            "pcie"), and between machines ("network").
        devices: GPUs that this one process works on (``torch.nn.DataParallel``).
        device: Which of them is recorded, from 0.
        peer_access: True if a GPU copies from another one's memory without the host's.
        is_launched: True if a launcher started the process although it is alone, as DeepSpeed's engine needs it.
    """

    rank: int = 0
    world_size: int = 1
    gpus_per_node: int = 1
    mesh: tuple[tuple[str, int], ...] = ()
    links: Mapping[str, float] = field(default_factory=lambda: _NO_LINKS, hash=False)
    devices: int = 1
    device: int = 0
    peer_access: bool = True
    is_launched: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise WorkloadError(
                f"rank {self.rank} is not one of {self.world_size} processes (0 to {self.world_size - 1})"
            )
        if self.gpus_per_node < 1:
            raise WorkloadError(f"a machine has at least one GPU, not {self.gpus_per_node}")
        if not 0 <= self.device < self.devices:
            raise WorkloadError(f"GPU {self.device} is not one of {self.devices} (0 to {self.devices - 1})")
        size = 1
        for _, extent in self.mesh:
            size *= extent
        if self.mesh and size != self.world_size:
            shape = " x ".join(f"{name}={extent}" for name, extent in self.mesh)
            raise WorkloadError(f"a mesh of {shape} holds {size} processes, not {self.world_size}")

    @property
    def has_group(self) -> bool:
        """True if the process has a process group, perhaps of its own."""
        return self.world_size > 1 or self.is_launched

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine, which is also the index of its GPU."""
        return self.rank % self.gpus_per_node

    @property
    def node(self) -> int:
        """Index of the machine that this process runs on."""
        return self.rank // self.gpus_per_node

    def environment(self) -> dict[str, str]:
        """Return the variables that ``torchrun`` sets; none for a process without a group."""
        if not self.has_group:
            return {}
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(min(self.gpus_per_node, self.world_size - self.node * self.gpus_per_node)),
            "GROUP_RANK": str(self.node),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29500",
        }


@contextlib.contextmanager
def process_group(topology: Topology) -> Iterator[None]:
    """Make this process a rank of ``topology``; the variables that ``torchrun`` sets come with the topology.

    The backend ``fake`` belongs to PyTorch (torch/csrc/distributed/c10d/FakeProcessGroup.hpp): it knows ranks and
    subgroups, and moves no data.
    """
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    _forget_ranks()
    hook = sys.excepthook  # PyTorch replaces it by one that prints the rank before each line
    dist.init_process_group("fake", rank=topology.rank, world_size=topology.world_size, store=FakeStore())
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.excepthook = hook


def _forget_ranks() -> None:
    """Clear what torch remembers of operators with another rank's groups or device in it.

    DTensor keeps the results of sharding propagation, which name groups, and fake tensors keep outputs, which name the
    index of the GPU.
    """
    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()
    FakeTensorMode.cache_clear()
