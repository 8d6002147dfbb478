"""A training that was measured on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainatomy.results.memory import Memory, ModuleActivations, OutOfMemoryPoint


@dataclass(frozen=True, slots=True)
class Stage:
    """What the card and PyTorch hold at one stage of a measured run, bytes; ``None``: the driver does not say.

    ``name``: idle, first tensor, model loaded, training (its peak). ``device_bytes``: as nvidia-smi shows the process;
    ``nvml_used_bytes``: the raw ``used`` of the first NVML call, which counts the driver's own share too.
    """

    name: str
    device_bytes: int | None
    nvml_used_bytes: int | None
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another process that used the card during the run: its id, its name, and what it held at most, bytes (``None``:
    the driver does not say)."""

    pid: int
    name: str
    bytes: int | None


@dataclass(frozen=True, slots=True)
class Measurement:
    """The same step on a GPU. ``None`` where it could not be read. ``status``: completed or out of memory.

    ``device_bytes`` is what nvidia-smi shows for the process (NVML, the driver's own reservation taken off);
    ``process_bytes`` NVML's own figure for the process; ``nvml_used_bytes`` is the raw ``used`` of the first NVML call;
    ``idle_bytes`` what NVML said before the first tensor; ``context_bytes`` what the first tensor cost outside of
    PyTorch's allocator.

    ``memory`` is the bill at the measured peak, from the allocations that happened on the GPU; its total is
    ``device_bytes`` where that is known.  ``step_seconds`` is the median of ``timed_step_seconds``, the steps after
    the warm-up of a run in which nothing was recorded; ``recorded_step_seconds`` the median of the run whose
    allocations were (``None``: there was no such run).  ``out_of_memory``: what was held and asked for when it failed.
    """

    name: str
    workload: dict[str, object]
    status: Literal["completed", "out of memory"]
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
    neighbours: tuple[Neighbour, ...] = ()
    out_of_memory: OutOfMemoryPoint | None = None
    notes: tuple[str, ...] = ()
