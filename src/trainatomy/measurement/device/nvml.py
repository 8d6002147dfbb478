"""Read a GPU's memory from the driver through NVML, the library behind ``nvidia-smi``.

Three figures answer "how much is used", and they differ on purpose:

* ``nvmlDeviceGetMemoryInfo`` in its first version counts the driver's own reservation as *used*.  An idle H200 with
  driver 580 reports 644,939,776 bytes although no process runs on it.
* Its second version (``nvmlDeviceGetMemoryInfo_v2``) reports that reservation separately, as *reserved*; its *used* is
  what ``nvidia-smi`` prints: 0 on the same idle GPU.
* ``nvmlDeviceGetComputeRunningProcesses`` reports what each process holds.  It is the only figure that stays right
  while other processes use the GPU; inside some containers the driver answers "not available".

All sizes are bytes.  Nothing here initialises CUDA, so nothing here takes memory on the GPU.

Find a GPU that a child process can use, without touching CUDA.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainatomy.errors import DeviceError, MissingLibrary, WorkloadError
from trainatomy.libraries import import_library

if TYPE_CHECKING:
    from trainatomy.workload.parallel import ParallelSpec


@dataclass(frozen=True, slots=True)
class Reading:
    """The memory of one GPU at one moment, in bytes; ``None``: not available.

    Attributes:
        used_bytes: *used* of the first version of the call, with the driver's reservation.
        used_apart_bytes: *used* of the second version, without it.
        driver_bytes: The driver's reservation.
        process_bytes: Memory of this process.
        processes: (process id, bytes) of each process that the driver lists.
    """

    used_bytes: int
    used_apart_bytes: int | None
    driver_bytes: int | None
    process_bytes: int | None
    processes: tuple[tuple[int, int | None], ...] = ()


@dataclass(frozen=True, slots=True)
class NvmlDevice:
    """A GPU as NVML knows it: its handle, UUID (``GPU-...``, for a MIG instance ``MIG-...``) and product name."""

    binding: Any
    handle: Any
    uuid: str
    name: str

    @property
    def is_instance(self) -> bool:
        """True for a MIG instance, a part of a GPU with memory of its own."""
        return self.uuid.startswith("MIG-")

    def read(self, pid: int | None = None) -> Reading:
        """Read the GPU's memory now, and that of process ``pid`` (default: this one).

        Raises:
            NoAnswer: The driver does not report it: the GPU is lost, it shares the host's memory, or it is split into
                MIG instances of which only some belong to this user.
        """
        used_apart: int | None = None
        driver: int | None = None
        try:
            used = int(self.binding.nvmlDeviceGetMemoryInfo(self.handle).used)
        except self.binding.NVMLError as error:
            raise NoAnswer(
                f"The NVIDIA driver does not report the memory of {self.name} ({self.uuid}): {error}."
            ) from error
        try:
            apart = self.binding.nvmlDeviceGetMemoryInfo(self.handle, version=self.binding.nvmlMemory_v2)
            used_apart, driver = int(apart.used), int(apart.reserved)
        except (self.binding.NVMLError, AttributeError, TypeError):  # driver before 510, or an old binding
            pass
        processes = self._processes()
        pid = os.getpid() if pid is None else pid
        own = next((size for found, size in processes if found == pid), None)
        return Reading(used, used_apart, driver, own, processes)

    def ask(self, name: str, *arguments: Any) -> Any:
        """Return what ``nvmlDevice{name}`` answers for this GPU.

        ``None`` if the GPU, the driver, the container or the binding does not know it.
        """
        function = getattr(self.binding, f"nvmlDevice{name}", None)
        if function is None:
            return None
        try:
            return function(self.handle, *arguments)
        except (self.binding.NVMLError, TypeError, ValueError):
            return None

    def _processes(self) -> tuple[tuple[int, int | None], ...]:
        """Return the compute processes; graphics processes (a desktop) hold what they held before."""
        try:
            found = self.binding.nvmlDeviceGetComputeRunningProcesses(self.handle)
        except self.binding.NVMLError:
            return ()
        return tuple((int(process.pid), process.usedGpuMemory) for process in found)


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver's version, its GPUs in PCI order (which is not always CUDA's order), and the newest CUDA it knows.

    A GPU that is split into MIG instances is followed by them.
    """

    version: str
    gpus: tuple[NvmlDevice, ...]
    cuda: tuple[int, int] | None = None

    def device(self, uuid: str) -> NvmlDevice | None:
        """Return the GPU or MIG instance with the UUID that CUDA reports, with or without ``GPU-`` or ``MIG-``.

        For an instance CUDA may report its GPU's UUID: then it is the instance that ``CUDA_VISIBLE_DEVICES`` names, or
        the only one.
        """
        found = next((gpu for gpu in self.gpus if _bare(gpu.uuid) == _bare(uuid)), None)
        instances = self._instances_of(found)
        if not instances:
            return found
        wanted = _bare(os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0])
        named = [instance for instance in instances if _bare(instance.uuid) == wanted]
        return named[0] if named else instances[0] if len(instances) == 1 else found

    def _instances_of(self, gpu: NvmlDevice | None) -> list[NvmlDevice]:
        if gpu is None or gpu.is_instance:
            return []
        after = self.gpus[self.gpus.index(gpu) + 1 :]
        return list(takewhile(lambda other: other.is_instance, after))


