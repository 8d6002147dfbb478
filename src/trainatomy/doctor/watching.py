"""A running training over some seconds, as NVML sees its GPUs and psutil its processes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainatomy.errors import TrainatomyError
from trainatomy.measurement.device import nvml, state
from trainatomy.measurement.device.power import read_power
from trainatomy.results.machine import Watched, WatchedGPU
from trainatomy.results.power import ClockReason

if TYPE_CHECKING:
    from trainatomy.measurement.device.nvml import NvmlDevice

INTERVAL = 0.1
"""Seconds between readings: NVML's utilisation is over 1/6 to 1 s, so faster ones say nothing new."""


def watch(
    seconds: float, pid: int | None = None, wanted: Sequence[int] = (), sleep: Callable[[float], None] = time.sleep
) -> Watched:
    """Read the GPUs every tenth of a second.

    Args:
        seconds: How long.
        pid: The training; its children belong to it.
        wanted: Numbers of the GPUs; all if empty.
        sleep: What waits between two readings.

    Raises:
        TrainatomyError: There is no process ``pid``.
    """
    pids = _family(pid)
    spent = _cpu_seconds(pids)
    began = time.monotonic()
    with nvml.session() as driver:
        gpus = [gpu for gpu in driver.gpus if not gpu.is_instance]
        series = {index: Series() for index in range(len(gpus)) if not wanted or index in wanted}
        for _ in range(max(1, round(seconds / INTERVAL))):
            for index, one in series.items():
                one.add(gpus[index], pids)
            sleep(INTERVAL)
    passed = max(time.monotonic() - began, INTERVAL)
    used = _cpu_seconds(pids)
    cpus = None if spent is None or used is None else (used - spent) / passed
    return Watched(seconds, tuple(one.result(index) for index, one in series.items()), pid, cpus)


@dataclass(slots=True)
class Series:
    """Readings of one GPU."""

    utilisation: list[float] = field(default_factory=list)
    watts: list[float] = field(default_factory=list)
    clocks: list[float] = field(default_factory=list)
    temperatures: list[int] = field(default_factory=list)
    reasons: Counter[ClockReason] = field(default_factory=Counter)
    pid_bytes: int | None = None
    samples: int = 0

    def add(self, gpu: NvmlDevice, pids: frozenset[int]) -> None:
        """Read the GPU once."""
        self.samples += 1
        reading = read_power(gpu)
        self.reasons.update(reading.reasons)
        ran = state.utilisation(gpu)
        self.utilisation += [] if ran is None else [ran]
        self.watts += [] if reading.watts is None else [reading.watts]
        self.clocks += [] if reading.clock_mhz is None else [reading.clock_mhz]
        self.temperatures += [] if reading.celsius is None else [reading.celsius]
        try:
            sizes = [size or 0 for pid, size in gpu.read().processes if pid in pids]
        except nvml.NoAnswer:
            return
        if sizes:
            self.pid_bytes = max(self.pid_bytes or 0, sum(sizes))

    def result(self, index: int) -> WatchedGPU:
        """Return means, extremes and shares."""
        return WatchedGPU(
            index=index,
            samples=self.samples,
            utilisation=_mean(self.utilisation),
            watts=_mean(self.watts),
            sm_clock=_mean(self.clocks),
            hottest=max(self.temperatures, default=None),
            reasons={name: count / self.samples for name, count in self.reasons.items()},
            pid_bytes=self.pid_bytes,
        )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _family(pid: int | None) -> frozenset[int]:
    """Return a process and its descendants."""
    if pid is None:
        return frozenset()
    psutil: Any = import_module("psutil")
    try:
        process = psutil.Process(pid)
        return frozenset({pid, *(child.pid for child in process.children(recursive=True))})
    except psutil.Error as error:
        raise TrainatomyError(f"--watch-pid {pid}: there is no such process, or it is not yours ({error}).") from error


def _cpu_seconds(pids: frozenset[int]) -> float | None:
    """Return the processor time of processes so far."""
    if not pids:
        return None
    psutil: Any = import_module("psutil")
    total = 0.0
    for pid in pids:
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.Error:  # ended meanwhile
            continue
        total += times.user + times.system
    return total
