"""Split a GPU's memory, at this moment, into the driver's reservation, this process and other processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from trainatomy.errors import DeviceError, MissingLibrary
from trainatomy.measurement.device import nvml
from trainatomy.measurement.device.nvml import NvmlDevice
from trainatomy.results.measurement import Utilization
from trainatomy.units import human_bytes

_HOST_PID_NAMESPACE = "pid:[4026531836]"
"""The PID namespace of the machine itself: PROC_PID_INIT_INO in Linux's include/linux/proc_ns.h, the same since 3.8."""


def utilization(device: int | None = None) -> Utilization:
    """Read the memory of GPU ``device`` (default: CUDA's current one) without creating a context on it.

    Raises:
        DeviceError: There is no GPU.
    """
    is_started = torch.cuda.is_initialized()
    if not is_started and not torch.cuda.is_available():
        raise DeviceError("PyTorch finds no GPU on this machine, so there is no GPU memory to read.")
    index = (torch.cuda.current_device() if is_started else 0) if device is None else device
    properties = torch.cuda.get_device_properties(index)
    reserved = torch.cuda.memory_reserved(index) if is_started else 0
    allocated = torch.cuda.memory_allocated(index) if is_started else 0
    try:
        with nvml.session() as driver:
            gpu = driver.device(str(properties.uuid))
            held = _split(gpu, reserved) if gpu is not None else (None,) * 6
    except (MissingLibrary, DeviceError):
        held = (None,) * 6
    return Utilization(properties.name, *held, reserved, allocated, is_in_container())


def is_in_container() -> bool:
    """Return whether this process sees only the processes of its own container (a Linux PID namespace)."""
    try:
        return str(Path("/proc/self/ns/pid").readlink()) != _HOST_PID_NAMESPACE
    except OSError:
        return False


def _split(
    gpu: NvmlDevice, reserved: int
) -> tuple[int | None, int | None, int | None, int | None, int | None, int | None]:
    """Return used, driver, process, other processes, their number, and unlisted."""
    reading = gpu.read()
    apart, running = reading.used_apart_bytes, dict(reading.processes)
    own = os.getpid()
    if own not in running and reserved and len(running) == 1:
        own = next(iter(running))  # in a container the only process is ours, under the id that the host gave it
    process = running.pop(own, None)
    if apart is None or (reserved and process is None):
        return reading.used_bytes, reading.driver_bytes, process, None, None, None
    rest = max(0, apart - (process or 0))
    sizes = [size for size in running.values() if size is not None]
    if len(sizes) < len(running):
        return reading.used_bytes, reading.driver_bytes, process or 0, rest, len(running), None
    listed = min(rest, sum(sizes))
    return reading.used_bytes, reading.driver_bytes, process or 0, listed, len(running), rest - listed


def utilization_notes(before: Utilization, after: Utilization) -> Iterator[str]:
    """Yield notes on memory that a watched training's breakdown does not show, from readings before and after it."""
    if cached := before.reserved_bytes - before.allocated_bytes:
        yield (
            f"{human_bytes(cached)} were reserved but not allocated when the watch began; "
            "they count as reserved at the peak"
        )
    if after.unlisted_bytes and after.context_bytes is not None:
        yield _unlisted_note(after, after.unlisted_bytes, after.context_bytes)


def _unlisted_note(after: Utilization, count: int, context: int) -> str:
    """Explain memory that the GPU holds for no listed process.

    A little belongs to this process, because another one's context would take far more; more may be anybody's.
    """
    if count < context / 2:
        return (
            f"the driver counts {human_bytes(count)} on the GPU for no process; they belong to the context, "
            "where `trainatomy measure` and a prediction include them, and are not in this breakdown"
        )
    hidden = "; processes outside of this container are not listed" if after.can_hide else ""
    return f"the GPU holds {human_bytes(count)} for no process that NVML lists{hidden}; they are not in this breakdown"
