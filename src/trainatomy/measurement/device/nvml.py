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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from trainatomy.errors import DeviceError, MissingLibrary

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Reading:
    """Memory of one card at one moment. ``used_bytes``: first form of the call, the driver's share included;
    ``used_apart_bytes`` and ``driver_bytes``: second form; ``process_bytes``: this process alone; ``processes``: id and
    bytes of each process that the driver shows. ``None``: not available.
    """

    used_bytes: int
    used_apart_bytes: int | None
    driver_bytes: int | None
    process_bytes: int | None
    processes: tuple[tuple[int, int | None], ...] = ()


@dataclass(frozen=True, slots=True)
class NvmlDevice:
    """One card as NVML knows it: its handle, UUID (``GPU-...``, an instance of a card's: ``MIG-...``), product name."""

    binding: Any
    handle: Any
    uuid: str
    name: str

    @property
    def is_instance(self) -> bool:
        """Whether this is a MIG instance, a part of a card with memory of its own."""
        return self.uuid.startswith("MIG-")

    def read(self, pid: int | None = None) -> Reading:
        """What the card holds now, and what process ``pid`` (default: this one) holds on it.

        Raises ``NoAnswer`` where the driver does not say: of a card that is lost, one that shares the host's memory, or
        one that is split into MIG instances of which only some are this user's.
        """
        used_apart: int | None = None
        driver: int | None = None
        try:
            used = int(self.binding.nvmlDeviceGetMemoryInfo(self.handle).used)
        except self.binding.NVMLError as error:
            raise NoAnswer(f"The NVIDIA driver does not say what {self.name} ({self.uuid}) holds: {error}.") from error
        try:
            apart = self.binding.nvmlDeviceGetMemoryInfo(self.handle, version=self.binding.nvmlMemory_v2)
            used_apart, driver = int(apart.used), int(apart.reserved)
        except (self.binding.NVMLError, AttributeError, TypeError):  # driver before 510, or an old binding
            pass
        processes = self._processes()
        pid = os.getpid() if pid is None else pid
        own = next((size for found, size in processes if found == pid), None)
        return Reading(used, used_apart, driver, own, processes)

    def _processes(self) -> tuple[tuple[int, int | None], ...]:
        """What computes on the card; what only draws there (a desktop) holds what it held before."""
        try:
            found = self.binding.nvmlDeviceGetComputeRunningProcesses(self.handle)
        except self.binding.NVMLError:
            return ()
        return tuple((int(process.pid), process.usedGpuMemory) for process in found)


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver's version and the cards that it shows, in PCI order (which is not always CUDA's order).

    A card that is split into MIG instances is followed by them.
    """

    version: str
    cards: tuple[NvmlDevice, ...]

    def device(self, uuid: str) -> NvmlDevice | None:
        """The card, or MIG instance, with the UUID that CUDA gives for a device, with or without ``GPU-`` or ``MIG-``.

        For an instance CUDA may give its card's UUID: then it is the instance that ``CUDA_VISIBLE_DEVICES`` names, or
        the only one.
        """
        found = next((card for card in self.cards if _bare(card.uuid) == _bare(uuid)), None)
        instances = self._instances_of(found)
        if not instances:
            return found
        wanted = _bare(os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0])
        named = [card for card in instances if _bare(card.uuid) == wanted]
        return named[0] if named else instances[0] if len(instances) == 1 else found

    def _instances_of(self, card: NvmlDevice | None) -> list[NvmlDevice]:
        if card is None or card.is_instance:
            return []
        after = self.cards[self.cards.index(card) + 1 :]
        return list(takewhile(lambda other: other.is_instance, after))


class NoAnswer(DeviceError):
    """NVML does not start (there is no driver, or some container lacks NVML only), or says nothing of a card."""


@contextmanager
def session() -> Iterator[Driver]:
    """NVML, opened and closed again.

    Raises ``MissingLibrary`` without the package nvidia-ml-py, ``NoAnswer`` where NVML does not start, ``DeviceError``
    without a card.
    """
    library = _library()
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        raise NoAnswer(f"No NVIDIA driver answers on this machine (NVML: {error}).") from error
    try:
        count = library.nvmlDeviceGetCount()
        cards = tuple(card for index in range(count) for card in _cards(library, index))
        if not cards:
            raise DeviceError("The NVIDIA driver answers, but shows no GPU on this machine.")
        yield Driver(_text(library.nvmlSystemGetDriverVersion()), cards)
    finally:
        library.nvmlShutdown()


def _library() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise MissingLibrary("Reading a GPU's memory needs NVML's Python binding: pip install nvidia-ml-py") from error
    return pynvml


def _cards(library: Any, index: int) -> Iterator[NvmlDevice]:
    """The card of that index, and its MIG instances; none of a card that is lost or that this user may not see."""
    with suppress(library.NVMLError):
        handle = library.nvmlDeviceGetHandleByIndex(index)
        yield _card(library, handle)
        for instance in _instances(library, handle):
            yield _card(library, instance)


def _instances(library: Any, handle: Any) -> Iterator[Any]:
    """Handles of a card's MIG instances; none where the card, the driver or the binding knows no MIG."""
    try:
        if library.nvmlDeviceGetMigMode(handle)[0] == 0:
            return
        places = library.nvmlDeviceGetMaxMigDeviceCount(handle)
    except (library.NVMLError, AttributeError):
        return
    for place in range(places):
        with suppress(library.NVMLError):  # a place without an instance
            yield library.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)


def _card(library: Any, handle: Any) -> NvmlDevice:
    return NvmlDevice(
        library, handle, _text(library.nvmlDeviceGetUUID(handle)), _text(library.nvmlDeviceGetName(handle))
    )


def _bare(uuid: str) -> str:
    return uuid.removeprefix("GPU-").removeprefix("MIG-")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
