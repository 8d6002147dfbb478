"""Measure the cases on this machine's GPU: ``python lab/everyday/measure.py --gpu h200``.

The code path is that of ``trainatomy measure``: one worker loads the libraries once and forks for each case, so that
CUDA is new in each.  A case is timed, and nothing is recorded.  Each measurement becomes a line of
``records/GPU/KIND.jsonl`` at once, each failure a line of ``KIND.jsonl.failed``; a second call resumes and repeats
what failed.  Cases without a stored prediction are refused, so that none is predicted after it was seen.  ``--list``
prints what would run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import everyday_cases
from checkpoint import made_elsewhere
from everyday_cases import Case

from trainatomy.errors import TrainatomyError
from trainatomy.measurement.device.nvml import require_gpu
from trainatomy.measurement.measure import measure_jobs
from trainatomy.measurement.process.job import Job, Progress, warm_up_steps
from trainatomy.measurement.process.pool import Processes, TimeLimit
from trainatomy.results.measurement import Measurement

TIMED_STEPS = 14
TIMED_SECONDS = 2.5
MOST_STEPS = 60
"""A case is timed for at least ``TIMED_STEPS``, and until it took ``TIMED_SECONDS`` or ``MOST_STEPS`` ran.

Readings of the host's pace between steps scatter by 14 % around their mean, one independent of the next, and steps by
6 %: with six steps the readings' own noise was 5 to 6 % of the time at the pace.
"""


def job_of(case: Case, gpu: str, trace: Path | None = None) -> Job:
    """Return the job of a case; with ``trace``, a short one whose allocations are recorded.

    Texts of different lengths are trained for an epoch; a step of generation is a call of ``generate()``.
    """
    workload = case.workload(gpu)
    mapping, warm_up = workload.to_mapping(), warm_up_steps(workload)
    if trace is not None:
        return Job(mapping, warm_up + 1, trace=trace)
    if workload.steps is not None:
        return Job(mapping, workload.steps)
    return Job(mapping, warm_up + TIMED_STEPS, most_steps=MOST_STEPS, seconds=TIMED_SECONDS)


def measure(waiting: list[Case], out: Path, options: argparse.Namespace) -> list[str]:
    """Measure cases until the time is up; return the names of those that failed."""
    failed: list[str] = []
    deadline = time.monotonic() + options.time_limit
    with Processes() as processes:
        for case in waiting:
            if time.monotonic() > deadline:
                print(f"{case.name}: left out, out of time", flush=True)
                continue
            began, file = time.monotonic(), out if out.suffix else out / f"{case.kind}.jsonl"
            try:
                trace = (options.traces / f"{case.name}.json.gz").absolute() if options.traces else None
                job = replace(job_of(case, options.gpu, trace), alone=not options.shared)
                with _resumed(job, case, options) as job:
                    found = measure_jobs(processes, [job], TimeLimit(options.case_limit), _ignore)
            except (TrainatomyError, subprocess.SubprocessError) as error:
                failed.append(case.name)
                everyday_cases.append(file.with_name(f"{file.name}.failed"), {"name": case.name, "error": str(error)})
                print(f"{case.name}: FAILED in {time.monotonic() - began:.1f} s: {error}", flush=True)
            else:
                everyday_cases.append(file, line_of(case, found, shared=options.shared))
                sizes = f"{found.peak_allocated_bytes:,} {found.peak_reserved_bytes:,}"
                print(f"{case.name:40} {found.status}: {sizes} in {time.monotonic() - began:.1f} s", flush=True)
    return failed


def in_turns(cases: Sequence[Case]) -> list[Case]:
    """Return the cases with their kinds taking turns, so that a time limit cuts all of them."""
    seen = Counter[str]()
    turns = []
    for case in cases:
        turns.append((seen[case.kind], case))
        seen[case.kind] += 1
    return [case for _, case in sorted(turns, key=lambda one: one[0])]


@contextmanager
def _resumed(job: Job, case: Case, options: argparse.Namespace) -> Iterator[Job]:
    """Yield the job with a real checkpoint, if the case continues from one."""
    train = job.workload.get("train", {})
    if not train.get("resume_from_checkpoint"):
        yield job
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "checkpoint-1"
        made_elsewhere(case.name, place, options.cases, options.case_limit)
        yield replace(job, workload={**job.workload, "train": {**train, "resume_from_checkpoint": str(place)}})


def line_of(case: Case, found: Measurement, *, shared: bool) -> dict[str, Any]:
    """Return what is kept of a case."""
    about = {"name": case.name, "kind": case.kind, "held_out": case.held_out, "workload": dict(case.mapping)}
    about |= {"shared": True} if shared else {}
    return asdict(found) | about


def as_stored(case: Case) -> dict[str, Any]:
    """Return the mapping of a case as it reads in a file of JSON, whose keys are texts."""
    stored: dict[str, Any] = json.loads(json.dumps(dict(case.mapping)))
    return stored


def _ignore(progress: Progress) -> None:
    """Show no progress within a case."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h200", help="the GPU of this machine, whose predictions are stored")
    parser.add_argument("--cases", type=Path, default=everyday_cases.CASES, help="folder of cases")
    parser.add_argument("--predictions", type=Path, help="default: predictions/GPU.jsonl")
    parser.add_argument("--out", type=Path, help="a file, or a folder with a file for each kind (default: records/GPU)")
    parser.add_argument("--names", help="cases, separated by commas")
    parser.add_argument("--kinds", help="kinds of cases, such as evaluation,generation")
    parser.add_argument("--part", default="0/1", help="measure one part of the cases, 0/4 is the first of four")
    parser.add_argument("--time-limit", type=float, default=540, help="seconds after which no case starts")
    parser.add_argument("--case-limit", type=float, default=60, help="seconds that a case may take")
    parser.add_argument("--shared", action="store_true", help="other runs use the GPU: times are not to be compared")
    parser.add_argument("--unpredicted", action="store_true", help="measure cases without a stored prediction too")
    parser.add_argument("--traces", type=Path, help="record the allocations of a few steps instead, in this folder")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure; return 1 where a case failed."""
    options = parse(arguments)
    if options.traces:
        options.traces.mkdir(parents=True, exist_ok=True)
    out = options.out or everyday_cases.RECORDS / options.gpu
    stored = options.predictions or everyday_cases.PREDICTIONS / f"{options.gpu}.jsonl"
    done = {line["name"] for line in everyday_cases.lines(out)}
    every = everyday_cases.chosen(everyday_cases.cases(options.cases), options.names, options.kinds)
    first, parts = map(int, options.part.split("/"))
    waiting = in_turns([case for case in every[first::parts] if case.name not in done])
    if options.list:
        print("\n".join(f"{case.kind:12} {case.name:40} {'held out' if case.held_out else ''}" for case in waiting))
        return 0
    predicted = {line["name"]: line["workload"] for line in everyday_cases.lines(stored) if "error" not in line}
    unpredicted = [case.name for case in waiting if predicted.get(case.name) != as_stored(case)]
    if unpredicted and not options.unpredicted:
        raise SystemExit(f"predict these first, as they are written now (predict.py): {', '.join(unpredicted)}")
    print(f"{len(waiting)} cases on {require_gpu()}", flush=True)
    failed = measure(waiting, out, options)
    print(f"{len(waiting) - len(failed)} measured or left out, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
