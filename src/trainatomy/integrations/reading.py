"""What a card's memory is made of at this moment: the driver's own, this process, other processes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trainatomy.errors import DeviceError, MissingLibrary
from trainatomy.measurement.device import nvml

if TYPE_CHECKING:
    from trainatomy.measurement.device.nvml import NvmlDevice


INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""Of a machine itself: PROC_PID_INIT_INO in Linux's include/linux/proc_ns.h, the same since 3.8."""


@dataclass(frozen=True, slots=True)
class Utilization:
    """One card, bytes.  ``None``: the driver does not say.

    ``used_bytes``: NVML's figure, by the first form of the call, which is what the guides print; ``driver_bytes``: of
    it what the driver keeps for itself; ``process_bytes``: what this process holds; ``other_bytes``: what other
    processes hold that NVML lists, ``others`` how many they are; ``unlisted_bytes``: what the card holds besides, which
    is a part of this process's context that the driver counts for no process, and what processes hold that are not
    listed; ``can_hide``: processes outside of this container are not.  ``reserved_bytes`` and ``allocated_bytes``: what
    PyTorch's allocator in this process holds, and has handed out (0 before CUDA is used).
    """

    gpu: str
    used_bytes: int | None
    driver_bytes: int | None
    process_bytes: int | None
    other_bytes: int | None
    others: int | None
    unlisted_bytes: int | None
    reserved_bytes: int
    allocated_bytes: int
    can_hide: bool = False

    @property
    def context_bytes(self) -> int | None:
        """What the process holds outside of PyTorch's allocator: the CUDA context, kernels, libraries."""
        return None if self.process_bytes is None else max(0, self.process_bytes - self.reserved_bytes)


def utilization(device: int | None = None) -> Utilization:
    """Read the card that CUDA uses (``device``: its current one), without making a context on it.

    Raises ``DeviceError`` where there is no GPU.
    """
    started = torch.cuda.is_initialized()
    if not started and not torch.cuda.is_available():
        raise DeviceError("PyTorch finds no GPU on this machine, so there is no GPU memory to read.")
    index = (torch.cuda.current_device() if started else 0) if device is None else device
    properties = torch.cuda.get_device_properties(index)
    reserved = torch.cuda.memory_reserved(index) if started else 0
    allocated = torch.cuda.memory_allocated(index) if started else 0
    try:
        with nvml.session() as driver:
            gpu = driver.device(str(properties.uuid))
            held = _held(gpu, reserved) if gpu is not None else (None,) * 6
    except (MissingLibrary, DeviceError):
        held = (None,) * 6
    return Utilization(properties.name, *held, reserved, allocated, in_container())


def in_container() -> bool:
    """Whether this process sees no processes but those of its own container (a Linux namespace)."""
    try:
        return str(Path("/proc/self/ns/pid").readlink()) != INITIAL_PID_NAMESPACE
    except OSError:
        return False


def _held(
    gpu: NvmlDevice, reserved: int
) -> tuple[int | None, int | None, int | None, int | None, int | None, int | None]:
    """Used, the driver's own, this process, listed others and how many they are, unlisted."""
    reading = gpu.read()
    apart, running = reading.used_apart_bytes, dict(reading.processes)
    own = os.getpid()
    if own not in running and reserved and len(running) == 1:
        own = next(iter(running))  # in a container the one process is ours, under a number that only the host knows
    process = running.pop(own, None)
    if apart is None or (reserved and process is None):
        return reading.used_bytes, reading.driver_bytes, process, None, None, None
    rest = max(0, apart - (process or 0))
    told = [size for size in running.values() if size is not None]
    if len(told) < len(running):
        return reading.used_bytes, reading.driver_bytes, process or 0, rest, len(running), None
    listed = min(rest, sum(told))
    return reading.used_bytes, reading.driver_bytes, process or 0, listed, len(running), rest - listed
