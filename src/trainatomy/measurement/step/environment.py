"""Describe the software and the allocator of this process, and recognise its out-of-memory errors."""

from __future__ import annotations

import re

import torch

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.catalog.versions import parse_version
from trainatomy.catalog.workspaces import workspaces
from trainatomy.errors import DeviceError, MissingLibrary
from trainatomy.libraries import installed_versions
from trainatomy.measurement.device import nvml
from trainatomy.measurement.traces.breakdown import AllocatorSetup

NO_ENGINE = "unable to find an engine to execute this computation"
"""PyTorch's message for a convolution that no cuDNN plan could run, for lack of memory or of support (Conv_v8.cpp)."""

_OUT_OF_MEMORY = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)
"""Messages of CUDA and of the libraries that allocate their handles from the driver (cuBLAS: ``cublasStatus_t``;
cuDNN: ``cudnnStatus_t``, the last one since version 9)."""
_UNITS = {"bytes": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` means that GPU memory ran out.

    PyTorch's allocator has an exception of its own; libraries that allocate by themselves raise CUDA's; a convolution
    whose plans all lacked memory reports that it found none.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    message = str(error)
    return any(text in message for text in _OUT_OF_MEMORY) or (NO_ENGINE in message and _has_refused())


def _has_refused() -> bool:
    """Return whether the allocator has refused a request in this process."""
    return bool(torch.cuda.memory_stats().get("num_ooms", 0))


def requested_bytes(message: str) -> int:
    """Return the bytes in PyTorch's ``Tried to allocate 2.00 GiB`` (two digits), or 0 if the message has none."""
    found = re.search(r"[Tt]ried to allocate ([0-9.]+) (bytes|KiB|MiB|GiB)", message)
    return round(float(found[1]) * _UNITS[found[2]]) if found else 0


def versions() -> dict[str, str]:
    """Return the versions of the installed libraries and of the CUDA that PyTorch was built for."""
    return {**installed_versions(), "cuda": torch.version.cuda or ""}


def driver_version() -> str:
    """Return the version of the NVIDIA driver, or ``unknown`` if NVML does not answer."""
    try:
        with nvml.session() as driver:
            return driver.version
    except (MissingLibrary, DeviceError):
        return "unknown"


def allocator_setup(options: str, device: int) -> AllocatorSetup:
    """Return the allocator's settings and the library workspaces of this process.

    Args:
        options: The allocator's options, as in ``PYTORCH_ALLOC_CONF``.
        device: Index of the GPU.
    """
    version = parse_version(torch.__version__)
    settings = AllocatorSettings.parse(options, version)
    return AllocatorSetup(settings, workspaces(torch.cuda.get_device_capability(device), version))
