"""What runs in this process: driver, libraries, and which of its errors mean that memory ran out."""

from __future__ import annotations

import contextlib
import platform
from importlib import metadata

import torch

from trainatomy.errors import DeviceError, MissingLibrary
from trainatomy.gpu.card import nvml

LIBRARIES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "trainatomy")


def is_out_of_memory(error: BaseException) -> bool:
    """PyTorch's own allocator has its own error; libraries that allocate by themselves raise CUDA's."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error)
    )


def versions() -> dict[str, str]:
    """What runs here."""
    found = {"python": platform.python_version(), "cuda": torch.version.cuda or ""}
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def driver_version() -> str:
    """The driver's version; ``unknown`` where NVML does not answer."""
    try:
        with nvml.session() as driver:
            return driver.version
    except (MissingLibrary, DeviceError):
        return "unknown"
