"""The host's bill of a predicted training: what its processes take of a machine, phase by phase.

What an execution and its results say of the host is gathered as ``HostFacts``; the bill is a function of them, so that
a remedy is the bill of changed facts.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainatomy.catalog.host import (
    Footprint,
    cuda_footprint,
    footprint,
    libraries_footprint,
    steps_footprint,
)
from trainatomy.catalog.instances import find_instance
from trainatomy.errors import WorkloadError
from trainatomy.libraries import version_of
from trainatomy.measurement.proc import group_memory, memory_total, shared_memory_bytes
from trainatomy.requests.predicting import HERE
from trainatomy.results.host import (
    HostBill,
    HostLimits,
    HostPart,
    HostPhase,
    HostPhaseName,
    HostProcess,
    HostRemedy,
)
from trainatomy.units import human_bytes

if TYPE_CHECKING:
    from trainatomy.requests.predicting import PredictRequest
    from trainatomy.results.tasks import Checkpoint, RestoredCheckpoint
    from trainatomy.simulator.simulation import HostUse, Simulation
    from trainatomy.workload.schema import Workload

DEFAULT_PREFETCH = 2
"""Batches that a DataLoader's worker makes ahead (torch/utils/data/dataloader.py, 2.9-2.13)."""
AT_HAND = 2
"""Batches beside those made ahead: the one of the step, and the next one, which accelerate fetches before that step."""
NOTICEABLE_SHARE = 0.01
"""Share of what is needed that a remedy has to save to be named."""
DOCKER_SHM_BYTES = 64 << 20
"""Size of /dev/shm in a container of Docker without ``--shm-size``."""

NO_LIMITS = HostLimits()

_PAGE = 4096
_TOKEN_BYTES = 8
_TEXT_TENSORS = 3
"""Tensors of a batch of text: tokens, mask and labels."""
_STATES = {"sgd": 0, "adafactor": 0, "rmsprop": 1, "adagrad": 1, "lion": 1}
"""Values of an optimizer for each parameter, by the beginning of its name; Adam's two otherwise."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What decides about the host's bill; sizes in bytes, for each process unless something else is said.

    Attributes:
        libraries: Python and libraries.
        cuda: CUDA's context and libraries, and the most that they may take; None for a training on the CPU.
        processes: Processes of the training on each host.
        use: What the execution found.
        workers: DataLoader workers of each process.
        prefetch: Batches that each of them makes ahead.
        pins: Whether batches are copied to pinned memory.
        evaluates: Whether there are evaluations, which have workers of their own.
        dataset: A data set in Python's memory.
        states: Optimizer states beside the shards that are kept on the host.
        loaded_by: Processes of a host that load the weights.
        saved: Copies of weights and states while a checkpoint is saved.
        savers: Processes of a host that hold them.
        checkpoint: A checkpoint on disk.
        kept: Checkpoints that lie there at once; the new one is written before the oldest is deleted.
        restored: A checkpoint's file that is read.
        tensors: Of a training on the CPU, what would be on the GPU, by phase.
    """

    libraries: Footprint
    cuda: tuple[Footprint, Footprint] | None
    processes: int
    use: HostUse
    workers: int = 0
    prefetch: int = DEFAULT_PREFETCH
    pins: bool = False
    evaluates: bool = False
    dataset: int = 0
    states: int = 0
    loaded_by: int = 1
    saved: int = 0
    savers: int = 1
    checkpoint: int = 0
    kept: int = 1
    restored: int = 0
    tensors: Mapping[HostPhaseName, int] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        """Bytes of a batch."""
        return sum(self.use.batch)

    @property
    def ahead(self) -> int:
        """Batches that the workers of a process have made or make."""
        return self.workers * self.prefetch


def power_of_two(size: int) -> int:
    """Return the block that PyTorch pins for so many bytes (``CachingHostAllocator.h``, torch 2.9-2.13)."""
    return 1 << (size - 1).bit_length() if size else 0


def host_bill(facts: HostFacts, limits: HostLimits = NO_LIMITS) -> HostBill:
    """Return the bill of a training, with what would lower it where it passes a limit."""
    bill = HostBill(tuple(_phases(facts)), limits, tuple(_notes(facts)))
    return replace(bill, remedies=tuple(_remedies(facts, bill))) if bill.shortages else bill


