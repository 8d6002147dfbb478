"""What one process takes on the card while a training runs: the driver's figures now and then, and their maxima."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainatomy.measurement.device.nvml import NoAnswer
from trainatomy.measurement.device.processes import process_name
from trainatomy.results.measurement import OtherProcess, Stage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainatomy.measurement.device.nvml import Driver, NvmlDevice, Reading


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of ``Measurement`` that come from NVML; ``None``: the driver does not say, or the card is shared."""

    device_bytes: int | None
    process_bytes: int | None
    nvml_used_bytes: int | None
    idle_bytes: int | None
    context_bytes: int | None


class Meter:
    """Reads the card that CUDA chose; made before CUDA is initialised, so that its first readings are of idle cards.

    ``driver`` is ``None`` where NVML cannot be had: then everything is ``None``.  ``alone``: no other process uses the
    card, so that what the whole card holds says something about this process.  Other processes that NVML shows end
    that: then NVML's figure for this process counts.
    """

    def __init__(self, driver: Driver | None, *, alone: bool) -> None:
        self._alone = alone
        self._driver = driver
        self._idle = _readings(driver.cards) if driver else {}
        self._card: NvmlDevice | None = None
        self._readings: list[Reading] = []
        self._context: tuple[Reading, int] | None = None
        self._stages: list[tuple[str, Reading | None, int, int]] = []

    @property
    def device(self) -> NvmlDevice | None:
        """The card that is read."""
        return self._card

    @property
    def driver_version(self) -> str:
        """The driver's version."""
        return self._driver.version if self._driver else "unknown"

    def choose(self, uuid: str) -> None:
        """From now on read the card with this UUID, the one that CUDA gives for the device in use."""
        found = self._driver.device(uuid) if self._driver else None
        self._card = found if found is not None and found.uuid in self._idle else None
        self._stages.append(("idle", None if self._card is None else self._idle_reading(), 0, 0))

    def read(self) -> int | None:
        """Take a reading, which counts for the peak; returns what this process holds on the card now, bytes."""
        if self._card is None:
            return None
        self._readings.append(self._card.read())
        return self._held(self._readings[-1])

    def stage(self, name: str) -> int | None:
        """Take a reading and remember it as that of a stage."""
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
        """The largest readings, and what the first tensor cost."""
        if self._card is None or not self._readings:
            return DeviceMemory(None, None, None, None, None)
        own = [size for reading in self._readings if (size := self._process(reading)) is not None]
        process = max(own, default=None)
        held = None if self._context is None else self._held(self._context[0])
        context = None if held is None or self._context is None else held - self._context[1]
        if not self._alone or (self.neighbours() and process is not None):
            return DeviceMemory(process, process, None, None, context)
        used, idle = max(reading.used_bytes for reading in self._readings), self._idle_reading().used_bytes
        return DeviceMemory(used - idle, process, used, idle, context)

    def stages(self, peak_allocated_bytes: int, peak_reserved_bytes: int) -> tuple[Stage, ...]:
        """Each stage as read, and training at its peak."""
        peak = max(self._readings, key=lambda reading: self._held(reading) or 0, default=None)
        stages = [*self._stages, ("training", peak, peak_allocated_bytes, peak_reserved_bytes)]
        return tuple(
            Stage(name, self._at_stage(name, reading), reading.used_bytes if reading else None, allocated, reserved)
            for name, reading, allocated, reserved in stages
        )

    def neighbours(self) -> tuple[OtherProcess, ...]:
        """Other processes on the card during the run, the largest first."""
        found: dict[int, int | None] = {}
        readings = self._readings if self._card is None else [self._idle_reading(), *self._readings]
        for reading in readings:
            own = self._own_pid(reading)
            for pid, size in reading.processes:
                if pid != own:
                    found[pid] = max(found.get(pid) or 0, size or 0) or None
        named = [OtherProcess(pid, process_name(pid), size) for pid, size in found.items()]
        return tuple(sorted(named, key=lambda one: -(one.bytes or 0)))

    def notes(self) -> tuple[str, ...]:
        """What a reader must know of the figures."""
        if self._card is None:
            return ("NVML cannot be read here, so what the card holds beside PyTorch's memory is not known",)
        found = []
        if self._alone and (others := self.neighbours()):
            known = any(self._process(reading) is not None for reading in self._readings)
            how = (
                "device memory is the driver's figure for this process alone"
                if known
                else "the driver does not say what each process holds, so device memory is what the card holds more "
                "than before, and wrong if they took or gave back any meanwhile"
            )
            processes = "another process uses" if len(others) == 1 else f"{len(others)} other processes use"
            found.append(f"{processes} the card: {how}; times may be longer than on a card of one's own")
        if self._card.is_instance:
            found.append("the GPU is a MIG instance: a part of a card, with memory and multiprocessors of its own")
        return tuple(found)

    def _at_stage(self, name: str, reading: Reading | None) -> int | None:
        return None if reading is None else 0 if name == "idle" else self._held(reading)

    def _held(self, reading: Reading) -> int | None:
        """What this process holds: of a card that it has to itself, all that was not held before."""
        process = self._process(reading)
        if not self._alone or (process is not None and self._has_others(reading)):
            return process
        return reading.used_bytes - self._idle_reading().used_bytes

    def _has_others(self, reading: Reading) -> bool:
        own = self._own_pid(reading)
        return any(pid != own for pid, _ in (*reading.processes, *self._idle_reading().processes))

    def _process(self, reading: Reading) -> int | None:
        own = self._own_pid(reading)
        return next((size for pid, size in reading.processes if pid == own), None)

    def _own_pid(self, reading: Reading) -> int | None:
        """This process's id in the driver's eyes: in a container it may have another one, and then it is the one that
        came."""
        pids = {pid for pid, _ in reading.processes}
        if os.getpid() in pids:
            return os.getpid()
        came = pids - {pid for pid, _ in self._idle_reading().processes}
        return came.pop() if len(came) == 1 else None

    def _idle_reading(self) -> Reading:
        assert self._card is not None
        return self._idle[self._card.uuid]


def _readings(cards: Iterable[NvmlDevice]) -> dict[str, Reading]:
    """Of each card that can be read, by UUID: another one that cannot be read is none of a measurement's business."""
    found = {}
    for gpu in cards:
        with suppress(NoAnswer):
            found[gpu.uuid] = gpu.read()
    return found
