"""Measure the GPU memory of this process while a training runs, by repeated NVML readings."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

from trainatomy.measurement.device.nvml import Driver, NoAnswer, NvmlDevice, Reading
from trainatomy.results.measurement import OtherProcess, Stage


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The byte counts of a ``Measurement`` that come from NVML; ``None``: not reported, or the GPU is shared."""

    device_bytes: int | None
    process_bytes: int | None
    nvml_used_bytes: int | None
    idle_bytes: int | None
    context_bytes: int | None


class Meter:
    """Meter of the memory of the GPU that CUDA chose.

    Make it before CUDA is initialised, so that its first readings are of idle GPUs.
    """

    def __init__(self, driver: Driver | None, *, is_exclusive: bool) -> None:
        """Read the idle GPUs.

        Args:
            driver: NVML; without it (``None``) every figure is ``None``.
            is_exclusive: No other process uses the GPU, so that its total says what this process holds.  If NVML shows
                other processes nevertheless, its figure for this process counts instead.
        """
        self._is_exclusive = is_exclusive
        self._driver = driver
        self._idle = _readings(driver.gpus) if driver else {}
        self._device: NvmlDevice | None = None
        self._readings: list[Reading] = []
        self._context: tuple[Reading, int] | None = None
        self._stages: list[tuple[str, Reading | None, int, int]] = []

    @property
    def device(self) -> NvmlDevice | None:
        """The GPU that is read."""
        return self._device

    @property
    def driver_version(self) -> str:
        """The driver's version."""
        return self._driver.version if self._driver else "unknown"

    def choose(self, uuid: str) -> None:
        """Read the GPU with this UUID from now on: the UUID that CUDA reports for the device in use."""
        found = self._driver.device(uuid) if self._driver else None
        self._device = found if found is not None and found.uuid in self._idle else None
        self._stages.append(("idle", None if self._device is None else self._idle_reading(), 0, 0))

    def read(self) -> int | None:
        """Take a reading, which counts for the peak; return the bytes that this process holds on the GPU."""
        if self._device is None:
            return None
        self._readings.append(self._device.read())
        return self._held(self._readings[-1])

    @contextmanager
    def reading_before_release(self) -> Iterator[None]:
        """Take a reading before each ``torch.cuda.empty_cache``, after which the peak could not be read any more."""
        release = torch.cuda.empty_cache

        def read_and_release() -> None:
            self.read()
            release()

        torch.cuda.empty_cache = read_and_release
        try:
            yield
        finally:
            torch.cuda.empty_cache = release

    def stage(self, name: str) -> int | None:
        """Take a reading and keep it as that of stage ``name``."""
        held = self.read()
        reading = self._readings[-1] if self._readings else None
        self._stages.append((name, reading, torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        return held

    def read_context(self, reserved_bytes: int) -> int | None:
        """Take the reading after the first tensor, when PyTorch's allocator holds ``reserved_bytes``."""
        held = self.stage("first tensor")
        if self._readings:
            self._context = (self._readings[-1], reserved_bytes)
        return held

    def result(self) -> DeviceMemory:
        """Return the largest readings, and the size of the CUDA context."""
        if self._device is None or not self._readings:
            return DeviceMemory(None, None, None, None, None)
        own = [size for reading in self._readings if (size := self._process(reading)) is not None]
        process = max(own, default=None)
        held = None if self._context is None else self._held(self._context[0])
        context = None if held is None or self._context is None else held - self._context[1]
        if not self._is_exclusive or (self.other_processes() and process is not None):
            return DeviceMemory(process, process, None, None, context)
        used, idle = max(reading.used_bytes for reading in self._readings), self._idle_reading().used_bytes
        return DeviceMemory(used - idle, process, used, idle, context)

    def stages(self, peak_allocated_bytes: int, peak_reserved_bytes: int) -> tuple[Stage, ...]:
        """Return the stages as read, and training at its peak."""
        peak = max(self._readings, key=lambda reading: self._held(reading) or 0, default=None)
        stages = [*self._stages, ("training", peak, peak_allocated_bytes, peak_reserved_bytes)]
        return tuple(
            Stage(name, self._held_at(name, reading), reading.used_bytes if reading else None, allocated, reserved)
            for name, reading, allocated, reserved in stages
        )

    def other_processes(self) -> tuple[OtherProcess, ...]:
        """Return the other processes that used the GPU during the run, largest first."""
        found: dict[int, int | None] = {}
        readings = self._readings if self._device is None else [self._idle_reading(), *self._readings]
        for reading in readings:
            own = self._own_pid(reading)
            for pid, size in reading.processes:
                if pid != own:
                    found[pid] = max(found.get(pid) or 0, size or 0) or None
        named = [OtherProcess(pid, process_name(pid), size) for pid, size in found.items()]
        return tuple(sorted(named, key=lambda one: -(one.bytes or 0)))

    def notes(self) -> tuple[str, ...]:
        """Return notes on how to read the figures."""
        if self._device is None:
            return ("NVML cannot be read here, so GPU memory outside of PyTorch's allocator is unknown",)
        found = []
        if self._is_exclusive and (others := self.other_processes()):
            is_known = any(self._process(reading) is not None for reading in self._readings)
            how = (
                "device memory is the driver's figure for this process alone"
                if is_known
                else "the driver does not report memory by process, so device memory is the increase of the GPU's "
                "total, which is wrong if they allocated or released any meanwhile"
            )
            processes = "another process uses" if len(others) == 1 else f"{len(others)} other processes use"
            found.append(f"{processes} the GPU: {how}; times may be longer than on an idle GPU")
        if self._device.is_instance:
            found.append("the GPU is a MIG instance: a part of a GPU, with its own memory and multiprocessors")
        return tuple(found)

    def _held_at(self, name: str, reading: Reading | None) -> int | None:
        return None if reading is None else 0 if name == "idle" else self._held(reading)

    def _held(self, reading: Reading) -> int | None:
        """Return the bytes of this process: on an exclusive GPU, the increase of the total since it was idle."""
        process = self._process(reading)
        if not self._is_exclusive or (process is not None and self._has_others(reading)):
            return process
        return reading.used_bytes - self._idle_reading().used_bytes

    def _has_others(self, reading: Reading) -> bool:
        own = self._own_pid(reading)
        return any(pid != own for pid, _ in (*reading.processes, *self._idle_reading().processes))

    def _process(self, reading: Reading) -> int | None:
        own = self._own_pid(reading)
        return next((size for pid, size in reading.processes if pid == own), None)

    def _own_pid(self, reading: Reading) -> int | None:
        """Return this process's id as the driver knows it.

        In a container it may be another number than ours: then it is the one process that appeared since the start.
        """
        pids = {pid for pid, _ in reading.processes}
        if os.getpid() in pids:
            return os.getpid()
        new = pids - {pid for pid, _ in self._idle_reading().processes}
        return new.pop() if len(new) == 1 else None

    def _idle_reading(self) -> Reading:
        assert self._device is not None
        return self._idle[self._device.uuid]


def _readings(devices: Iterable[NvmlDevice]) -> dict[str, Reading]:
    """Read each GPU, by UUID; one that cannot be read is left out, as it may not be the one in use."""
    found = {}
    for device in devices:
        with suppress(NoAnswer):
            found[device.uuid] = device.read()
    return found


def process_name(pid: int) -> str:
    """Return the name of process ``pid``, or an empty string if it is not visible here (another container)."""
    try:
        psutil = import_module("psutil")
    except ImportError:
        return _name_from_proc(pid)
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return ""


def _name_from_proc(pid: int) -> str:
    try:
        return Path("/proc", str(pid), "comm").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
