"""Measure a training on several GPUs of this machine: one process for each, and a measurement of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from trainatomy.errors import TrainatomyError
from trainatomy.measurement.measure import merge_runs
from trainatomy.measurement.process.job import from_plain, needs_bitsandbytes
from trainatomy.measurement.process.ranks import RankAnswer, RankProcesses, RankTask
from trainatomy.results.measurement import Measurement, RankMeasurement

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainatomy.measurement.process.job import Job
    from trainatomy.measurement.process.pool import TimeLimit
    from trainatomy.measurement.process.progress import Progress

_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
RUN = "trainatomy.measurement.step.runner:run_rank"


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


def measure_ranks(
    jobs: Sequence[Job],
    gpus: int,
    limit: TimeLimit | None,
    on_progress: Callable[[Progress], None],
    environment: Mapping[str, str] = _NO_VARIABLES,
) -> Measurement:
    """Run the control job and, if there is one, the recorded job on several GPUs; return rank 0's measurement.

    The others are its ``other_ranks``.  If only another rank ran out of memory, the result is that rank's.
    ``environment`` are variables that the ranks get besides those of this process.

    Raises:
        DeviceError: A process died, or the runs did not end within ``limit``.
        TrainatomyError: The workload itself failed.
    """
    workload = jobs[0].workload
    allocator, forks = str(workload.get("allocator", "")), not needs_bitsandbytes(workload)
    with RankProcesses(gpus, allocator, forks=forks, environment=environment) as processes:
        runs = run_in_ranks(processes, jobs[0], limit, on_progress)
        if len(jobs) > 1:
            try:
                runs = _merged(runs, run_in_ranks(processes, jobs[1], limit, on_progress))
            except TrainatomyError as error:
                note = f"the recorded run failed, so there is no memory breakdown: {error}"
                runs = replace(runs, notes=(*runs.notes, note))
    return gathered(runs)


def run_in_ranks(
    processes: RankProcesses, job: Job, limit: TimeLimit | None, on_progress: Callable[[Progress], None]
) -> RankRuns:
    """Run a job in every rank; raises as ``measure_ranks``."""
    task = RankTask("recorded" if job.recorded else "control", RUN, {"job": job.to_json()})
    answers = processes.run(task, limit, on_progress)
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
        other_ranks=tuple(map(RankMeasurement.of, others)),
        notes=tuple(dict.fromkeys((*main.notes, *of_others, *runs.notes))),
    )


def _merged(control: RankRuns, recorded: RankRuns) -> RankRuns:
    """Return the control runs, each with the memory breakdown of its recorded run."""
    merged = []
    for one in control.measurements:
        other = recorded.of(one.rank)
        merged.append(one if other is None else merge_runs(one, other))
    return RankRuns(tuple(merged), tuple(dict.fromkeys((*control.notes, *recorded.notes))))


def _raise_failure(answers: Sequence[RankAnswer]) -> None:
    """Raise the error of the rank that failed first, if one did."""
    for answer in answers:
        if answer.went_well or answer.was_stopped:
            continue
        if answer.result is None:
            raise answer.died()
        from_plain(answer.result)
