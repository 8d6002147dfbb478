"""Measure a training on this machine's GPUs: in a process for each, of which each is measured.

Each run gets fresh processes, because earlier runs leave memory behind: a CUDA context, loaded kernels, library
workspaces, cached segments.  There are two runs, because recording takes time: the *control run*, in which nothing is
recorded, gives times and totals; the *recorded run* gives the memory breakdown.
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.errors import TrainatomyError, WorkloadError
from trainatomy.libraries import version_of
from trainatomy.measurement.device.nvml import require_gpu, require_gpus
from trainatomy.measurement.process.job import (
    Job,
    Progress,
    Task,
    from_plain,
    needs_bitsandbytes,
    warm_up_steps,
)
from trainatomy.measurement.process.pool import Answer, Processes, TimeLimit
from trainatomy.measurement.traces.breakdown import MeasuredTotals, reconcile
from trainatomy.results.measurement import Measurement, RankMeasurement
from trainatomy.units import exact_bytes
from trainatomy.workload.loops import loop_of
from trainatomy.workload.schema import Workload

RUN = "trainatomy.measurement.step.runner:run_rank"
PREPARE = "trainatomy.measurement.step.building:build_beforehand"


@dataclass(frozen=True, slots=True)
class RankRuns:
    """A run in every rank.

    Attributes:
        measurements: The measurements, in the order in which the ranks ended; ranks that were stopped have none.
        notes: What happened to those.
    """

    measurements: tuple[Measurement, ...]
    notes: tuple[str, ...] = ()

    def of(self, rank: int) -> Measurement | None:
        """Return the measurement of a rank, if it has one."""
        return next((each for each in self.measurements if each.rank == rank), None)

    def noting(self, note: str) -> RankRuns:
        """Return them with one note more."""
        return replace(self, notes=(*self.notes, note))


class MeasurementInterrupted(KeyboardInterrupt):
    """Ctrl-C during the recorded run.

    Attributes:
        measurement: That of the control run.
    """

    def __init__(self, measurement: Measurement) -> None:
        super().__init__()
        self.measurement = measurement


def measure_jobs(
    processes: Processes,
    jobs: Sequence[Job],
    limit: TimeLimit | None,
    on_progress: Callable[[Progress], None],
    meanwhile: Callable[[], None] | None = None,
) -> Measurement:
    """Run the control job and, if there is one, the recorded job; return rank 0's measurement.

    The others are its ``other_ranks``.  If only another rank ran out of memory, the result is that rank's.
    ``meanwhile`` is called while the control run prepares its timed steps, which wait for its end.

    Raises:
        DeviceError: A process died, or the runs did not end within ``limit``.
        TrainatomyError: The workload itself failed.
        MeasurementInterrupted: On Ctrl-C during the recorded run.
    """
    if meanwhile is None:
        runs = run_in_ranks(processes, jobs[0], limit, on_progress)
    else:
        with tempfile.NamedTemporaryFile(prefix="trainatomy-quiet-") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)

            def work() -> None:
                meanwhile()
                fcntl.flock(lock, fcntl.LOCK_UN)

            runs = run_in_ranks(processes, replace(jobs[0], quiet=Path(lock.name)), limit, on_progress, work)
    if len(jobs) > 1:
        try:
            runs = _merged(runs, run_in_ranks(processes, jobs[1], limit, on_progress))
        except TrainatomyError as error:
            runs = runs.noting(f"the recorded run failed, so there is no memory breakdown: {error}")
        except KeyboardInterrupt as interrupt:
            runs = runs.noting("the recorded run was interrupted, so there is no memory breakdown")
            raise MeasurementInterrupted(gathered(runs)) from interrupt
    return gathered(runs)


def task_of(job: Job) -> Task:
    """Return the task that runs a job in every rank of its training."""
    workload = Workload.from_mapping(job.workload)
    parallel = workload.parallel
    return Task(
        "recorded" if job.recorded else "control",
        RUN,
        {"job": job.to_json()},
        prepare=PREPARE,
        ranks=parallel.processes,
        allocator=str(workload.allocator),
        loop=loop_of(workload).name,
        preloaded=not needs_bitsandbytes(job.workload),
        environment=parallel.nccl_environment if parallel.processes > 1 else {},
    )


def run_in_ranks(
    processes: Processes,
    job: Job,
    limit: TimeLimit | None,
    on_progress: Callable[[Progress], None],
    meanwhile: Callable[[], None] = lambda: None,
) -> RankRuns:
    """Run a job in every rank; raises as ``measure_jobs``."""
    answers = processes.run(task_of(job), limit, on_progress, meanwhile)
    measurements = tuple(
        from_plain(answer.result) for answer in answers if answer.result is not None and "measurement" in answer.result
    )
    failed = next((each for each in measurements if each.status != "completed"), None)
    if failed is None:
        _raise_failure(answers)
        return RankRuns(measurements)
    missing = sorted({answer.rank for answer in answers} - {each.rank for each in measurements})
    notes = (
        f"rank {rank} was stopped, and is not measured, because rank {failed.rank} ran out of memory"
        for rank in missing
    )
    return RankRuns(measurements, tuple(notes))


def gathered(runs: RankRuns) -> Measurement:
    """Return the main measurement with the others in it."""
    failed = [each for each in runs.measurements if each.status != "completed"]
    candidates = failed or runs.measurements
    main = next((each for each in candidates if each.rank == 0), candidates[0])
    others = sorted((each for each in runs.measurements if each.rank != main.rank), key=lambda one: one.rank)
    of_others = (f"rank {each.rank}: {note}" for each in others for note in each.notes if note not in main.notes)
    return replace(
        main,
        other_ranks=tuple(map(RankMeasurement.of, others)) if others else main.other_ranks,
        notes=tuple(dict.fromkeys((*main.notes, *of_others, *runs.notes))),
    )


def _merged(control: RankRuns, recorded: RankRuns) -> RankRuns:
    """Return the control runs, each with the memory breakdown of its recorded run."""
    merged = []
    for one in control.measurements:
        other = recorded.of(one.rank)
        merged.append(one if other is None else merge_runs(one, other))
    return RankRuns(tuple(merged), tuple(dict.fromkeys((*control.notes, *recorded.notes))))


def _raise_failure(answers: Sequence[Answer]) -> None:
    """Raise the error of the rank that failed first, if one did."""
    for answer in answers:
        if answer.went_well or answer.was_stopped:
            continue
        if answer.result is None:
            raise answer.died()
        from_plain(answer.result)


TIMED_STEPS = 8
MOST_STEPS = 100
TIMED_SECONDS = 3.0
"""The control run times at least ``TIMED_STEPS`` steps, and more of them until they took this long together."""

ENDING_SECONDS = 2.0
"""Time that a run may take from its last step to its result: a limit leaves it for that."""

_COMPARED_TOTALS = (
    ("allocated memory", "peak_allocated_bytes"),
    ("reserved memory", "peak_reserved_bytes"),
    ("device memory", "device_bytes"),
)

__all__ = ["jobs_for", "measure", "merge_runs", "require_gpu"]


@dataclass(frozen=True, slots=True)
class Runs:
    """Which runs to make.

    Attributes:
        components: Run a second time with recording, for the memory breakdown.
        trace: File for the recorded run's allocation history.
        time_limit: Seconds for everything.
        steps: Optimizer steps of each run, if the workload does not set them (default: enough for a stable median).
    """

    components: bool = True
    trace: Path | str | None = None
    time_limit: float | None = None
    steps: int | None = None


def measure(
    workload: Workload,
    runs: Runs,
    progress: Callable[[Progress], None] | None = None,
    meanwhile: Callable[[], None] | None = None,
    processes: Processes | None = None,
) -> Measurement:
    """Run ``workload`` on this machine's GPUs and return the measurement; running out of memory is a result too.

    Args:
        workload: The training to run.
        runs: Which runs to make.
        progress: Called with the progress, in another thread (default: print a line to stderr for each stage).
        meanwhile: Called while the control run prepares its timed steps, which wait for its end.
        processes: Where to run (default: processes that are started and ended here).

    Raises:
        DeviceError: There are fewer GPUs than the training uses, or the control run's process died or took too long.
        TrainatomyError: The workload itself failed.  If only the recorded run failed, the result lacks its memory
            breakdown and a note says why.
    """
    on_progress = progress or _stage_printer()
    check_allocator(workload)
    target = None if runs.trace is None else writable(Path(runs.trace))
    found = require_gpus(workload.parallel) if workload.parallel.world_size > 1 else require_gpu()
    on_progress(Progress("control", f"starting on {found}"))
    jobs = jobs_for(workload, runs.steps, components=runs.components, trace=target)
    limit = None if runs.time_limit is None else TimeLimit(runs.time_limit)
    if limit is not None:
        jobs[0] = replace(jobs[0], until=limit.began + limit.seconds - ENDING_SECONDS)
    with Processes() if processes is None else nullcontext(processes) as running:
        return measure_jobs(running, jobs, limit, on_progress, meanwhile)


def jobs_for(workload: Workload, steps: int | None, *, components: bool, trace: Path | None = None) -> list[Job]:
    """Return the job of the control run and, if components or a trace are wanted, that of the recorded run."""
    mapping = workload.to_mapping()
    exact = workload.steps or steps
    count = exact or warm_up_steps(workload) + TIMED_STEPS
    control = Job(mapping, count, most_steps=0 if exact else MOST_STEPS, seconds=0.0 if exact else TIMED_SECONDS)
    if not components and trace is None:
        return [control]
    return [control, Job(mapping, count, trace, record=components)]


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
