"""Whether there is a GPU that a child process can use, asked without touching CUDA."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import TYPE_CHECKING

from trainatomy.errors import DeviceError, MissingLibrary
from trainatomy.measurement.device import nvml

if TYPE_CHECKING:
    from collections.abc import Sequence

WITHOUT_GPU = "`trainatomy predict` needs no GPU."
HIDING = ("", "-1", "NoDevFiles")


def require_gpu() -> str:
    """The name of a GPU that a child process can use.

    Raises ``DeviceError`` at once where there is none.  Without NVML's binding the worker has to find out.
    """
    first = first_visible()
    if first in HIDING:
        raise DeviceError(f"{_named()} hides every GPU from this process. {WITHOUT_GPU}")
    try:
        with nvml.session() as driver:
            cards = [gpu for gpu in driver.cards if not gpu.is_instance]
            if first is not None and not _exists(first, driver.cards, len(cards)):
                raise DeviceError(f"{_named()} hides every GPU: {_shown(cards)}.")
            return ", ".join(sorted({gpu.name for gpu in cards})) + f" (driver {driver.version})"
    except (MissingLibrary, nvml.NoAnswer):
        if _has_driver():
            return "this machine's GPU"
        raise DeviceError(
            f"No NVIDIA driver is installed on this machine (no libcuda); measuring needs one and a GPU. {WITHOUT_GPU}"
        ) from None
    except DeviceError as error:
        raise DeviceError(f"{error} Measuring runs the training on a GPU; {WITHOUT_GPU}") from None


def first_visible() -> str | None:
    """The first entry of ``CUDA_VISIBLE_DEVICES``, the only one that counts here; ``None`` where it is not set."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if value is None else value.split(",")[0].strip()


def _exists(first: str, cards: Sequence[nvml.NvmlDevice], count: int) -> bool:
    """CUDA takes an index, or the beginning of a UUID, and shows nothing from the first wrong entry on."""
    if first.isdigit():
        return int(first) < count
    return first.startswith("MIG-GPU-") or any(gpu.uuid.startswith(first) for gpu in cards)


def _named() -> str:
    return f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}"


def _shown(cards: Sequence[nvml.NvmlDevice]) -> str:
    indices = "index 0" if len(cards) == 1 else f"indices 0 to {len(cards) - 1}"
    return f"this machine has {', '.join(sorted({card.name for card in cards}))} ({indices})"


def _has_driver() -> bool:
    """Whether CUDA's driver library can be loaded, which says little of the card but costs nothing."""
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True
