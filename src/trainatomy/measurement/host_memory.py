"""Measure what a training takes of its host: resident memory of its processes, its control group, /dev/shm and disk.

A thread reads ``/proc`` while the training runs, and reads less often the longer a reading takes, so that it uses at
most ``MAX_SHARE`` of one processor.  Between two readings nothing is lost of a process's peak: where a phase raised the
kernel's own high-water mark, that is the phase's peak.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainatomy.measurement.proc import (
    Resident,
    Share,
    children,
    folder_bytes,
    group_memory,
    resident,
    share_of,
    shared_memory_bytes,
)
from trainatomy.results.host import HOST_PHASES, HostBill, HostPart, HostPhase, HostPhaseName, HostProcess, HostRole

MAX_SHARE = 0.005
"""Share of the time that readings may take."""
PERIOD_SECONDS = 0.02
"""Shortest time between two readings."""


NOTHING = Resident(0, 0, 0, 0)


def _fuller(before: Resident, now: Resident) -> Resident:
    """Return the larger total of two, with the larger anonymous memory, which the kernel cannot take back."""
    total, anonymous = max(before.total, now.total), max(before.anonymous, now.anonymous)
    shared = min(max(before.shared, now.shared), total - anonymous)
    return Resident(anonymous, total - anonymous - shared, shared, max(before.most, now.most))


@dataclass
class _Most:
    """The most that was read in a phase.

    Attributes:
        process: The process's own memory at its fullest; of it, anonymous memory at its own.
        children: Each child's memory, likewise.
        shares: Shares of all processes when they were most, and largest: of this one, and of each child.
        pinned: Pinned memory.
        shm: Used bytes of /dev/shm.
        group: What the control group charges.
        disk: Files in the training's folder.
    """

    process: Resident = NOTHING
    children: dict[int, Resident] = field(default_factory=dict)
    shares: dict[int, Share] = field(default_factory=dict)
    pinned: int = 0
    shm: int = 0
    group: int = 0
    disk: int = 0


class HostSampler:
    """Reads what this process and its children take of the host, phase by phase, from ``start`` to ``stop``."""

    def __init__(
        self,
        *,
        pinned: Callable[[], int] = lambda: 0,
        folder: Path | None = None,
        max_share: float = MAX_SHARE,
        root: Path = Path("/"),
    ) -> None:
        """Prepare to read.

        Args:
            pinned: Returns the bytes of host memory that the process has pinned.
            folder: Where the training writes its checkpoints.
            max_share: Share of the time that readings may take.
            root: Where /proc, /sys and /dev are.
        """
        self._pinned, self._folder, self._max_share, self._root = pinned, folder, max_share, root
        self._pid = os.getpid()
        self._most: dict[HostPhaseName, _Most] = {}
        self._phase: HostPhaseName = "libraries"
        self._high_water = self._shm_before = self._disk_before = 0
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self.reading_seconds = 0.0

    def start(self, phase: HostPhaseName = "libraries") -> None:
        """Begin to read; does nothing on a system without ``/proc``."""
        if resident(self._pid, self._root) is None:
            return
        shm = shared_memory_bytes(self._root)
        self._shm_before = shm[0] if shm else 0
        self._disk_before = folder_bytes(self._folder) if self._folder is not None else 0
        self._enter(phase)
        self._thread = threading.Thread(target=self._follow, name="trainatomy host memory", daemon=True)
        self._thread.start()

    def phase(self, name: HostPhaseName) -> None:
        """Begin a phase; one that comes again goes on."""
        if self._thread is None or name == self._phase:
            return
        with self._lock:
            self._end_phase()
            self._enter(name)

    def stop(self) -> None:
        """Stop reading."""
        if self._thread is None or self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        with self._lock:
            self._end_phase()

    def bill(self) -> HostBill | None:
        """Return what was read so far; None where nothing could be."""
        if self._thread is None:
            return None
        with self._lock:
            if not self._ended.is_set():
                self._end_phase()
            return HostBill(
                tuple(_phase(name, self._most[name], self._pid) for name in HOST_PHASES if name in self._most)
            )

    def _enter(self, name: HostPhaseName) -> None:
        self._phase = name
        self._most.setdefault(name, _Most())
        found = resident(self._pid, self._root)
        self._high_water = found.most if found is not None else 0
        self._read(in_full=True)

    def _end_phase(self) -> None:
        self._read(in_full=True)
        most = self._most[self._phase]
        found = resident(self._pid, self._root)
        if found is not None and found.most > max(self._high_water, most.process.total):
            most.process = most.process._replace(mapped=found.most - most.process.anonymous - most.process.shared)
        if self._folder is not None:
            most.disk = max(most.disk, folder_bytes(self._folder) - self._disk_before)

    def _follow(self) -> None:
        pause, in_full = PERIOD_SECONDS, 0.0
        while not self._ended.wait(pause):
            began = time.thread_time()  # waiting for the interpreter costs the training nothing
            is_full = time.monotonic() >= in_full
            with self._lock:
                self._read(in_full=is_full)
            taken = time.thread_time() - began
            self.reading_seconds += taken
            if is_full:
                in_full = time.monotonic() + 2 * taken / self._max_share
            else:
                pause = max(PERIOD_SECONDS, 2 * taken / self._max_share)

    def _read(self, *, in_full: bool) -> None:
        """Take a reading; in full, also what costs the kernel a walk over all pages."""
        most = self._most[self._phase]
        own = resident(self._pid, self._root)
        if own is not None:
            most.process = _fuller(most.process, own)
        alive = list(children(self._pid, self._root))
        for pid in alive:
            found = resident(pid, self._root)
            if found is not None:
                most.children[pid] = _fuller(most.children.get(pid, NOTHING), found)
        most.pinned = max(most.pinned, self._pinned())
        if (shm := shared_memory_bytes(self._root)) is not None:
            most.shm = max(most.shm, shm[0] - self._shm_before)
        if alive and (in_full or len(alive) >= len(most.shares)):  # or a child is new, which may end soon
            self._read_shares(most, [self._pid, *alive])
        if in_full and (group := group_memory(self._root)) is not None:
            most.group = max(most.group, group.used)

    def _read_shares(self, most: _Most, processes: Iterable[int]) -> None:
        shares = {pid: found for pid in processes if (found := share_of(pid, self._root)) is not None}
        if (len(shares), _together(shares)) >= (len(most.shares), _together(most.shares)):
            most.shares = shares


def _together(shares: Mapping[int, Share]) -> int:
    return sum(share.total for share in shares.values())


def _phase(name: HostPhaseName, most: _Most, pid: int) -> HostPhase:
    processes = [_process("training", most.process, most.shares.get(pid), most.pinned)]
    workers = [child for child in most.children if child in most.shares] or list(most.children)
    processes += [_process("worker", most.children[child], most.shares.get(child)) for child in workers]
    return HostPhase(name, tuple(processes), max(most.shm, 0), max(most.disk, 0), most.group or None)


def _process(role: HostRole, held: Resident, share: Share | None, pinned: int = 0) -> HostProcess:
    others = 0 if share is None else min(share.others, held.anonymous)
    parts = [
        HostPart("", "anonymous", held.anonymous - others),
        HostPart("", "anonymous", others, inherited=True),
        HostPart("", "mapped", held.mapped),
        HostPart("", "shared", max(held.shared - pinned, 0)),  # on an H200's host, CUDA's pinned memory is shared
        HostPart("", "pinned", pinned),
    ]
    return HostProcess(role, tuple(part for part in parts if part.bytes))
