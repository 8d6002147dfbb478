"""The host's bill: what the processes of a training hold of a machine's memory, /dev/shm and disk, phase by phase.

A predicted bill and a measured one have the same shape.  Parts of a predicted one are components, such as ``libraries``
or ``pinned``; a measured process has one part for each kind of memory, because the kernel knows no components.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from trainatomy.results.memory import Verdict

HostKind = Literal["anonymous", "mapped", "shared", "pinned"]
"""Memory as the kernel keeps it: anonymous (the heap), mapped files (which it can read again and so takes back), files
in /dev/shm that are mapped, and pinned for copies by the GPU."""

HostPhaseName = Literal["libraries", "loading", "training", "evaluation", "saving", "restoring"]

HOST_PHASES: tuple[HostPhaseName, ...] = ("libraries", "loading", "training", "evaluation", "saving", "restoring")
"""In the order of a training."""

HostRole = Literal["training", "worker", "other"]
"""A process of the training, a DataLoader's worker, or another process that it started."""

TIGHT_SHARE = 0.05
"""Share of a limit; with less left, a bill is ``tight``."""


class KeptOnHost(NamedTuple):
    """What a process keeps on the host in tensors, in bytes: pageable, in mapped files, and in pinned blocks."""

    anonymous: int
    mapped: int
    pinned: int


NOTHING_KEPT = KeptOnHost(0, 0, 0)


def block_bytes(needed: int) -> int:
    """Return the pinned block that PyTorch takes for so many bytes: the next power of two.

    Source: aten/src/ATen/core/CachingHostAllocator.h, ``allocate`` and ``get_free_block``, torch 2.9-2.13.
    """
    return 1 << (needed - 1).bit_length() if needed else 0


@dataclass(frozen=True, slots=True)
class HostPart:
    """A part of a process's resident memory.

    Attributes:
        component: What holds it, a key of ``reporters.host_sentences.COMPONENTS``; empty in a measurement.
        kind: How the kernel keeps it.
        bytes: Its size.
        inherited: Whether a fork shares it with another process, for which the host counts it.
        high_bytes: The most that it may be, where it is assumed; None: it is known or computed.
    """

    component: str
    kind: HostKind
    bytes: int
    inherited: bool = False
    high_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class HostProcess:
    """Processes of a host that hold alike.

    Attributes:
        role: What the process does.
        parts: What is resident in one of them.
        count: How many there are.
    """

    role: HostRole
    parts: tuple[HostPart, ...]
    count: int = 1

    @property
    def resident_bytes(self) -> int:
        """Resident memory of one of them (RSS), pinned memory included."""
        return sum(part.bytes for part in self.parts)

    @property
    def own_bytes(self) -> int:
        """What one of them adds to the host's memory, and the kernel cannot take back."""
        return _needed(self.parts, _bytes)

    def of_kind(self, kind: HostKind) -> int:
        """Return the bytes of a kind in one of them."""
        return sum(part.bytes for part in self.parts if part.kind == kind)


@dataclass(frozen=True, slots=True)
class HostPhase:
    """What the processes of one host hold in a phase of the training, at most.

    Attributes:
        name: The phase.
        processes: The processes.
        shm_bytes: Files in /dev/shm.
        disk_bytes: Files that the training has written to disk by then, together with those about to be deleted.
        group_bytes: What the control group of the processes charges; None in a prediction, or where none is known.
    """

    name: HostPhaseName
    processes: tuple[HostProcess, ...]
    shm_bytes: int = 0
    disk_bytes: int = 0
    group_bytes: int | None = None

    @property
    def fullest(self) -> HostProcess:
        """The process with the most resident memory."""
        return max(self.processes, key=lambda process: process.resident_bytes)

    @property
    def needed_bytes(self) -> int:
        """Memory of the host that the kernel cannot take back: what a limit has to leave room for."""
        return self._needed(_bytes)

    @property
    def high_bytes(self) -> int:
        """The most that ``needed_bytes`` may be, as far as parts of it are assumed."""
        return self._needed(_highest)

    @property
    def held_bytes(self) -> int:
        """Memory of the host with mapped files, each of which all processes share."""
        return self.needed_bytes + max(process.of_kind("mapped") for process in self.processes)

    def _needed(self, size: Callable[[HostPart], int]) -> int:
        return self.shm_bytes + sum(process.count * _needed(process.parts, size) for process in self.processes)


