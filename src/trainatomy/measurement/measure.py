"""Measure a training on this machine's GPU.

Each run gets a fresh process, because earlier runs leave memory behind: a CUDA context, loaded kernels, library
workspaces, cached segments.  There are two runs, because recording takes time: the *control run*, in which nothing is
recorded, gives times and totals; the *recorded run* gives the memory breakdown.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.errors import TrainatomyError, WorkloadError
from trainatomy.libraries import version_of
from trainatomy.measurement.device.visible import require_gpu, require_gpus
from trainatomy.measurement.process.job import Job, Stacks, warm_up_steps
from trainatomy.measurement.process.pool import TimeLimit, WorkerPool
from trainatomy.measurement.process.progress import Progress
from trainatomy.measurement.traces.breakdown import MeasuredTotals, reconcile
from trainatomy.units import exact_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainatomy.results.measurement import Measurement
    from trainatomy.workload.schema import Workload

TIMED_STEPS = 8
MOST_STEPS = 100
TIMED_SECONDS = 3.0
"""The control run times at least ``TIMED_STEPS`` steps, and more of them until they took this long together."""

_COMPARED_TOTALS = (
    ("allocated memory", "peak_allocated_bytes"),
    ("reserved memory", "peak_reserved_bytes"),
    ("device memory", "device_bytes"),
)

__all__ = ["jobs_for", "measure", "merge_runs", "require_gpu"]


def measure(
    workload: Workload,
    *,
    trace: Path | str | None = None,
    stacks: Stacks = "none",
    steps: int | None = None,
    components: bool = True,
    time_limit: float | None = None,
    progress: Callable[[Progress], None] | None = None,
    pool: WorkerPool | None = None,
) -> Measurement:
    """Run ``workload`` on this machine's GPUs and return the measurement; running out of memory is a result too.

    Args:
        workload: The training to run.
        trace: File for the recorded run's allocation history.
        stacks: Stacks to record with each allocation of ``trace``.
        steps: Optimizer steps of each run, if the workload does not set them (default: enough for a stable median).
        components: Run a second time with recording, for the memory breakdown.
        time_limit: Seconds for everything.
        progress: Called with the progress (default: print a line to stderr for each stage).
        pool: Worker processes to use (default: start and end them here); a training on several GPUs has its own.

    Raises:
        DeviceError: There are fewer GPUs than the training uses, or the control run's process died or took too long.
        TrainatomyError: The workload itself failed.  If only the recorded run failed, the result lacks its memory
            breakdown and a note says why.
    """
    on_progress = progress or _stage_printer()
    check_allocator(workload)
    target = None if trace is None else writable(Path(trace))
    found = require_gpus(workload.parallel) if workload.parallel.world_size > 1 else require_gpu()
    on_progress(Progress("control", f"starting on {found}"))
    jobs = jobs_for(workload, steps, components=components, trace=target, stacks=stacks)
    limit = None if time_limit is None else TimeLimit(time_limit)
    if workload.parallel.processes > 1:
        from trainatomy.measurement.ranks import measure_ranks

        return measure_ranks(jobs, workload.parallel.gpus, limit, on_progress, workload.parallel.nccl_environment)
    if pool is None:
        with WorkerPool() as own:
            return _run_jobs(jobs, own, limit, on_progress)
    return _run_jobs(jobs, pool, limit, on_progress)


def _run_jobs(
    jobs: list[Job], pool: WorkerPool, limit: TimeLimit | None, on_progress: Callable[[Progress], None]
) -> Measurement:
    """Run the control job and, if there is one, the recorded job; merge their measurements."""
    control = pool.run(jobs[0], limit, on_progress, more=len(jobs) > 1)
    if len(jobs) == 1:
        return control
    try:
        return merge_runs(control, pool.run(jobs[1], limit, on_progress))
    except TrainatomyError as error:
        note = f"the recorded run failed, so there is no memory breakdown: {error}"
        return replace(control, notes=(*control.notes, note))


def jobs_for(
    workload: Workload, steps: int | None, *, components: bool, trace: Path | None = None, stacks: Stacks = "none"
) -> list[Job]:
    """Return the job of the control run and, if components or a trace are wanted, that of the recorded run."""
    mapping = workload.to_mapping()
    exact = workload.steps or steps
    count = exact or warm_up_steps(workload) + TIMED_STEPS
    control = Job(mapping, count, most_steps=0 if exact else MOST_STEPS, seconds=0.0 if exact else TIMED_SECONDS)
    if not components and trace is None:
        return [control]
    return [control, Job(mapping, count, trace, stacks, record=components)]


def merge_runs(control: Measurement, recorded: Measurement) -> Measurement:
    """Return the control run's measurement with the memory breakdown of the recorded run.

    All times and totals are the control run's.
    """
    notes = [note for note in (*control.notes, *recorded.notes) if note]
    memory, modules, point = recorded.memory, recorded.modules, recorded.out_of_memory or control.out_of_memory
    if control.status != recorded.status:
        notes.append(
            f"the control run {_ending(control)}, the recorded run {_ending(recorded)}: memory is barely sufficient"
        )
        memory, modules, point = None, (), control.out_of_memory
    elif control.status == "completed" and memory is not None:
        notes += _total_differences(control, recorded)
        memory = reconcile(memory, MeasuredTotals.of(control))[0]
    return replace(
        control,
        memory=memory,
        modules=modules,
        out_of_memory=point,
        recorded_step_seconds=recorded.step_seconds,
        tape_file=recorded.tape_file,
        notes=tuple(dict.fromkeys(notes)),
        neighbours=tuple({one.pid: one for one in (*recorded.neighbours, *control.neighbours)}.values()),
    )


def _ending(measurement: Measurement) -> str:
    return "completed" if measurement.status == "completed" else "ran out of memory"


def _total_differences(control: Measurement, recorded: Measurement) -> list[str]:
    """Return a note for each total in which the two runs differ."""
    found = []
    for title, name in _COMPARED_TOTALS:
        one, other = getattr(control, name), getattr(recorded, name)
        if one is not None and other is not None and one != other:
            found.append(
                f"peak {title} was {exact_bytes(one)} bytes in the control run and {exact_bytes(other)} in the "
                "recorded run; the breakdown uses the control run's total"
            )
    return found


def check_allocator(workload: Workload) -> None:
    """Raise ``WorkloadError`` for allocator options that the installed PyTorch would refuse."""
    if (installed := version_of("torch")) is not None:
        major, minor = installed.split(".")[:2]
        AllocatorSettings.parse(workload.allocator, (int(major), int(minor)))


def writable(path: Path, option: str = "--trace") -> Path:
    """Return the absolute path after checking that a file can be written there.

    Raises:
        WorkloadError: It cannot; the message names ``option``.
    """
    target = path.expanduser().absolute()
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.") as probe:
            probe.write(b"x")
            probe.flush()
        if target.is_dir() or (target.exists() and not os.access(target, os.W_OK)):
            raise IsADirectoryError if target.is_dir() else PermissionError
    except OSError as error:
        why = error.strerror or ("it is a folder" if target.is_dir() else "no permission to write it")
        raise WorkloadError(f"{option}: {target} cannot be written: {why}. Name another file.") from error
    return target


def _stage_printer() -> Callable[[Progress], None]:
    """Return a function that prints each stage once."""
    printed: set[tuple[str, str]] = set()

    def report(progress: Progress) -> None:
        if (progress.run, progress.stage) not in printed:
            printed.add((progress.run, progress.stage))
            print(Progress(progress.run, progress.stage), file=sys.stderr, flush=True)

    return report
