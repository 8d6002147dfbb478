"""How a training died, from what is left of it: an exit code, a line of the kernel's log, a message, ``memory.events``.

Each pattern is tried on the whole text; the kernel's own words decide over an exit code, which only says that it was
killed.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from trainatomy.doctor.gpu_checks import finding
from trainatomy.results.machine import Finding, MachineState
from trainatomy.units import human_bytes

_KIB = 1024
_MOST_CHARACTERS = 120
_LAST_LINES = 2000

_BY_GROUP = re.compile(
    r"memory cgroup out of memory|CONSTRAINT_MEMCG|OOMKilled|Detected \d+ oom[-_]kill event|oom-kill event\(?s?\)? in"
    r"|^oom_kill [1-9]|^oom_group_kill [1-9]|Exceeded (?:job|step) memory limit",
    re.IGNORECASE | re.MULTILINE,
)
"""Linux (mm/oom_kill.c, mm/memcontrol.c), Kubernetes, Slurm, and ``memory.events`` of control groups."""
_BY_MACHINE = re.compile(r"Out of memory: Killed process|CONSTRAINT_NONE|invoked oom-killer", re.IGNORECASE)
_SHARED = re.compile(
    r"killed by signal: Bus error|insufficient shared memory|unable to (?:write to|resize|mmap|allocate shared memory)"
    r"[^\n]*(?:/torch_|shm)|SIGBUS|exit ?code:?\s*\(?-7\b|exit(?:ed with)? (?:code|status) 135\b|^\(?(?:-7|135)\)?$"
    r"|No space left on device[^\n]*/dev/shm|/dev/shm[^\n]*No space left on device",
    re.IGNORECASE | re.MULTILINE,
)
"""PyTorch (torch/utils/data/_utils/signal_handling.py, aten/src/ATen/MapAllocator.cpp, 2.9-2.13)."""
_KILLED = re.compile(
    r"exit ?code\s*[:=]?\s*\(?-9\b|exit(?:ed with)? (?:code|status):? 137\b|status 137\b|SIGKILL|signal 9\b"
    r"|killed by signal: Killed|^\s*Killed\b|^\(?(?:-9|137)\)?$",
    re.IGNORECASE | re.MULTILINE,
)
_ALLOCATION = re.compile(
    r"DefaultCPUAllocator: (?:can't|not enough)|Cannot allocate memory|std::bad_alloc|^MemoryError|ArrayMemoryError",
    re.IGNORECASE | re.MULTILINE,
)
_DISK = re.compile(r"No space left on device|Disk quota exceeded|file write failed|PytorchStreamWriter failed")
_GPU = re.compile(r"CUDA out of memory|torch\.(?:cuda\.)?OutOfMemoryError|CUDA error: out of memory")
_VICTIM = re.compile(r"Killed process (?P<pid>\d+) \((?P<name>[^)]*)\)")
_HELD = re.compile(r"anon-rss:(\d+)kB")
_LIMIT = re.compile(r"memory: usage \d+kB, limit (\d+)kB")
_TRIED = re.compile(r"tried to allocate (\d+) bytes")
_WORKER = re.compile(r"DataLoader worker \(pid(?:\(s\))? (?P<pid>[\d, ]+)\)")


def check_death(machine: MachineState) -> Iterator[Finding]:
    """Yield which limit a training died of, as far as the text that was given says."""
    text, host = machine.died.strip(), machine.host
    if not text:
        return
    victim = _victim(text)
    is_killed = _KILLED.search(text) is not None
    if _BY_GROUP.search(text) or (is_killed and host.oom_kills and not _BY_MACHINE.search(text)):
        limit = _LIMIT.search(text)
        known = int(limit[1]) * _KIB if limit else host.memory_limit_bytes
        yield finding("died_of_group", limit=_size(known), victim=victim)
    elif _BY_MACHINE.search(text):
        yield finding("died_of_machine", limit=_size(host.memory_bytes), victim=victim)
    elif _SHARED.search(text):
        yield finding("died_of_shm", limit=_size(host.shm_bytes), victim=victim)
    elif is_killed:
        yield finding("died_by_kill", limit=_size(host.memory_limit_bytes or host.memory_bytes), victim=victim)
    elif _ALLOCATION.search(text):
        tried = _TRIED.search(text)
        yield finding("died_of_allocation", wanted=f" of {human_bytes(int(tried[1]))}" if tried else "")
    elif _GPU.search(text):
        yield finding("died_of_gpu")
    elif _DISK.search(text):
        yield finding("died_of_disk")
    else:
        yield finding("died_unknown", text=text.splitlines()[-1][:_MOST_CHARACTERS])


def last_words(given: str) -> str:
    """Return the text of a death: that of a file, of which the end, or what was given."""
    with suppress(OSError, ValueError):  # a text may be no name of a file
        if Path(given).is_file():
            with Path(given).open(errors="replace") as file:
                return "".join(deque(file, maxlen=_LAST_LINES))
    return given


def _size(size: int | None) -> str:
    return "of unknown size" if size is None else f"of {human_bytes(size)}"


def _victim(text: str) -> str:
    """Return the process that died, as far as the text names it, with the memory that was its own."""
    worker, victim, held = _WORKER.search(text), _VICTIM.search(text), _HELD.search(text)
    if worker is not None:
        return f"DataLoader worker {worker['pid'].strip(' ,')}"
    name = "the process" if victim is None else f"process {victim['pid']} ({victim['name']})"
    return name if held is None else f"{name} with {human_bytes(int(held[1]) * _KIB)} of its own"
