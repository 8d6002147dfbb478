"""What runs in this process: driver, libraries, and which of its errors mean that memory ran out."""

from __future__ import annotations

import torch

from trainatomy.errors import DeviceError, MissingLibrary
from trainatomy.gpu.card import nvml
from trainatomy.libraries import installed_versions


def is_out_of_memory(error: BaseException) -> bool:
    """PyTorch's own allocator has its own error; libraries that allocate by themselves raise CUDA's."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error)
    )


def versions() -> dict[str, str]:
    """The installed libraries, and the CUDA that PyTorch was built for."""
    return {**installed_versions(), "cuda": torch.version.cuda or ""}


def driver_version() -> str:
    """The driver's version; ``unknown`` where NVML does not answer."""
    try:
        with nvml.session() as driver:
            return driver.version
    except (MissingLibrary, DeviceError):
        return "unknown"
