"""The host's bill of a predicted training: what its processes take of a machine, phase by phase.

It is a function of ``HostFacts``, so that a remedy is the bill of changed facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from trainatomy.catalog.host import (
    Footprint,
    footprint,
    steps_footprint,
)
from trainatomy.errors import WorkloadError
from trainatomy.prediction.host_facts import NO_LIMITS, HostFacts, facts_of, limits_of
from trainatomy.requests.predicting import PredictRequest
from trainatomy.results.host import (
    NOTHING_KEPT,
    HostBill,
    HostKind,
    HostLimits,
    HostPart,
    HostPhase,
    HostPhaseName,
    HostProcess,
    HostRemedy,
    block_bytes,
)
from trainatomy.results.tasks import Checkpoint, RestoredCheckpoint
from trainatomy.units import human_bytes
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from trainatomy.simulator.simulation import Simulation

AT_HAND = 2
"""Batches beside those made ahead: the one of the step, and the next one, which accelerate fetches before that step."""
NOTICEABLE_SHARE = 0.01
"""Share of what is needed that a remedy has to save to be named."""
DOCKER_SHM_BYTES = 64 << 20
"""Size of /dev/shm in a container of Docker without ``--shm-size``."""

_PAGE = 4096


def host_bill(facts: HostFacts, limits: HostLimits = NO_LIMITS) -> HostBill:
    """Return the bill of a training, with what would lower it where it passes a limit."""
    bill = HostBill(tuple(_phases(facts)), limits, tuple(_notes(facts)))
    return replace(bill, remedies=tuple(_remedies(facts, bill))) if bill.shortages else bill


def _phases(facts: HostFacts) -> Iterator[HostPhase]:
    """Yield the phases, with the launcher in each."""
    launcher = () if facts.launcher is None else (HostProcess("other", tuple(_added(facts.launcher, "launcher"))),)
    for phase in _phases_of_ranks(facts):
        yield replace(phase, processes=(*phase.processes, *launcher))


def _phases_of_ranks(facts: HostFacts) -> Iterator[HostPhase]:
    yield HostPhase("libraries", _alike(facts.processes, _libraries(facts)))
    yield _loading(facts)
    workers, shm = _workers(facts), _shm(facts)
    drive = facts.processes * facts.use.on_drive
    yield HostPhase("training", (*_alike(facts.processes, _in_steps(facts, "training")), *workers), shm, drive)
    if facts.evaluates:
        outputs = [HostPart("outputs", "anonymous", facts.use.gathered)] if facts.use.gathered else []
        parts = [*_in_steps(facts, "evaluation"), *outputs]
        others = _workers(replace(facts, dataset=0))  # which have the evaluation's own data
        yield HostPhase("evaluation", (*_alike(facts.processes, parts), *workers, *others), 2 * shm, drive)
    if facts.checkpoint:
        copies = [HostPart("checkpoint", "anonymous", facts.saved)] if facts.saved else []
        processes = _some(facts.processes, facts.savers, _in_steps(facts, "saving"), copies)
        yield HostPhase("saving", (*processes, *workers), shm, facts.checkpoint * (facts.kept + 1) + drive)
    if facts.restored:
        parts = [*_in_steps(facts, "restoring"), HostPart("checkpoint", "anonymous", facts.restored)]
        yield HostPhase("restoring", _alike(facts.processes, parts))


def _loading(facts: HostFacts) -> HostPhase:
    """Return the phase in which the weights are loaded, and moved to the GPU.

    transformers maps a file of safetensors and leaves weights there that it does not cast; moving them to a GPU reads
    the file, whose pages are resident until the last weight has left it (transformers 5.17, safetensors 0.8).
    """
    context = [] if facts.cuda is None else _added(facts.cuda.context, "cuda")
    use, base = facts.use, [*_libraries(facts), *context, *_added(footprint("loading"))]
    if (kept := use.kept.get("loading")) is not None:
        kinds: tuple[HostKind, ...] = ("anonymous", "mapped", "pinned")
        parts = [HostPart("weights", kind, size) for kind, size in zip(kinds, kept, strict=True) if size]
        return HostPhase("loading", _alike(facts.processes, [*base, *parts]))
    if use.is_built:
        return HostPhase("loading", _alike(facts.processes, [*base, HostPart("weights", "anonymous", use.weights)]))
    is_cast, reads = use.stored != use.weights, facts.cuda is not None
    weights = [HostPart("weights", "mapped", use.stored)] if is_cast or reads else []
    weights += [HostPart("weights", "anonymous", use.weights)] if is_cast else []
    return HostPhase("loading", _some(facts.processes, facts.loaded_by, base, weights))


def _in_steps(facts: HostFacts, phase: HostPhaseName) -> list[HostPart]:
    """Return what a process of the training holds in a phase from its first step on."""
    use = facts.use
    steps = steps_footprint("cpu" if facts.cuda is None else "cuda")
    parts = [*_of_tensors(facts, phase), *_libraries(facts), *_cuda(facts), *_added(footprint("loading").plus(steps))]
    if facts.cuda is not None and facts.processes > 1:
        parts += _added(footprint("nccl"), "nccl")
    if facts.dataset:
        parts.append(HostPart("dataset", "anonymous", facts.dataset))
    if facts.pins and facts.cuda is not None:
        blocks = sum(map(block_bytes, use.batch))
        parts.append(HostPart("batches", "pinned", blocks * (facts.ahead + AT_HAND)))
    else:
        parts.append(HostPart("batches", "anonymous", AT_HAND * facts.batch))
    parts += [HostPart("activations", "pinned", use.pinned), HostPart("activations", "anonymous", use.pageable)]
    kept = use.kept.get(phase) or use.kept.get("training", NOTHING_KEPT)
    parts += [
        HostPart("offloaded", "pinned", kept.pinned),
        HostPart("offloaded", "anonymous", kept.anonymous),
        HostPart("offloaded", "mapped", kept.mapped),
        HostPart("paged", "anonymous", min(use.paged, facts.missing), high_bytes=use.paged),
    ]
    return [part for part in parts if part.bytes or part.high_bytes]


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


def _added(size: Footprint, component: str = "libraries") -> list[HostPart]:
    return [HostPart(component, "anonymous", size.anonymous), HostPart(component, "mapped", size.mapped)]


def _cuda(facts: HostFacts) -> list[HostPart]:
    if facts.cuda is None:
        return []
    size, most = facts.cuda.steps, facts.cuda.most
    return [
        HostPart("cuda", "anonymous", size.anonymous, high_bytes=most.anonymous),
        HostPart("cuda", "mapped", size.mapped, high_bytes=most.mapped),
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
        yield "NCCL is taken to keep what it kept in trainings on two GPUs; its files in /dev/shm are not counted"
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
    room: int,
) -> HostBill | None:
    """Return the bill of a simulated training against the limits of its machine; None where none was looked at.

    ``room`` is the memory that the training leaves of its GPU, in bytes, below 0 if it lacks some.

    Raises:
        WorkloadError: The limit is below what Python and its libraries take.
    """
    facts = facts_of(workload, simulation, checkpoint, restored, request.dataset_memory or 0, room)
    return None if facts is None else checked_bill(facts, limits_of(workload, request))


def checked_bill(facts: HostFacts, limits: HostLimits) -> HostBill:
    """Return the bill of a training against limits.

    Raises:
        WorkloadError: The limit is below what Python and its libraries take.
    """
    if limits.memory_bytes is not None and limits.memory_bytes < (least := facts.libraries.anonymous):
        raise WorkloadError(
            f"{limits.memory_source}: {human_bytes(limits.memory_bytes)} of host memory are less than Python and its "
            f"libraries take in one process ({human_bytes(least)}): name the memory of the machine, such as 64 GiB"
        )
    return host_bill(facts, limits)
