"""Resources that DataLoader workers take of this machine: processors, memory, /dev/shm."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def processors() -> int:
    """Return the processors that this process may use, by its affinity and its container's limit."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text(encoding="ascii").split()
        return max(min(count, math.floor(int(quota) / int(period))), 1)
    except (OSError, ValueError):  # no limit: "max 100000", or another version of cgroups
        return count


def free_shared_memory() -> int | None:
    """Return the free bytes in /dev/shm, in which workers hand batches over; ``None``: there is none."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def own_bytes(pids: Iterable[int]) -> int | None:
    """Return the memory that processes hold for themselves, without what a fork shares with its parent."""
    total = 0
    for pid in pids:
        try:
            lines = Path("/proc", str(pid), "smaps_rollup").read_text(encoding="ascii").splitlines()
        except OSError:
            return None
        own = (line for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))
        total += 1024 * sum(int(line.split()[1]) for line in own)
    return total
