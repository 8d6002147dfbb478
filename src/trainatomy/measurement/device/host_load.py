"""Load of this machine's processors by other work, from Linux's counters.

``/proc/stat`` counts the whole machine also inside most containers, and so shows neighbours that a container hides.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_STAT = Path("/proc/stat")
_CGROUP_STATS = (Path("/sys/fs/cgroup/cpu.stat"), Path("/sys/fs/cgroup/cpu/cpu.stat"))


@dataclass(frozen=True, slots=True)
class HostLoad:
    """The load of the processors over a stretch of time.

    Attributes:
        others_share: Time that processes other than this one were running, as a share of all processors' time;
            ``None``: not known (not Linux).
        stolen_share: Time that the machine's hypervisor gave to other machines, likewise.
        throttled_share: Share of the time in which the container's limit stopped its processes.
    """

    others_share: float | None
    stolen_share: float | None
    throttled_share: float


@dataclass(frozen=True, slots=True)
class _Counters:
    """Seconds so far: at work and stolen over all processors, of this process, and stopped by a limit."""

    at: float
    busy: float
    stolen: float
    own: float
    stopped: float
    processors: int


class LoadMeter:
    """Reads the load since it was made, or since it was last read."""

    def __init__(self) -> None:
        self._before = _read()

    def read(self) -> HostLoad:
        """Return the load since the last reading."""
        before, self._before = self._before, _read()
        after = self._before
        passed = after.at - before.at
        if not after.processors or passed <= 0:
            return HostLoad(None, None, 0.0)
        total = passed * after.processors
        others = max(after.busy - before.busy - (after.own - before.own), 0.0) / total
        stolen = max(after.stolen - before.stolen, 0.0) / total
        return HostLoad(min(others, 1.0), min(stolen, 1.0), min((after.stopped - before.stopped) / passed, 1.0))


def _read() -> _Counters:
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    busy, stolen, processors = _machine()
    return _Counters(time.monotonic(), busy, stolen, own, _stopped_seconds(), processors)


def _machine() -> tuple[float, float, int]:
    """Return seconds at work, seconds stolen, and the number of processors; zeros where there is no ``/proc/stat``."""
    try:
        lines = _STAT.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0, 0.0, 0
    user, nice, system, _idle, _waiting, irq, softirq, steal, *_ = map(int, lines[0].split()[1:])
    processors = sum(line.startswith("cpu") for line in lines[1:])
    return (user + nice + system + irq + softirq) / _TICKS_PER_SECOND, steal / _TICKS_PER_SECOND, processors


def _stopped_seconds() -> float:
    """Return for how long the limit of the container's processors has stopped it."""
    for path, unit in zip(_CGROUP_STATS, (1e-6, 1e-9), strict=True):
        try:
            values = dict(line.split() for line in path.read_text(encoding="ascii").splitlines())
        except (OSError, ValueError):
            continue
        return float(values.get("throttled_usec", values.get("throttled_time", 0))) * unit
    return 0.0
