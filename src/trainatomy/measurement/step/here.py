"""What runs in this process: driver, libraries, and which of its errors mean that memory ran out."""

from __future__ import annotations

import torch

from trainatomy.errors import DeviceError, MissingLibrary
from trainatomy.libraries import installed_versions
from trainatomy.measurement.device import nvml

NO_ENGINE = "unable to find an engine to execute this computation"
"""How PyTorch ends a convolution for which no plan ran, be it for lack of memory or of support (Conv_v8.cpp)."""

OUT_OF_MEMORY = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)
"""How CUDA says it, and its libraries, which take their handles' memory from the driver (cuBLAS: ``cublasStatus_t``;
cuDNN: ``cudnnStatus_t``, the last one since version 9)."""


def is_out_of_memory(error: BaseException) -> bool:
    """PyTorch's own allocator has its own error; libraries that allocate by themselves raise CUDA's; a convolution
    whose plans all lacked memory says that it finds none."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    message = str(error)
    return any(said in message for said in OUT_OF_MEMORY) or (NO_ENGINE in message and _refused())


def _refused() -> bool:
    """Whether the allocator has refused a request in this process."""
    return bool(torch.cuda.memory_stats().get("num_ooms", 0))


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