def _phases(facts: HostFacts) -> Iterator[HostPhase]:
    imported = _libraries(facts)
    yield HostPhase("libraries", _alike(facts.processes, imported))
    yield _loading(facts)
    training = _in_steps(facts)
    workers, shm = _workers(facts), _shm(facts)
    of_training = [*_of_tensors(facts, "training"), *training]
    yield HostPhase("training", (*_alike(facts.processes, of_training), *workers), shm)
    disk = facts.checkpoint
    if facts.evaluates:
        outputs = [HostPart("outputs", "anonymous", facts.use.gathered)] if facts.use.gathered else []
        parts = [*_of_tensors(facts, "evaluation"), *training, *outputs]
        others = _workers(replace(facts, dataset=0))  # which have the evaluation's own data
        yield HostPhase("evaluation", (*_alike(facts.processes, parts), *workers, *others), 2 * shm)
    if facts.checkpoint:
        copies = [HostPart("checkpoint", "anonymous", facts.saved)] if facts.saved else []
        parts = [*_of_tensors(facts, "saving"), *training]
        processes = _some(facts.processes, facts.savers, parts, copies)
        yield HostPhase("saving", (*processes, *workers), shm, disk * (facts.kept + 1))
    if facts.restored:
        parts = [*_of_tensors(facts, "restoring"), *training, HostPart("checkpoint", "anonymous", facts.restored)]
        yield HostPhase("restoring", _alike(facts.processes, parts))


def _loading(facts: HostFacts) -> HostPhase:
    """Return the phase in which the weights are loaded, and moved to the GPU.

    transformers maps a file of safetensors and leaves weights there that it does not cast; moving them to a GPU reads
    the file, whose pages are resident until the last weight has left it (transformers 5.17, safetensors 0.8).
    """
    use, base = facts.use, [*_libraries(facts), *_cuda(facts), *_added(footprint("loading"))]
    if use.is_built:
        return HostPhase("loading", _alike(facts.processes, [*base, HostPart("weights", "anonymous", use.weights)]))
    is_cast, reads = use.stored != use.weights, facts.cuda is not None
    weights = [HostPart("weights", "mapped", use.stored)] if is_cast or reads else []
    weights += [HostPart("weights", "anonymous", use.weights)] if is_cast else []
    return HostPhase("loading", _some(facts.processes, facts.loaded_by, base, weights))


def _in_steps(facts: HostFacts) -> list[HostPart]:
    """Return what a process of the training holds from its first step on."""
    use = facts.use
    steps = steps_footprint("cpu" if facts.cuda is None else "cuda")
    parts = [*_libraries(facts), *_cuda(facts), *_added(footprint("loading").plus(steps))]
    if facts.dataset:
        parts.append(HostPart("dataset", "anonymous", facts.dataset))
    if facts.pins and facts.cuda is not None:
        blocks = sum(map(power_of_two, use.batch))
        parts.append(HostPart("batches", "pinned", blocks * (facts.ahead + AT_HAND)))
    else:
        parts.append(HostPart("batches", "anonymous", AT_HAND * facts.batch))
    parts += [HostPart("activations", "pinned", use.pinned), HostPart("activations", "anonymous", use.pageable)]
    if use.shards:
        blocks = 2 * sum(map(power_of_two, use.shards))  # parameters, and gradients that are copied without waiting
        parts += [HostPart("offloaded", "pinned", blocks), HostPart("offloaded", "anonymous", facts.states)]
    return [part for part in parts if part.bytes]


def _workers(facts: HostFacts) -> tuple[HostProcess, ...]:
    """Return the workers: forks, which share their parent's pages until one of the two writes them."""
    if not facts.workers:
        return ()
    own, inherited = footprint("worker"), facts.libraries.anonymous + footprint("loading").anonymous
    parts = [
        HostPart("libraries", "anonymous", max(inherited - own.anonymous, 0), inherited=True),
        HostPart("worker", "anonymous", own.anonymous),
        HostPart("libraries", "mapped", own.mapped),
        HostPart("batches", "anonymous", facts.batch),
        HostPart("dataset", "anonymous", facts.dataset),
    ]
    return (HostProcess("worker", tuple(part for part in parts if part.bytes), facts.workers * facts.processes),)


