"""The GPUs of this machine and their connections, as the driver describes them.

A running training over some seconds, as NVML sees its GPUs and psutil its processes.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from trainatomy.errors import DeviceError, MissingLibrary, TrainatomyError
from trainatomy.measurement.device import nvml, state
from trainatomy.measurement.device import state as links
from trainatomy.measurement.device.meter import process_name
from trainatomy.measurement.device.nvml import NoAnswer, NvmlDevice
from trainatomy.measurement.device.power import read_power
from trainatomy.results.machine import GPUPair, GPUState, Process, Watched, WatchedGPU
from trainatomy.results.measurement import ClockReason


@dataclass(frozen=True, slots=True)
class DriverState:
    """The driver with its GPUs and their connections; ``error``: why it does not answer, empty if it does."""

    version: str | None = None
    cuda: tuple[int, int] | None = None
    error: str = ""
    gpus: tuple[GPUState, ...] = ()
    pairs: tuple[GPUPair, ...] = ()


def read_driver(wanted: Sequence[int] = ()) -> DriverState:
    """Return what the driver says.

    Args:
        wanted: Numbers of the GPUs as in nvidia-smi; all if empty.

    Raises:
        DeviceError: There is no GPU of a wanted number.
    """
    try:
        with nvml.session() as driver:
            gpus = tuple(gpu for gpu in driver.gpus if not gpu.is_instance)
            _check(wanted, len(gpus))
            chosen = tuple(index for index in range(len(gpus)) if not wanted or index in wanted)
            states = tuple(read_gpu(index, gpus[index]) for index in chosen)
            pairs = tuple(pair for pair in links.pairs(gpus) if pair.first in chosen and pair.second in chosen)
            return DriverState(driver.version, driver.cuda, "", states, pairs)
    except NoSuchGPU:
        raise
    except (DeviceError, MissingLibrary) as error:
        reason = str(error.__cause__ or error) if isinstance(error, NoAnswer) else str(error)
        if wanted:
            raise NoSuchGPU(f"--gpu {wanted[0]}: no GPU can be looked at: {reason}.") from error
        return DriverState(error=reason)


class NoSuchGPU(DeviceError):
    """There is no GPU of the number that was asked for."""


def _check(wanted: Sequence[int], count: int) -> None:
    if unknown := [index for index in wanted if index >= count]:
        raise NoSuchGPU(f"--gpu {unknown[0]}: this machine has {count} GPUs, numbered from 0 as in nvidia-smi.")


def read_gpu(index: int, gpu: NvmlDevice) -> GPUState:
    """Return the state of one GPU now."""
    total = gpu.ask("GetMemoryInfo")
    capability = gpu.ask("GetCudaComputeCapability")
    used, processes = _use(gpu)
    return GPUState(
        index=index,
        name=gpu.name,
        uuid=gpu.uuid,
        capability=(int(capability[0]), int(capability[1])) if capability else None,
        memory_bytes=None if total is None else int(total.total),
        used_bytes=used,
        persistence=state.is_on(gpu, "PersistenceMode"),
        compute_mode=state.compute_mode(gpu),
        mig=state.is_on(gpu, "MigMode"),
        near_cpus=links.near_cpus(gpu, os.cpu_count() or 1),
        utilisation=state.utilisation(gpu),
        power=state.power(gpu),
        clocks=state.clocks(gpu),
        temperature=state.temperature(gpu),
        pcie=links.pcie(gpu),
        nvlinks=links.nvlinks(gpu),
        memory=state.memory_health(gpu),
        processes=processes,
    )


def _use(gpu: NvmlDevice) -> tuple[int | None, tuple[Process, ...]]:
    """Return used memory as nvidia-smi shows it, and the compute processes, largest first."""
    try:
        reading = gpu.read()
    except NoAnswer:
        return None, ()
    used = reading.used_apart_bytes if reading.used_apart_bytes is not None else reading.used_bytes
    processes = (Process(pid, process_name(pid), size) for pid, size in reading.processes if pid != os.getpid())
    return used, tuple(sorted(processes, key=lambda each: -(each.bytes or 0)))


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