@dataclass(frozen=True, slots=True)
class HostLimits:
    """Limits of a host in bytes, each with where it is from; None: there is none, or it is not known."""

    memory_bytes: int | None = None
    memory_source: str = ""
    shm_bytes: int | None = None
    shm_source: str = ""
    disk_bytes: int | None = None
    disk_source: str = ""


@dataclass(frozen=True, slots=True)
class HostShortage:
    """A limit that a training passes: which one, in which phase, and by how much.

    Attributes:
        limit: The limit.
        phase: The phase with the most.
        component: What holds most of it; empty in a measurement.
        needed_bytes: What the phase needs.
        limit_bytes: What there is.
    """

    limit: Literal["memory", "shm", "disk"]
    phase: HostPhaseName
    component: str
    needed_bytes: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class HostRemedy:
    """A change that lowers a bill that is too high.

    Attributes:
        name: Which one, a key of ``reporters.host_sentences``.
        value: The setting's new value; None for a switch.
        needed_bytes: What the host needs with it: memory, or space of the limit that was passed.
        fits: Whether it is enough by itself.
    """

    name: str
    value: int | None
    needed_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class HostBill:
    """What a training takes of one host, in the order of its phases.

    Attributes:
        phases: The phases that it has.
        limits: What the host has.
        notes: What was assumed, and what is not counted.
        remedies: What would lower it, the largest effect first; of a bill that passes a limit.
    """

    phases: tuple[HostPhase, ...]
    limits: HostLimits = HostLimits()
    notes: tuple[str, ...] = ()
    remedies: tuple[HostRemedy, ...] = ()

    @property
    def fullest(self) -> HostPhase:
        """The phase in which the host needs the most memory."""
        return max(self.phases, key=lambda phase: phase.needed_bytes)

    @property
    def pinned_bytes(self) -> int:
        """The most memory that is pinned at once."""
        return max(sum(each.count * each.of_kind("pinned") for each in phase.processes) for phase in self.phases)

    @property
    def shortages(self) -> tuple[HostShortage, ...]:
        """The limits that are passed, memory first."""
        limits, found = self.limits, list[HostShortage]()
        if limits.memory_bytes is not None and self.fullest.needed_bytes > limits.memory_bytes:
            phase = self.fullest
            found.append(
                HostShortage("memory", phase.name, largest_component(phase), phase.needed_bytes, limits.memory_bytes)
            )
        fullest_shm = max(self.phases, key=lambda phase: phase.shm_bytes)
        if limits.shm_bytes is not None and fullest_shm.shm_bytes > limits.shm_bytes:
            shared = HostShortage("shm", fullest_shm.name, "batches", fullest_shm.shm_bytes, limits.shm_bytes)
            found.append(shared)
        fullest_disk = max(self.phases, key=lambda phase: phase.disk_bytes)
        if limits.disk_bytes is not None and fullest_disk.disk_bytes > limits.disk_bytes:
            what = "checkpoints" if fullest_disk.name == "saving" else "offloaded"
            found.append(HostShortage("disk", fullest_disk.name, what, fullest_disk.disk_bytes, limits.disk_bytes))
        return tuple(found)

    @property
    def verdict(self) -> Verdict | None:
        """Whether the host suffices; None where no limit is known."""
        if self.shortages:
            return "does not fit"
        if self.limits.memory_bytes is None:
            return None
        room = self.limits.memory_bytes - self.fullest.needed_bytes
        may_pass = max(phase.high_bytes for phase in self.phases) > self.limits.memory_bytes
        return "tight" if may_pass or room < TIGHT_SHARE * self.limits.memory_bytes else "fits"


def largest_component(phase: HostPhase) -> str:
    """Return the component that holds most of what a phase needs on the host; empty in a measurement."""
    sizes: dict[str, int] = {"batches": phase.shm_bytes}
    for process in phase.processes:
        for part in process.parts:
            sizes[part.component] = sizes.get(part.component, 0) + process.count * _needed([part], _bytes)
    return max(sizes, key=lambda name: sizes[name])


def _needed(parts: Iterable[HostPart], size: Callable[[HostPart], int]) -> int:
    """Return what parts add to the memory that a host cannot take back; /dev/shm is counted by its files."""
    return sum(size(part) for part in parts if part.kind in ("anonymous", "pinned") and not part.inherited)


def _bytes(part: HostPart) -> int:
    return part.bytes


def _highest(part: HostPart) -> int:
    return part.bytes if part.high_bytes is None else part.high_bytes
