"""What decides about the host's bill of a training: what its execution found, its settings, its machine's limits."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainatomy.catalog.host import CudaFootprint, Footprint, launcher_footprint, libraries_footprint
from trainatomy.catalog.instances import find_instance
from trainatomy.libraries import version_of
from trainatomy.measurement.proc import group_memory, memory_total, shared_memory_bytes
from trainatomy.requests.predicting import HERE, PredictRequest
from trainatomy.results.host import HostLimits, HostPhaseName
from trainatomy.results.tasks import Checkpoint, RestoredCheckpoint
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from trainatomy.simulator.simulation import HostUse, Simulation

DEFAULT_PREFETCH = 2
"""Batches that a DataLoader's worker makes ahead (torch/utils/data/dataloader.py, 2.9-2.13)."""
NO_LIMITS = HostLimits()

_TOKEN_BYTES = 8
_TEXT_TENSORS = 3
"""Tensors of a batch of text: tokens, mask and labels."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What decides about the host's bill; sizes in bytes, for each process unless something else is said.

    Attributes:
        libraries: Python and libraries.
        cuda: What CUDA adds to a process; None for a training on the CPU.
        processes: Processes of the training on each host.
        use: What the execution found.
        workers: DataLoader workers of each process.
        prefetch: Batches that each of them makes ahead.
        pins: Whether batches are copied to pinned memory.
        evaluates: Whether there are evaluations, which have workers of their own.
        dataset: A data set in Python's memory.
        loaded_by: Processes of a host that load the weights.
        saved: Copies of weights and states while a checkpoint is saved.
        savers: Processes of a host that hold them.
        checkpoint: A checkpoint on disk.
        kept: Checkpoints that lie there at once; the new one is written before the oldest is deleted.
        restored: A checkpoint's file that is read.
        tensors: Of a training on the CPU, what would be on the GPU, by phase.
        missing: What the GPU lacks for paged states, which the driver keeps on the host then.
        launcher: The process that starts those of a training on several GPUs; None: there is none.
    """

    libraries: Footprint
    cuda: CudaFootprint | None
    processes: int
    use: HostUse
    workers: int = 0
    prefetch: int = DEFAULT_PREFETCH
    pins: bool = False
    evaluates: bool = False
    dataset: int = 0
    loaded_by: int = 1
    saved: int = 0
    savers: int = 1
    checkpoint: int = 0
    kept: int = 1
    restored: int = 0
    tensors: Mapping[HostPhaseName, int] = field(default_factory=dict)
    missing: int = 0
    launcher: Footprint | None = None

    @property
    def batch(self) -> int:
        """Bytes of a batch."""
        return sum(self.use.batch)

    @property
    def ahead(self) -> int:
        """Batches that the workers of a process have made or make."""
        return self.workers * self.prefetch


def limits_of(workload: Workload, request: PredictRequest) -> HostLimits:
    """Return the limits of a training's machine, as far as they are known."""
    if request.host_memory == HERE:
        return limits_here(Path(os.curdir))
    if isinstance(request.host_memory, int):
        return HostLimits(request.host_memory, "--host-memory")
    if workload.instance is None:
        return NO_LIMITS
    return HostLimits(find_instance(workload.instance).host_memory_bytes, workload.instance)


def limits_here(folder: Path, root: Path = Path("/")) -> HostLimits:
    """Return the limits of this machine, and of the control group of this process.

    Args:
        folder: Where checkpoints are to be written.
        root: Where /proc, /sys and /dev are.
    """
    total, group, shm = memory_total(root), group_memory(root), shared_memory_bytes(root)
    memory, source = total, "this machine"
    if group is not None and group.limit is not None and (total is None or group.limit < total):
        memory, source = group.limit, "the limit of this process's control group"
    free = shutil.disk_usage(folder).free
    return HostLimits(
        memory,
        source,
        0 if shm is None else shm[1],
        "this machine has none" if shm is None else "/dev/shm of this machine",
        free,
        f"free in {folder.resolve()}",
    )


def facts_of(
    workload: Workload,
    simulation: Simulation,
    checkpoint: Checkpoint | None,
    restored: tuple[RestoredCheckpoint, ...],
    dataset: int = 0,
    room: int = 0,
) -> HostFacts | None:
    """Return what decides about the bill of a simulated training; None where the execution did not look at the host.

    ``room`` is the memory that the training leaves of its GPU besides paged states.
    """
    train, parallel = workload.train, workload.parallel
    if simulation.host is None:
        return None
    use = _with_batch(simulation.host, workload, simulation)
    processes = 1 if parallel.devices > 1 else parallel.gpus
    config = train.fsdp_config or {}
    on_rank0 = bool(train.fsdp) and str(config.get("cpu_ram_efficient_loading", "")).lower() in ("true", "1")
    is_sharded = checkpoint is not None and checkpoint.is_sharded
    return HostFacts(
        libraries=libraries_footprint("cuda", lambda package: version_of(package) is not None),
        cuda=CudaFootprint.known(),
        processes=processes,
        use=use,
        workers=train.dataloader_num_workers,
        prefetch=train.dataloader_prefetch_factor or DEFAULT_PREFETCH,
        pins=train.dataloader_pin_memory,
        evaluates=simulation.evaluation is not None,
        dataset=dataset,
        loaded_by=1 if on_rank0 else processes,
        saved=0 if checkpoint is None else checkpoint.host_bytes or 0,
        savers=processes if is_sharded else 1,
        checkpoint=0 if checkpoint is None else checkpoint.disk_bytes * (processes if is_sharded else 1),
        kept=1 if checkpoint is None else checkpoint.kept or 1,
        restored=max((each.host_bytes or 0 for each in restored), default=0),
        missing=max(use.paged - max(room, 0), 0),
        launcher=launcher_footprint() if processes > 1 else None,
    )


def _with_batch(use: HostUse, workload: Workload, simulation: Simulation) -> HostUse:
    """Return what was found, with a batch of token numbers where a library's loop made the batches."""
    if use.batch or simulation.tokens_per_sample is None:
        return use
    size = simulation.tokens_per_sample * workload.batch_size * _TOKEN_BYTES
    return replace(use, batch=(size,) * _TEXT_TENSORS)
