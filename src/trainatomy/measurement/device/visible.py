"""Find a GPU that a child process can use, without touching CUDA."""

from __future__ import annotations

import ctypes
import os
import sys
from itertools import takewhile
from typing import TYPE_CHECKING

from trainatomy.errors import DeviceError, MissingLibrary, WorkloadError
from trainatomy.measurement.device import nvml

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainatomy.workload.parallel import ParallelSpec

_PREDICT_HINT = "`trainatomy predict` needs no GPU."
_HIDING_VALUES = ("", "-1", "NoDevFiles")


def require_gpu() -> str:
    """Return the name of a GPU that a child process can use; without NVML's binding, of any GPU there may be.

    Raises:
        DeviceError: There is none.
    """
    first = first_visible()
    if first in _HIDING_VALUES:
        raise DeviceError(f"{_variable()} hides every GPU from this process. {_PREDICT_HINT}")
    try:
        with nvml.session() as driver:
            gpus = [gpu for gpu in driver.gpus if not gpu.is_instance]
            if first is not None and not _exists(first, driver.gpus, len(gpus)):
                raise DeviceError(f"{_variable()} hides every GPU: {_describe(gpus)}.")
            return ", ".join(sorted({gpu.name for gpu in gpus})) + f" (driver {driver.version})"
    except (MissingLibrary, nvml.NoAnswer):
        if _has_driver():
            return "this machine's GPU"
        raise DeviceError(
            "No NVIDIA driver is installed on this machine (no libcuda); measuring needs one and a GPU. "
            f"{_PREDICT_HINT}"
        ) from None
    except DeviceError as error:
        raise DeviceError(f"{error} Measuring runs the training on a GPU; {_PREDICT_HINT}") from None


def require_gpus(parallel: ParallelSpec) -> str:
    """Return the names of this machine's GPUs after checking that there are as many as a training uses.

    Raises:
        DeviceError: There are not.
        WorkloadError: The training runs on several machines.
    """
    refuse_nodes(parallel)
    name = require_gpu()
    count = _count_visible()
    if count is not None and count < parallel.gpus:
        hidden = f", as {_variable()} says" if first_visible() is not None else ""
        raise DeviceError(
            f"parallel.gpus: the training uses {parallel.gpus} GPUs, and this machine shows {count}{hidden} ({name}). "
            f"Measure with `--gpus {count}`, or on a machine with {parallel.gpus}; {_PREDICT_HINT}"
        )
    return f"{parallel.gpus} × {name}"


def refuse_nodes(parallel: ParallelSpec) -> None:
    """Raise ``WorkloadError`` for a training on several machines."""
    if parallel.nodes > 1:
        raise WorkloadError(
            f"parallel.nodes: {parallel.nodes} machines can be predicted; a measurement uses the GPUs of this one. "
            "Leave parallel.nodes out",
            key="parallel.nodes",
        )


def refuse_several_gpus(parallel: ParallelSpec, what: str) -> None:
    """Raise ``WorkloadError`` for a training on several GPUs, where ``what`` runs on one."""
    if parallel.world_size > 1:
        raise WorkloadError(
            f"parallel.gpus: {what} one GPU, and the training uses {parallel.world_size}. Leave parallel.gpus out, or "
            "use `trainatomy measure`, which runs a process for each",
            key="parallel.gpus",
        )


def show_first_gpus(count: int) -> None:
    """Hide all GPUs but the first ones: ``DataParallel`` and the Trainer use all that they see.  Call before CUDA."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = list(map(str, range(count))) if shown is None else shown.split(",")[:count]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)


def _count_visible() -> int | None:
    """Return how many GPUs child processes can use; ``None`` without NVML's binding."""
    try:
        with nvml.session() as driver:
            count = sum(not gpu.is_instance for gpu in driver.gpus)
    except (MissingLibrary, nvml.NoAnswer):
        return None
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return count
    entries = [entry.strip() for entry in value.split(",")]
    usable = takewhile(lambda entry: not entry.isdigit() or int(entry) < count, entries)
    return len(set(usable))


def first_visible() -> str | None:
    """Return the first entry of ``CUDA_VISIBLE_DEVICES``, the GPU that a measurement uses; ``None`` if it is unset."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if value is None else value.split(",")[0].strip()


def _exists(first: str, gpus: Sequence[nvml.NvmlDevice], count: int) -> bool:
    """Return whether CUDA would accept the entry: an index or the prefix of a UUID."""
    if first.isdigit():
        return int(first) < count
    return first.startswith("MIG-GPU-") or any(gpu.uuid.startswith(first) for gpu in gpus)


def _variable() -> str:
    return f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}"


def _describe(gpus: Sequence[nvml.NvmlDevice]) -> str:
    indices = "index 0" if len(gpus) == 1 else f"indices 0 to {len(gpus) - 1}"
    return f"this machine has {', '.join(sorted({gpu.name for gpu in gpus}))} ({indices})"


def _has_driver() -> bool:
    """Return whether CUDA's driver library can be loaded."""
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True
