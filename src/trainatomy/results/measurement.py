"""A training that was measured on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainatomy.results.memory import Memory, ModuleActivations, OutOfMemoryPoint

Status = Literal["completed", "out of memory"]


@dataclass(frozen=True, slots=True)
class Stage:
    """Memory held at one stage of a measured run, in bytes; ``None`` where the driver does not report it.

    ``name`` is idle, first tensor, model loaded or training (its peak). ``device_bytes`` is the process as nvidia-smi
    shows it; ``nvml_used_bytes`` is the raw ``used`` of the first version of the NVML call, which includes the
    driver's own reservation.
    """

    name: str
    device_bytes: int | None
    nvml_used_bytes: int | None
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class OtherProcess:
    """Another process on the GPU during the run, and the most it held (``None``: the driver does not report it)."""

    pid: int
    name: str
    bytes: int | None


@dataclass(frozen=True, slots=True)
class Measurement:
    """The same step on a GPU; ``None`` where a figure could not be read.

    ``device_bytes`` is the process as nvidia-smi shows it (NVML's figure less the driver's own reservation),
    ``process_bytes`` NVML's own figure for the process, ``nvml_used_bytes`` the raw ``used`` of the first version of
    the NVML call, ``idle_bytes`` the same before the first tensor, and ``context_bytes`` what the first tensor added
    outside of PyTorch's allocator.

    ``memory`` is the breakdown at the measured peak, from the allocations recorded on the GPU; its total equals
    ``device_bytes`` where that is known.  ``step_seconds`` is the median of ``timed_step_seconds``: the steps after
    the warm-up of a run without recording.  ``recorded_step_seconds`` is the median of the run whose allocations were
    recorded (``None`` without one).  ``out_of_memory`` is the failed allocation and the memory held then.
    ``tape_file`` is the file with the allocation trace; ``neighbours`` are other processes on the GPU.
    """

    name: str
    workload: dict[str, object]
    status: Status
    gpu: str
    driver: str
    versions: dict[str, str]
    date: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_bytes: int | None
    process_bytes: int | None
    nvml_used_bytes: int | None
    idle_bytes: int | None
    context_bytes: int | None
    model_bytes: int | None
    num_alloc_retries: int
    step_seconds: float | None
    steps: int
    message: str
    tape_file: str | None
    memory: Memory | None = None
    modules: tuple[ModuleActivations, ...] = ()
    stages: tuple[Stage, ...] = ()
    timed_step_seconds: tuple[float, ...] = ()
    recorded_step_seconds: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    neighbours: tuple[OtherProcess, ...] = ()
    out_of_memory: OutOfMemoryPoint | None = None
    notes: tuple[str, ...] = ()
