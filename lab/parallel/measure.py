"""Measure the cases on this machine's GPUs: ``python lab/parallel/measure.py --gpus 2``.

A server loads the libraries once and forks a process for each GPU and case, so that CUDA and NCCL are new in each.
Each measurement becomes a line of the file at once, each failure a line of FILE.failed; a second call resumes (and
repeats what failed).  ``--collectives FILE`` first times collectives by size, unless FILE exists.  ``--list`` prints
what would run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import parallel_cases
from parallel_cases import GPU, GPUS, Case, records

from trainatomy.errors import TrainatomyError
from trainatomy.measurement import measure as ranks
from trainatomy.measurement.calibration.device import collectives_section
from trainatomy.measurement.device.nvml import require_gpus
from trainatomy.measurement.measure import MOST_STEPS, TIMED_STEPS
from trainatomy.measurement.process.job import Job, warm_up_steps
from trainatomy.measurement.process.pool import Processes, TimeLimit
from trainatomy.workload.parallel import ParallelSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainatomy.measurement.process.job import Progress
    from trainatomy.results.measurement import Measurement

TIMED_SECONDS = 1.0
"""Short steps are repeated until they took this long together, or until ``MOST_STEPS`` ran."""


COLLECTIVES_SECONDS = 60.0

STARTING_SECONDS = 150.0
"""What the first case of new processes may take besides: a fresh machine reads the libraries for a minute."""


def job_of(case: Case) -> Job:
    """Return the job of a case: timed, with nothing recorded."""
    workload = case.workload()
    steps = warm_up_steps(workload) + TIMED_STEPS
    return Job(workload.to_mapping(), steps, most_steps=MOST_STEPS, seconds=TIMED_SECONDS)


def measure(cases: list[Case], options: argparse.Namespace) -> list[str]:
    """Measure cases until the time is up; return the names of those that failed."""
    failed: list[str] = []
    deadline = time.monotonic() + options.time_limit
    waiting = list(cases)
    with Processes() as processes:
        starting = STARTING_SECONDS
        while waiting and time.monotonic() < deadline:
            case = waiting.pop(0)
            began = time.monotonic()
            try:
                limit = TimeLimit(options.case_limit + starting)
                starting = 0.0
                found = ranks.measure_jobs(processes, [job_of(case)], limit, _ignore)
            except TrainatomyError as error:
                failed.append(case.name)
                _append(options.out.with_name(f"{options.out.name}.failed"), {"name": case.name, "error": str(error)})
                print(f"{case.name}: FAILED in {time.monotonic() - began:.1f} s: {error}", flush=True)
            else:
                _append(options.out, line_of(case, found))
                print(_line(case, found, time.monotonic() - began), flush=True)
    for case in waiting:
        print(f"{case.name}: left out, out of time", flush=True)
    return failed


def line_of(case: Case, found: Measurement) -> dict[str, Any]:
    """Return what is kept of a case."""
    return asdict(found) | {"name": case.name, "held_out": case.held_out, "workload": dict(case.mapping)}


def _line(case: Case, found: Measurement, seconds: float) -> str:
    """Return a short line: MiB allocated, reserved, of the device and of NCCL, and milliseconds, of each rank."""
    shown = []
    for rank in found.ranks.values():
        sizes = (rank.peak_allocated_bytes, rank.peak_reserved_bytes, rank.device_bytes, rank.nccl_bytes)
        cells = ["-" if size is None else f"{size / 2**20:.1f}" for size in sizes]
        times = (rank.step_seconds, rank.synchronized_step_seconds)
        cells += ["-" if each is None else f"{each * 1000:.1f} ms" for each in times]
        shown.append(" ".join(cells))
    return f"{case.name:32} {found.status}: {' | '.join(shown)} in {seconds:.1f} s"


def measure_collectives(path: Path, gpus: int) -> None:
    """Time collectives between the GPUs of this machine and write the points, unless they are on file."""
    if not path.exists():
        found = collectives_section(gpus, time_limit=COLLECTIVES_SECONDS, report=lambda line: print(line, flush=True))
        path.write_text(json.dumps(found) + "\n", encoding="utf-8")


def _ignore(progress: Progress) -> None:
    """Show no progress within a case."""


def _append(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(content) + "\n")


def chosen(options: argparse.Namespace) -> list[Case]:
    """Return the requested cases that are not on file."""
    every = parallel_cases.cases(options.cases, options.gpus, options.gpu)
    names = options.names.split(",") if options.names else [case.name for case in every]
    if unknown := set(names) - {case.name for case in every}:
        raise SystemExit(f"no such cases: {', '.join(sorted(unknown))}")
    lines = options.out.read_text(encoding="utf-8").splitlines() if options.out.exists() else []
    done = {json.loads(line)["name"] for line in lines}
    return [case for case in every if case.name in names and case.name not in done]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=GPUS, help="GPUs of this machine that each case trains on")
    parser.add_argument("--gpu", default=GPU, help=f"name of these GPUs (default: {GPU})")
    parser.add_argument("--out", type=Path, help="file of records (default: records/GPUxGPUS.jsonl)")
    parser.add_argument(
        "--cases", type=Path, help="file of cases (default: cases.yaml for two GPUs, else several.yaml)"
    )
    parser.add_argument("--collectives", type=Path, help="file of the times of collectives, which are measured first")
    parser.add_argument("--names", help="cases, separated by commas")
    parser.add_argument("--time-limit", type=float, default=480, help="seconds after which no case starts")
    parser.add_argument("--case-limit", type=float, default=90, help="seconds that a case may take")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    options = parser.parse_args(arguments)
    options.out = options.out or records(options.gpus, options.gpu)
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure; return 1 where a case failed."""
    options = parse(arguments)
    waiting = chosen(options)
    if options.list:
        print("\n".join(f"{case.name:32} {'held out' if case.held_out else 'tuning'}" for case in waiting))
        return 0
    print(f"{len(waiting)} cases on {require_gpus(ParallelSpec(gpus=options.gpus))}", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    if options.collectives:
        measure_collectives(options.collectives, options.gpus)
    failed = measure(waiting, options)
    print(
        f"{len(waiting) - len(failed)} measured or left out, {len(failed)} failed in {time.monotonic() - began:.0f} s"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