def _shm(facts: HostFacts) -> int:
    """Return the batches that wait in /dev/shm, each tensor in a file of whole pages, of all processes of a host."""
    if not facts.workers:
        return 0
    pages = sum(-(-size // _PAGE) * _PAGE for size in facts.use.batch)
    return facts.processes * pages * (facts.ahead + (0 if facts.pins and facts.cuda else AT_HAND))


def _libraries(facts: HostFacts) -> list[HostPart]:
    return _added(facts.libraries)


def _added(size: Footprint) -> list[HostPart]:
    return [HostPart("libraries", "anonymous", size.anonymous), HostPart("libraries", "mapped", size.mapped)]


def _cuda(facts: HostFacts) -> list[HostPart]:
    if facts.cuda is None:
        return []
    size, high = facts.cuda
    return [
        HostPart("cuda", "anonymous", size.anonymous, high_bytes=high.anonymous),
        HostPart("cuda", "mapped", size.mapped, high_bytes=high.mapped),
    ]


def _of_tensors(facts: HostFacts, phase: HostPhaseName) -> list[HostPart]:
    size = facts.tensors.get(phase, 0)
    return [HostPart("tensors", "anonymous", size)] if size else []


def _alike(count: int, parts: list[HostPart]) -> tuple[HostProcess, ...]:
    return (HostProcess("training", _merged(parts), count),)


def _some(count: int, with_more: int, parts: list[HostPart], more: list[HostPart]) -> tuple[HostProcess, ...]:
    """Return the processes of a host, of which the first ones hold more."""
    if not more or with_more >= count:
        return _alike(count, [*parts, *more])
    return (*_alike(with_more, [*parts, *more]), *_alike(count - with_more, parts))


def _merged(parts: list[HostPart]) -> tuple[HostPart, ...]:
    """Return the parts with one for each component and kind."""
    found: dict[tuple[str, str], HostPart] = {}
    for part in parts:
        before = found.get((part.component, part.kind))
        found[part.component, part.kind] = part if before is None else replace(part, bytes=before.bytes + part.bytes)
    return tuple(found.values())


def _notes(facts: HostFacts) -> Iterator[str]:
    """Yield what was assumed, and what is not counted."""
    yield (
        "packages are taken to be installed as on this machine; what your own code, metrics and loggers keep is not "
        "counted"
    )
    if not facts.dataset:
        yield (
            "the data set is taken to lie in Arrow files, which are mapped; one of Python objects takes its size once "
            "in the process and again in each worker (--dataset-memory)"
        )
    if facts.cuda is not None and facts.processes > 1:
        yield "what NCCL keeps on the host, some of it in /dev/shm, is not counted"
    if not facts.use.batch and facts.workers:
        yield "the size of a batch is not known for this loop, so that /dev/shm and pinned batches are not counted"
    if facts.workers and (shm := _shm(facts)) > DOCKER_SHM_BYTES:
        yield f"/dev/shm has 64 MiB in a container of Docker unless --shm-size says more: {human_bytes(shm)} are needed"
    if facts.checkpoint and facts.kept == 1:
        yield f"each further checkpoint that is kept takes {human_bytes(facts.checkpoint)} of disk space"


Change = Callable[[HostFacts], HostFacts]


def _remedies(facts: HostFacts, bill: HostBill) -> Iterator[HostRemedy]:
    """Yield the changes that lower the first limit that is passed, the largest effect first."""
    limit = bill.shortages[0].limit
    found = []
    for name, value, changed in _changes(facts):
        other = HostBill(tuple(_phases(changed)), bill.limits)
        needed, before = (_needs(each, limit) for each in (other, bill))
        if before - needed >= NOTICEABLE_SHARE * before:
            found.append(HostRemedy(name, value, needed, not other.shortages))
    yield from sorted(found, key=lambda remedy: (not remedy.fits, remedy.needed_bytes))


def _needs(bill: HostBill, limit: str) -> int:
    if limit == "memory":
        return bill.fullest.needed_bytes
    return max(phase.shm_bytes if limit == "shm" else phase.disk_bytes for phase in bill.phases)


def _changes(facts: HostFacts) -> Iterator[tuple[str, int | None, HostFacts]]:
    """Yield changes by their names in ``reporters.host_sentences``."""
    for workers in sorted({facts.workers // 2, facts.workers // 4, 0} - {facts.workers}, reverse=True):
        yield "workers", workers, replace(facts, workers=workers)
    if facts.workers and facts.prefetch > 1:
        yield "prefetch", 1, replace(facts, prefetch=1)
    if facts.pins:
        yield "pin_memory", None, replace(facts, pins=False)
    if facts.use.pinned or facts.use.pageable:
        yield "activations", None, replace(facts, use=replace(facts.use, pinned=0, pageable=0))
    if facts.loaded_by > 1:
        yield "rank0", None, replace(facts, loaded_by=1)
    if facts.saved and facts.processes > 1:
        yield "sharded", None, replace(facts, saved=facts.saved // facts.processes, savers=facts.processes)
    if facts.kept > 1:
        yield "keep", 1, replace(facts, kept=1)
    if facts.use.gathered:
        yield "accumulate_eval", None, replace(facts, use=replace(facts.use, gathered=0))


def host_bill_of(
    workload: Workload,
    simulation: Simulation,
    request: PredictRequest,
    checkpoint: Checkpoint | None,
    restored: tuple[RestoredCheckpoint, ...],
) -> HostBill | None:
    """Return the bill of a simulated training against the limits of its machine; None where none was looked at.

    Raises:
        WorkloadError: The limit is below what Python and its libraries take.
    """
    facts = facts_of(workload, simulation, checkpoint, restored, request.dataset_memory or 0)
    if facts is None:
        return None
    limits = limits_of(workload, request)
    if limits.memory_bytes is not None and limits.memory_bytes < (least := facts.libraries.anonymous):
        raise WorkloadError(
            f"{limits.memory_source}: {human_bytes(limits.memory_bytes)} of host memory are less than Python and its "
            f"libraries take in one process ({human_bytes(least)}): name the memory of the machine, such as 64 GiB"
        )
    return host_bill(facts, limits)


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
) -> HostFacts | None:
    """Return what decides about the bill of a simulated training; None where the execution did not look at the host."""
    train, parallel = workload.train, workload.parallel
    if simulation.host is None:
        return None
    use = _with_batch(simulation.host, workload, simulation)
    processes = 1 if parallel.devices > 1 else parallel.gpus
    config = train.fsdp_config or {}
    on_rank0 = bool(train.fsdp) and str(config.get("cpu_ram_efficient_loading", "")).lower() in ("true", "1")
    is_sharded = checkpoint is not None and checkpoint.is_sharded
    trains = workload.mode == "training"
    return HostFacts(
        libraries=libraries_footprint("cuda", lambda package: version_of(package) is not None),
        cuda=cuda_footprint(),
        processes=processes,
        use=use,
        workers=train.dataloader_num_workers,
        prefetch=train.dataloader_prefetch_factor or DEFAULT_PREFETCH,
        pins=train.dataloader_pin_memory,
        evaluates=simulation.evaluation is not None,
        dataset=dataset,
        states=_states(train.optim) * sum(use.shards) if trains else 0,
        loaded_by=1 if on_rank0 else processes,
        saved=0 if checkpoint is None else checkpoint.host_bytes or 0,
        savers=processes if is_sharded else 1,
        checkpoint=0 if checkpoint is None else checkpoint.total_bytes * (processes if is_sharded else 1),
        kept=1 if checkpoint is None else checkpoint.kept or 1,
        restored=max((each.host_bytes or 0 for each in restored), default=0),
    )


def _with_batch(use: HostUse, workload: Workload, simulation: Simulation) -> HostUse:
    """Return what was found, with a batch of token numbers where a library's loop made the batches."""
    if use.batch or simulation.tokens_per_sample is None:
        return use
    size = simulation.tokens_per_sample * workload.batch_size * _TOKEN_BYTES
    return replace(use, batch=(size,) * _TEXT_TENSORS)


def _states(optimizer: str) -> int:
    """Return how many values an optimizer keeps for each parameter."""
    name = optimizer.rpartition(":")[2].lower()
    return next((count for start, count in _STATES.items() if name.startswith(start)), 2)
