"""The measurement of a run, from what its timer and its meter have read.

Describe the software and the allocator of this process, and recognise its out-of-memory errors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal

import torch

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.catalog.versions import parse_version, workspaces
from trainatomy.errors import DeviceError, MissingLibrary
from trainatomy.libraries import installed_versions
from trainatomy.measurement.device import nvml
from trainatomy.measurement.device.meter import DeviceMemory, Meter
from trainatomy.measurement.process.job import Job
from trainatomy.measurement.step.group import RankGroup
from trainatomy.measurement.step.timer import StepTimer
from trainatomy.measurement.traces.breakdown import AllocatorSetup, Failure
from trainatomy.option import shared_fields
from trainatomy.results.measurement import Measurement, RankMeasurement, Stage
from trainatomy.results.tasks import Checkpoint, Evaluation, Generation, RestoredCheckpoint
from trainatomy.training.shape import samples_per_step, throughput
from trainatomy.units import human_bytes
from trainatomy.workload.schema import Workload
from trainatomy.workload.trl import steps_per_generation

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
    architecture = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0] if torch.version.hip else ""
    capability = torch.cuda.get_device_capability(device)
    return AllocatorSetup(settings, workspaces(capability, version, architecture=architecture))


PROCESS_GROUP = "process group"
"""Stage of a run on several GPUs: NCCL has connected them."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a run: status, message, tokens per sample (``None``: the samples are not text), point of failure."""

    status: Literal["completed", "out of memory"] = "completed"
    message: str = ""
    tokens: int | None = None
    failure: Failure | None = None


def measurement_of(
    job: Job, workload: Workload, meter: Meter, timer: StepTimer, outcome: Outcome, device: int
) -> Measurement:
    """Return what was measured, without the memory breakdown."""
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    step_seconds = _step_seconds(workload, timer)
    rates = throughput(workload, outcome.tokens, step_seconds)
    is_instance = meter.device is not None and meter.device.is_instance
    return Measurement(
        name=workload.display_name,
        workload=dict(job.workload),
        status=outcome.status,
        gpu=meter.device.name if meter.device and is_instance else torch.cuda.get_device_properties(device).name,
        driver=meter.driver_version,
        versions=versions(),
        date=datetime.now(UTC).date().isoformat(),
        peak_allocated_bytes=peaks[0],
        peak_reserved_bytes=peaks[1],
        **shared_fields(DeviceMemory, meter.result()),
        model_bytes=timer.model_bytes,
        num_alloc_retries=int(torch.cuda.memory_stats().get("num_alloc_retries", 0)),
        step_seconds=step_seconds,
        steps=timer.steps,
        message=outcome.message,
        tape_file=None,
        stages=meter.stages(*peaks),
        timed_step_seconds=tuple(timer.timed_seconds),
        samples_per_second=rates.samples_per_second,
        tokens_per_second=rates.tokens_per_second,
        neighbours=meter.other_processes(),
        out_of_memory=None if outcome.failure is None else outcome.failure.to_point(),
        notes=(*meter.notes(), *_compiling_notes(timer), *_late_notes(timer)),
        evaluation=_evaluation(workload, timer),
        generation=_generation(workload, timer),
        checkpoint=_checkpoint(workload, timer),
        restored=tuple(RestoredCheckpoint(purpose, *held) for purpose, held in timer.restored.items()),
        **_monitored(workload, timer, outcome.tokens),
    )


def _step_seconds(workload: Workload, timer: StepTimer) -> float | None:
    """Return the time of a step: the median; the mean where steps differ.

    Where one in so many steps generates, the mean is that of whole periods, if there is one.
    """
    if workload.data.varies:
        return timer.mean_step_seconds
    period = steps_per_generation(workload) if workload.loop == "grpo" else 1
    whole = len(timer.timed_seconds) // period * period
    if period == 1 or not whole:
        return timer.step_seconds
    return fmean(timer.timed_seconds[-whole:])


def _compiling_notes(timer: StepTimer) -> tuple[str, ...]:
    """Return what the steps took in which the model was compiled."""
    if timer.compiling is None:
        return ()
    allocated, reserved = map(human_bytes, timer.compiling)
    return (
        "allocated memory is that of steps after compiling; while PyTorch compiled the model and tried its kernels, at "
        f"most {allocated} were allocated and {reserved} reserved",
    )


def _late_notes(timer: StepTimer) -> tuple[str, ...]:
    """Return that the time limit ended the steps."""
    return (f"the time limit ended the run after {timer.steps} steps",) if timer.is_late else ()


def _monitored(workload: Workload, timer: StepTimer, tokens: int | None) -> dict[str, Any]:
    """Return what was watched beside the steps."""
    monitors, samples = timer.monitors, samples_per_step(workload)
    return {
        "host_pace": monitors.host_pace(),
        "data_wait": monitors.data_wait(),
        "power": monitors.power_use(samples, None if tokens is None else tokens * samples),
    }


def of_rank(measurement: Measurement, timer: StepTimer, group: RankGroup) -> Measurement:
    """Add what only a process among several has."""
    return replace(
        measurement,
        rank=group.rank,
        nccl_bytes=_added_at(PROCESS_GROUP, measurement.stages),
        synchronized_step_seconds=timer.synchronized_step_seconds,
    )


def with_other_gpus(measurement: Measurement, count: int) -> Measurement:
    """Add the allocator's figures of the other GPUs of this process (``DataParallel``), each under its number."""
    empty: dict[str, Any] = dict.fromkeys(
        ("device_bytes", "context_bytes", "nccl_bytes", "model_bytes", "synchronized_step_seconds")
    )
    found = [
        replace(
            RankMeasurement.of(measurement),
            rank=gpu,
            peak_allocated_bytes=torch.cuda.max_memory_allocated(gpu),
            peak_reserved_bytes=torch.cuda.max_memory_reserved(gpu),
            num_alloc_retries=int(torch.cuda.memory_stats(gpu).get("num_alloc_retries", 0)),
            out_of_memory=None,
            **empty,
        )
        for gpu in range(1, count)
    ]
    return replace(measurement, other_ranks=tuple(found))


def _added_at(name: str, stages: tuple[Stage, ...]) -> int | None:
    """Return the bytes that a stage added outside of PyTorch's allocator."""
    for before, stage in pairwise(stages):
        if stage.name == name and stage.device_bytes is not None and before.device_bytes is not None:
            return (stage.device_bytes - stage.reserved_bytes) - (before.device_bytes - before.reserved_bytes)
    return None


def _checkpoint(workload: Workload, timer: StepTimer) -> Checkpoint | None:
    """Return what the checkpoint of the training took."""
    return (
        None if timer.saved is None else Checkpoint(timer.saved[0], workload.train.save_total_limit, *timer.saved[1:])
    )


def _generation(workload: Workload, timer: StepTimer) -> Generation | None:
    """Return what the calls of ``generate()`` held and took."""
    found = timer.generation
    if not found.tokens:
        return None
    sequences, held, per_token = found.cache
    return Generation(
        prompts=workload.batch_size,
        sequences=sequences,
        new_tokens=found.tokens,
        cache_bytes=held,
        cache_bytes_per_token=per_token,
        first_token_seconds=found.first_token_seconds(timer.warm_up),
        token_seconds=found.token_seconds(timer.warm_up),
    )


def _evaluation(workload: Workload, timer: StepTimer) -> Evaluation | None:
    """Return what the evaluation of the training took."""
    found = timer.evaluation
    if found is None:
        return None
    return Evaluation(
        batch_size=workload.eval_batch_size,
        samples=workload.eval_samples,
        **found._asdict(),
    )
