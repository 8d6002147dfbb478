"""A process group of any size in one process: its collectives complete at once, and nothing is sent."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import debug
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainatomy.simulator.topology import Topology


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
