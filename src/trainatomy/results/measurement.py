"""A training that was measured on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from trainatomy.results.checkpoint import Checkpoint, RestoredCheckpoint
from trainatomy.results.data_wait import DataWait
from trainatomy.results.evaluation import Evaluation
from trainatomy.results.generation import Generation
from trainatomy.results.host_pace import HostPace
from trainatomy.results.memory import Memory, ModuleActivations, OutOfMemoryPoint
from trainatomy.results.power import PowerUse

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
class RankMeasurement:
    """One process of a training that was measured on several GPUs; the fields are those of ``Measurement``."""

    rank: int
    status: Status
    message: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_bytes: int | None
    context_bytes: int | None
    nccl_bytes: int | None
    model_bytes: int | None
    num_alloc_retries: int
    step_seconds: float | None
    synchronized_step_seconds: float | None
    steps: int
    memory: Memory | None = None
    modules: tuple[ModuleActivations, ...] = ()
    timed_step_seconds: tuple[float, ...] = ()
    recorded_step_seconds: float | None = None
    out_of_memory: OutOfMemoryPoint | None = None
    host_pace: HostPace | None = None

    @classmethod
    def of(cls, measurement: Measurement) -> RankMeasurement:
        """Return what ``measurement`` says of its own rank."""
        return cls(**{each.name: getattr(measurement, each.name) for each in fields(cls)})


@dataclass(frozen=True, slots=True)
class Measurement:
    """The same step on a GPU; ``None`` where a figure could not be read.

    ``device_bytes`` is the process as nvidia-smi shows it (NVML's figure less the driver's own reservation),
    ``process_bytes`` NVML's own figure for the process, ``nvml_used_bytes`` the raw ``used`` of the first version of
    the NVML call, ``idle_bytes`` the same before the first tensor, and ``context_bytes`` what the first tensor added
    outside of PyTorch's allocator.

    ``memory`` is the breakdown at the measured peak, from the allocations recorded on the GPU; its total equals
    ``device_bytes`` where that is known.  ``step_seconds`` is the median of ``timed_step_seconds``: the steps after
    the warm-up of a run without recording; their mean with ``data.lengths``.
    ``recorded_step_seconds`` is the median of the run whose allocations were recorded (``None`` without one).
    ``out_of_memory`` is the failed allocation and the memory held then.  ``tape_file`` is the file with the
    allocation trace; ``neighbours`` are other processes on the GPU.

    On several GPUs the figures are those of the process ``rank``, which is 0 unless only another one ran out of memory;
    ``other_ranks`` holds the others, and rates are those of the rank itself.  ``nccl_bytes`` is what the process
    group and its first collective took outside of PyTorch's allocator.  ``synchronized_step_seconds`` is the median of
    steps after each of which the CPU waited for the GPU.  ``evaluation`` is the evaluation that ran
    during the training.  ``host_pace``, ``power`` and ``data_wait`` are the CPU's speed, the GPU's power and the
    time that steps waited for their data, all during the timed steps.  ``skipped_steps`` is the number of first
    optimizer steps that gradient scaling skipped; ``None`` where it decides about none.
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
    rank: int = 0
    nccl_bytes: int | None = None
    synchronized_step_seconds: float | None = None
    other_ranks: tuple[RankMeasurement, ...] = ()
    evaluation: Evaluation | None = None
    generation: Generation | None = None
    checkpoint: Checkpoint | None = None
    restored: tuple[RestoredCheckpoint, ...] = ()
    host_pace: HostPace | None = None
    power: PowerUse | None = None
    data_wait: DataWait | None = None
    skipped_steps: int | None = None

    @property
    def ranks(self) -> dict[int, RankMeasurement]:
        """The figures of every rank by its number; a training on one GPU has rank 0 only."""
        every = (RankMeasurement.of(self), *self.other_ranks)
        return {each.rank: each for each in sorted(every, key=lambda one: one.rank)}
