"""Rates at which a DataLoader makes batches, by its settings, and the setting that suffices for a step.

Times that the steps of a training waited for their data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class DataWait:
    """Waiting for the DataLoader, by timed step.

    Attributes:
        host_seconds: Time that the training's thread spent fetching batches; without worker processes this is the
            time to make them.
        gpu_seconds: Time of it in which the GPU had nothing left to do.  The rest was hidden behind the GPU's work.
    """

    host_seconds: tuple[float, ...]
    gpu_seconds: tuple[float, ...]


LoaderProblem = Literal["", "shared memory", "cuda tensors"]
LoaderNote = Literal[
    "random samples", "not pinned", "cuda initialised", "more workers than processors", "no step", "host bounds"
]


@dataclass(frozen=True, slots=True)
class LoaderSettings:
    """Arguments of ``torch.utils.data.DataLoader``; ``prefetch_factor`` is None without worker processes."""

    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    persistent_workers: bool


@dataclass(frozen=True, slots=True)
class LoaderTiming:
    """A DataLoader with some settings; ``None``: not measured, because of ``problem``.

    Attributes:
        settings: The settings.
        problem: Why they cannot be used: batches do not fit in /dev/shm, or workers would return CUDA tensors.
        first_batch_seconds: From the beginning of an epoch to its first batch; it starts the worker processes.
        batch_seconds: Time between batches that are fetched as fast as they come.
        fetch_seconds: Time that the training's thread needs for a batch that is ready; without workers, to make it.
        shared_bytes: Batches that wait in /dev/shm, at most.
        worker_bytes: Host memory that the worker processes hold for themselves, together.
        step_seconds: The time of a step with this loader; ``None`` also where the step itself is not known.
        suffices: The step takes hardly longer than with batches that cost nothing.
    """

    settings: LoaderSettings
    problem: LoaderProblem = ""
    first_batch_seconds: float | None = None
    batch_seconds: float | None = None
    fetch_seconds: float | None = None
    shared_bytes: int = 0
    worker_bytes: int | None = None
    step_seconds: float | None = None
    suffices: bool | None = None


@dataclass(frozen=True, slots=True)
class StepToFeed:
    """The step that a loader feeds.

    Attributes:
        seconds: Its duration.
        host_seconds: Time in it in which the CPU is busy; 0: not known.
        batches: Batches that it takes.
        predicted: The figures are predicted; otherwise they were given.
        gpu: The GPU that they are predicted for.
    """

    seconds: float
    host_seconds: float = 0.0
    batches: int = 1
    predicted: bool = False
    gpu: str = ""


@dataclass(frozen=True, slots=True)
class LoaderReport:
    """A DataLoader timed with several settings.

    Attributes:
        name: Name of the training or of the dataset.
        batch_size: Samples of a batch; ``None``: not known.
        batch_bytes: Bytes of its tensors.
        step: The step to feed; ``None``: not known.
        timings: By settings, fewest workers first.
        best: The first that suffices, as place in ``timings``; ``None``: none does, or the step is not known.
        processors: Processors that this process may use.
        shared_memory_bytes: Free bytes in /dev/shm; ``None``: there is none.
        start_method: How worker processes are started: fork, spawn or forkserver.
        notes: Codes of what to know about the figures.
    """

    name: str
    batch_size: int | None
    batch_bytes: int
    step: StepToFeed | None
    timings: tuple[LoaderTiming, ...]
    best: int | None
    processors: int
    shared_memory_bytes: int | None
    start_method: str
    notes: tuple[LoaderNote, ...] = ()
