"""Memory as Linux tells it: of processes, of control groups, of the machine and its /dev/shm."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

UNLIMITED = 1 << 60
"""Control groups of version 1 write a limit of nearly 2^63 where there is none."""

_KIB = 1024
_CACHE = ("inactive_file", "total_inactive_file")
"""Names of the file cache of control groups of version 2 and 1."""


class Resident(NamedTuple):
    """Resident memory of a process in bytes, as ``/proc/PID/status`` tells it, and its largest so far (``VmHWM``)."""

    anonymous: int
    mapped: int
    shared: int
    most: int

    @property
    def total(self) -> int:
        """All of it (``VmRSS``)."""
        return self.anonymous + self.mapped + self.shared


def resident(pid: int, root: Path = Path("/")) -> Resident | None:
    """Return the resident memory of a process, None where it is gone or the system has no ``/proc``."""
    fields = sizes_in(f"{root}/proc/{pid}/status")
    if "RssAnon" not in fields:
        return None
    return Resident(fields["RssAnon"], fields["RssFile"], fields["RssShmem"], fields["VmHWM"])


class Share(NamedTuple):
    """A process's share of resident memory, in which a page that processes share counts as a part for each (PSS).

    ``others`` are the bytes of its anonymous memory that count for other processes, with which a fork shares them.
    """

    total: int
    others: int


def share_of(pid: int, root: Path = Path("/")) -> Share | None:
    """Return a process's share; None where it is gone. The kernel walks all its pages: milliseconds for each GB."""
    fields = sizes_in(f"{root}/proc/{pid}/smaps_rollup")
    if "Pss" not in fields:
        return None
    return Share(fields["Pss"], max(fields["Anonymous"] - fields.get("Pss_Anon", fields["Anonymous"]), 0))


def children(pid: int, root: Path = Path("/")) -> Iterator[int]:
    """Yield the processes below a process, nearest first."""
    tasks = f"{root}/proc/{pid}/task"
    with suppress(OSError):
        for task in os.listdir(tasks):  # noqa: PTH208  a Path takes several times as long
            for child in map(int, _text(f"{tasks}/{task}/children").split()):
                yield child
                yield from children(child, root)


class GroupMemory(NamedTuple):
    """A control group's memory in bytes.

    Attributes:
        used: What it charges.
        cache: Of that, files that are given up when memory is short.
        limit: None: it sets none.
        kills: Processes that were killed for lack of it.
    """

    used: int
    cache: int
    limit: int | None
    kills: int


def group_memory(root: Path = Path("/")) -> GroupMemory | None:
    """Return the memory of this process's control group; of groups above it, the one with the lowest limit."""
    found = [each for each in map(_group, _group_folders(root)) if each is not None]
    return min(found, key=lambda group: UNLIMITED if group.limit is None else group.limit) if found else None


def _group_folders(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups, from its own up; version 2 before version 1."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        own = top / path.lstrip("/")
        while own != top and own.is_relative_to(top):
            yield own
            own = own.parent
    yield from (root / "sys/fs/cgroup", root / "sys/fs/cgroup/memory")


def _group(folder: Path) -> GroupMemory | None:
    """Return what a folder of version 2 or 1 says; None where it is none."""
    for used, limit, events in (
        ("memory.current", "memory.max", "memory.events"),
        ("memory.usage_in_bytes", "memory.limit_in_bytes", "memory.oom_control"),
    ):
        if (count := _number(folder / used)) is None:
            continue
        most, said = _number(folder / limit), _text(folder / events).split()
        kills = next((int(value) for name, value in pairwise(said) if name == "oom_kill"), 0)
        held = _text(folder / "memory.stat").split()
        cache = next((int(value) for name, value in pairwise(held) if name in _CACHE), 0)
        return GroupMemory(count, min(cache, count), None if most is None or most >= UNLIMITED else most, kills)
    return None


def memory_total(root: Path = Path("/")) -> int | None:
    """Return the memory of the machine; None where the system has no ``/proc``."""
    return sizes_in(root / "proc/meminfo").get("MemTotal")


def shared_memory_bytes(root: Path = Path("/")) -> tuple[int, int] | None:
    """Return the used and all bytes of /dev/shm; None where there is none."""
    try:
        found = os.statvfs(root / "dev/shm")
    except (OSError, AttributeError):
        return None
    return (found.f_blocks - found.f_bfree) * found.f_frsize, found.f_blocks * found.f_frsize


def folder_bytes(folder: Path) -> int:
    """Return the bytes of the files below a folder, some of which may be deleted meanwhile."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += Path(path, name).lstat().st_size
    return total


def sizes_in(path: Path | str) -> dict[str, int]:
    """Return the sizes in a file with lines such as ``VmRSS:  123 kB``, in bytes."""
    found = {}
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) == 3 and words[2] == "kB":
            found[words[0].rstrip(":")] = int(words[1]) * _KIB
    return found


def _text(path: Path | str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123  likewise
            return file.read()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None
