"""What the driver says about a card's memory, through NVML (the library that ``nvidia-smi`` is made of).

Three figures answer "how much is used", and they differ on purpose:

* ``nvmlDeviceGetMemoryInfo`` in its first form counts what the driver keeps for itself as *used*.  An idle H200 with
  driver 580 says 644,939,776 bytes although no process runs on it.
* Its second form (``nvmlDeviceGetMemoryInfo_v2``) reports that share apart, as *reserved*; its *used* is what
  ``nvidia-smi`` prints: 0 on the same idle card.
* ``nvmlDeviceGetComputeRunningProcesses`` says what each process holds.  It is the only figure that stays right while
  other processes use the card; inside some containers the driver answers "not available".

All sizes are bytes.  Nothing here initialises CUDA, so nothing here takes memory on the card.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainatomy.errors import DeviceError, MissingLibrary

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Reading:
    """Memory of one card at one moment. ``used_bytes``: first form of the call, the driver's share included;
    ``used_apart_bytes`` and ``driver_bytes``: second form; ``process_bytes``: this process alone. ``None``: not
    available.
    """

    used_bytes: int
    used_apart_bytes: int | None
    driver_bytes: int | None
    process_bytes: int | None


@dataclass(frozen=True, slots=True)
class Card:
    """One card as NVML knows it: its handle, UUID (``GPU-...``) and product name."""

    library: Any
    handle: Any
    uuid: str
    name: str

    def read(self, pid: int | None = None) -> Reading:
        """What the card holds now, and what process ``pid`` (default: this one) holds on it."""
        used_apart: int | None = None
        driver: int | None = None
        used = int(self.library.nvmlDeviceGetMemoryInfo(self.handle).used)
        try:
            apart = self.library.nvmlDeviceGetMemoryInfo(self.handle, version=self.library.nvmlMemory_v2)
            used_apart, driver = int(apart.used), int(apart.reserved)
        except (self.library.NVMLError, AttributeError, TypeError):  # driver before 510, or an old binding
            pass
        return Reading(used, used_apart, driver, self._process_bytes(os.getpid() if pid is None else pid))

    def _process_bytes(self, pid: int) -> int | None:
        try:
            processes = self.library.nvmlDeviceGetComputeRunningProcesses(self.handle)
        except self.library.NVMLError:
            return None
        return next((process.usedGpuMemory for process in processes if process.pid == pid), None)


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver's version and the cards that it shows, in PCI order (which is not always CUDA's order)."""

    version: str
    cards: tuple[Card, ...]

    def card(self, uuid: str) -> Card | None:
        """The card with the UUID that CUDA gives for a device, with or without the leading ``GPU-``."""
        return next((card for card in self.cards if card.uuid.removeprefix("GPU-") == uuid.removeprefix("GPU-")), None)


@contextmanager
def session() -> Iterator[Driver]:
    """NVML, opened and closed again.

    Raises ``MissingLibrary`` without the package nvidia-ml-py and ``DeviceError`` without a driver or a card.
    """
    library = _library()
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        raise DeviceError(f"No NVIDIA driver answers on this machine (NVML: {error}).") from error
    try:
        count = library.nvmlDeviceGetCount()
        if count == 0:
            raise DeviceError("The NVIDIA driver answers, but shows no GPU on this machine.")
        yield Driver(
            _text(library.nvmlSystemGetDriverVersion()), tuple(_card(library, index) for index in range(count))
        )
    finally:
        library.nvmlShutdown()


def _library() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise MissingLibrary("Reading a GPU's memory needs NVML's Python binding: pip install nvidia-ml-py") from error
    return pynvml


def _card(library: Any, index: int) -> Card:
    handle = library.nvmlDeviceGetHandleByIndex(index)
    return Card(library, handle, _text(library.nvmlDeviceGetUUID(handle)), _text(library.nvmlDeviceGetName(handle)))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
