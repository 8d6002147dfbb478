"""What a card's memory is made of at this moment: the driver's own, this process, other processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainatomy.errors import DeviceError, MissingLibrary
from trainatomy.gpu.card import nvml

if TYPE_CHECKING:
    from trainatomy.gpu.card.nvml import Card


@dataclass(frozen=True, slots=True)
class Utilization:
    """One card, bytes.  ``None``: the driver does not say.

    ``used_bytes``: NVML's figure, by the first form of the call, which is what the guides print; ``driver_bytes``: of
    it what the driver keeps for itself; ``process_bytes``: what this process holds; ``other_bytes``: what other
    processes hold, ``others`` how many they are; ``reserved_bytes`` and ``allocated_bytes``: what PyTorch's allocator
    in this process holds, and has handed out (0 before CUDA is used).
    """

    gpu: str
    used_bytes: int | None
    driver_bytes: int | None
    process_bytes: int | None
    other_bytes: int | None
    others: int | None
    reserved_bytes: int
    allocated_bytes: int

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
            card = driver.card(str(properties.uuid))
            held = _held(card, reserved) if card is not None else (None,) * 5
    except (MissingLibrary, DeviceError):
        held = (None,) * 5
    return Utilization(properties.name, *held, reserved, allocated)


def _held(card: Card, reserved: int) -> tuple[int | None, int | None, int | None, int | None, int | None]:
    """Used, the driver's own, this process, other processes, how many they are."""
    reading = card.read()
    process, apart, running = reading.process_bytes, reading.used_apart_bytes, reading.processes
    if process is None and reserved and len(running) == 1:
        process = running[0][1]  # in a container the one process is ours, under a number that only the host knows
    if apart is None or (reserved and process is None):
        return reading.used_bytes, reading.driver_bytes, process, None, None
    ours = process or 0
    others = len(running) - (process is not None) if running else None
    return reading.used_bytes, reading.driver_bytes, ours, max(0, apart - ours), others
