"""The samples of an optimizer step on all GPUs, and the accumulation that keeps their number."""

from __future__ import annotations

from collections.abc import Iterable

from trainatomy.errors import WorkloadError
from trainatomy.workload.schema import Workload


def effective_batch_size_of(workload: Workload) -> int:
    """Return the samples of an optimizer step: batch size × accumulation steps × data-parallel ranks."""
    train = workload.train
    ranks = workload.parallel.data_parallel_size
    return train.per_device_train_batch_size * train.gradient_accumulation_steps * ranks


def accumulation_for(workload: Workload, samples: int, batch_size: int | None = None) -> int | None:
    """Return the accumulation steps that give a step this many samples; ``None`` if the batches do not divide them.

    Args:
        workload: The training.
        samples: Samples of an optimizer step on all GPUs.
        batch_size: Samples per batch and GPU; None for those of the workload.
    """
    size = batch_size or workload.train.per_device_train_batch_size
    steps, rest = divmod(samples, size * workload.parallel.data_parallel_size)
    return steps if steps and not rest else None


def with_effective_batch_size(workloads: Iterable[Workload], samples: int) -> tuple[Workload, ...]:
    """Return training runs with the accumulation steps that give each of them this many samples in an optimizer step.

    Raises:
        WorkloadError: A batch size times the number of data-parallel ranks does not divide ``samples``; lists all.
    """
    found, problems = [], []
    for workload in workloads:
        steps = accumulation_for(workload, samples)
        if workload.mode != "training":
            problems.append(f"{workload.display_name}: inference has no optimizer step")
        elif steps is None:
            problems.append(f"{workload.display_name}: {_indivisible(workload, samples)}")
        else:
            found.append(workload.replace("train.gradient_accumulation_steps", steps))
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise WorkloadError(f"effective batch size {samples} cannot be reached:\n{lines}")
    return tuple(found)


def _indivisible(workload: Workload, samples: int) -> str:
    """Return what does not divide the samples, and what to change."""
    size, ranks = workload.train.per_device_train_batch_size, workload.parallel.data_parallel_size
    each = f"{size} samples × {ranks} data-parallel ranks = {size * ranks}" if ranks > 1 else f"batch size {size}"
    if samples % ranks:
        return f"{each} does not divide {samples}; give a multiple of {ranks}"
    return f"{each} does not divide {samples}; choose a per_device_train_batch_size that divides {samples // ranks}"