class NoAnswer(DeviceError):
    """NVML does not start (no driver, or a container that lacks NVML only), or does not report on a GPU."""


@contextmanager
def session() -> Iterator[Driver]:
    """Open NVML for the duration of the context.

    Raises:
        MissingLibrary: The package nvidia-ml-py is not installed.
        NoAnswer: NVML does not start.
        DeviceError: There is no GPU.
    """
    library = _library()
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        raise NoAnswer(f"No NVIDIA driver answers on this machine (NVML: {error}).") from error
    try:
        count = library.nvmlDeviceGetCount()
        gpus = tuple(gpu for index in range(count) for gpu in _gpu_and_instances(library, index))
        if not gpus:
            raise DeviceError("The NVIDIA driver answers, but shows no GPU on this machine.")
        yield Driver(_text(library.nvmlSystemGetDriverVersion()), gpus, _cuda(library))
    finally:
        library.nvmlShutdown()


def _library() -> Any:
    return import_library("pynvml", "Reading a GPU's memory", install="nvidia-ml-py")


def _cuda(library: Any) -> tuple[int, int] | None:
    """Return the newest CUDA that the driver knows: NVML answers 13000 for 13.0."""
    try:
        number = int(library.nvmlSystemGetCudaDriverVersion_v2())
    except (library.NVMLError, AttributeError):
        return None
    return number // 1000, number % 1000 // 10


def _gpu_and_instances(library: Any, index: int) -> Iterator[NvmlDevice]:
    """Yield the GPU of that index and its MIG instances; nothing if it is lost or hidden from this user."""
    with suppress(library.NVMLError):
        handle = library.nvmlDeviceGetHandleByIndex(index)
        yield _device(library, handle)
        for instance in _instance_handles(library, handle):
            yield _device(library, instance)


def _instance_handles(library: Any, handle: Any) -> Iterator[Any]:
    """Yield the handles of a GPU's MIG instances; none if the GPU, the driver or the binding does not know MIG."""
    try:
        if library.nvmlDeviceGetMigMode(handle)[0] == 0:
            return
        slots = library.nvmlDeviceGetMaxMigDeviceCount(handle)
    except (library.NVMLError, AttributeError):
        return
    for slot in range(slots):
        with suppress(library.NVMLError):  # an empty slot
            yield library.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)


def _device(library: Any, handle: Any) -> NvmlDevice:
    return NvmlDevice(
        library, handle, _text(library.nvmlDeviceGetUUID(handle)), _text(library.nvmlDeviceGetName(handle))
    )


def _bare(uuid: str) -> str:
    return uuid.removeprefix("GPU-").removeprefix("MIG-")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


_PREDICT_HINT = "`trainatomy predict` needs no GPU."
NOT_ON_AMD = (
    "Training on AMD GPUs is predicted and not measured: what is read of a GPU comes from NVIDIA's driver. "
    "docs/amd.md has a script that compares allocated and reserved memory with a prediction."
)
_AMD_DRIVER = "/dev/kfd"
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
        with session() as driver:
            gpus = [gpu for gpu in driver.gpus if not gpu.is_instance]
            if first is not None and not _exists(first, driver.gpus, len(gpus)):
                raise DeviceError(f"{_variable()} hides every GPU: {_describe(gpus)}.")
            return ", ".join(sorted({gpu.name for gpu in gpus})) + f" (driver {driver.version})"
    except (MissingLibrary, NoAnswer):
        if _has_driver():
            return "this machine's GPU"
        if Path(_AMD_DRIVER).exists():
            raise DeviceError(NOT_ON_AMD) from None
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
        with session() as driver:
            count = sum(not gpu.is_instance for gpu in driver.gpus)
    except (MissingLibrary, NoAnswer):
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


def _exists(first: str, gpus: Sequence[NvmlDevice], count: int) -> bool:
    """Return whether CUDA would accept the entry: an index or the prefix of a UUID."""
    if first.isdigit():
        return int(first) < count
    return first.startswith("MIG-GPU-") or any(gpu.uuid.startswith(first) for gpu in gpus)


def _variable() -> str:
    return f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}"


def _describe(gpus: Sequence[NvmlDevice]) -> str:
    indices = "index 0" if len(gpus) == 1 else f"indices 0 to {len(gpus) - 1}"
    return f"this machine has {', '.join(sorted({gpu.name for gpu in gpus}))} ({indices})"


def _has_driver() -> bool:
    """Return whether CUDA's driver library can be loaded."""
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True
