"""What one process takes on the card while a training runs: the driver's figures now and then, and their maxima."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainatomy.gpu.nvml import Card, Driver, Reading


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
    card, so that what the whole card holds says something about this process.
    """

    def __init__(self, driver: Driver | None, *, alone: bool) -> None:
        self._alone = alone
        self._driver = driver
        self._idle = {card.uuid: card.read() for card in driver.cards} if driver else {}
        self._card: Card | None = None
        self._readings: list[Reading] = []
        self._context: tuple[Reading, int] | None = None

    def choose(self, uuid: str) -> None:
        """From now on read the card with this UUID, the one that CUDA gives for the device in use."""
        self._card = self._driver.card(uuid) if self._driver else None

    def read(self) -> None:
        """Take a reading; counts for the peak."""
        if self._card is not None:
            self._readings.append(self._card.read())

    def read_context(self, reserved_bytes: int) -> None:
        """Take the reading after the first tensor, when PyTorch's allocator holds ``reserved_bytes``."""
        self.read()
        if self._readings:
            self._context = (self._readings[-1], reserved_bytes)

    def result(self) -> DeviceMemory:
        """The largest readings, and what the first tensor cost."""
        if self._card is None or not self._readings:
            return DeviceMemory(None, None, None, None, None)
        process = max(
            (reading.process_bytes for reading in self._readings if reading.process_bytes is not None), default=None
        )
        context = self._held(*self._context) if self._context else None
        if not self._alone:
            return DeviceMemory(process, process, None, None, context)
        used, idle = max(reading.used_bytes for reading in self._readings), self._idle[self._card.uuid].used_bytes
        return DeviceMemory(used - idle, process, used, idle, context)

    def _held(self, reading: Reading, reserved_bytes: int) -> int | None:
        """What the process holds beyond ``reserved_bytes``."""
        assert self._card is not None
        if self._alone:
            return reading.used_bytes - self._idle[self._card.uuid].used_bytes - reserved_bytes
        return None if reading.process_bytes is None else reading.process_bytes - reserved_bytes
