"""Measure the grid on this machine's GPU: ``python lab/accuracy/measure_grid.py --out DIR [--only tuning]``.

Each row runs twice, each time in its own process: without recording, for its time and its peaks, then with
allocations recorded, for the memory breakdown (``--no-record``: the first run only).  Several rows run at a time, since
the allocator's figures concern one process only.  The figures of the whole GPU and times need an otherwise idle GPU, so
rows marked ``alone`` run last, one after the other; so do rows that ran out of memory or made the allocator retry.
``--jobs 1`` runs every row alone.

Each result becomes a line of DIR/measured.jsonl at once, each failure a line of DIR/failed.jsonl; a second call
resumes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import grid
import processes
from grid import Row
from measured_lines import append, line_of, table, with_record

from trainatomy.errors import TrainatomyError
from trainatomy.measurement.measure import require_gpu
from trainatomy.measurement.process.job import Job, Stacks
from trainatomy.measurement.process.pool import process_died

if TYPE_CHECKING:
    from trainatomy.results.measurement import Measurement

POLL_SECONDS = 0.02
STEPS = {"control": 8, "record": 4}
"""Optimizer steps: two to warm up, six to time, and as many as the peak needs."""
SCALED_STEPS = {"control": 10, "record": 8}
"""Steps with float16 gradients: a loss scale that starts too high skips the first steps and their optimizer states."""

MOST_STEPS = 30
TIMED_SECONDS = 0.5
"""Short steps are repeated until they take this long together, or until that many ran."""

Part = Literal["control", "record"]


class Task(NamedTuple):
    """Either of the two runs of a row."""

    row: Row
    part: Part


@dataclass
class Campaign:
    """State of a measurement of many rows: waiting, running, done; ``controls``: rows whose second run is due."""

    options: argparse.Namespace
    forking: bool
    beside: deque[Row]
    alone: deque[Row]
    running: list[tuple[Task, processes.Running]] = field(default_factory=list)
    controls: dict[str, Measurement] = field(default_factory=dict)
    done: list[Measurement] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        """Run everything that there is time for; kill running processes when interrupted."""
        try:
            while self._start_more() or self.running:
                time.sleep(POLL_SECONDS)
                for task, process in list(self.running):
                    self._look_after(task, process)
        finally:
            for _, process in self.running:
                process.process.kill()

    def _start_more(self) -> bool:
        """Start the processes that may start now; return False once nothing is left to start."""
        if time.monotonic() - self.began > self.options.time_limit:
            return False
        while self.beside and len(self.running) < self.options.jobs:
            self._start(Task(self.beside.popleft(), "control"), alone=self.options.jobs == 1)
        if self.alone and not self.beside and not self.running:
            self._start(Task(self.alone.popleft(), "control"), alone=True)
        return bool(self.beside or self.alone)

    def _start(self, task: Task, *, alone: bool) -> None:
        job = job_of(task, self.options, alone=alone)
        stem = f"{task.row.name}.{task.part}"
        description, result, log = (self.options.work / f"{stem}.{kind}" for kind in ("json", "result.json", "log"))
        result.unlink(missing_ok=True)
        if self.forking and processes.can_fork(job):
            process: processes.Process = processes.fork(job, result, log)
        else:
            process = processes.start(job, description, result, log)
        self.running.append((task, processes.Running(task.row.name, process, result, log, alone)))

    def _look_after(self, task: Task, running: processes.Running) -> None:
        """Take the result of a finished process; stop one that takes too long."""
        status = running.process.status()
        if status is None:
            if time.monotonic() - running.began < self.options.row_limit:
                return
            running.process.kill()
        self.running.remove((task, running))
        try:
            measurement = processes.read_result(running.result)
        except FileNotFoundError:
            log = processes.last_lines(running.log)
            late = f"did not end within {self.options.row_limit} s; its last lines:\n{log}"
            self._fail(task, running, late if status is None else process_died(status, log))
        except TrainatomyError as error:
            self._fail(task, running, str(error))
        else:
            self._take(task, running, measurement)

    def _take(self, task: Task, running: processes.Running, measurement: Measurement) -> None:
        if task.part == "record":
            self._keep(task.row, with_record(self.controls.pop(task.row.name), measurement), running)
        elif not running.alone and (measurement.status != "completed" or measurement.num_alloc_retries):
            self.alone.append(task.row)  # the others may have taken the memory that it lacked
        elif self.options.record:
            self.controls[task.row.name] = measurement
            self._start(Task(task.row, "record"), alone=running.alone)
        else:
            self._keep(task.row, measurement, running)

    def _keep(self, row: Row, measurement: Measurement, running: processes.Running) -> None:
        measurement = replace(measurement, workload=dict(row.mapping))
        self.done.append(measurement)
        append(
            self.options.out / "measured.jsonl",
            line_of(measurement, row, alone=running.alone, occasion=self.options.occasion),
        )
        seconds = time.monotonic() - running.began
        print(
            f"{row.name}: {measurement.status}, {measurement.peak_allocated_bytes:,} B in {seconds:.1f} s", flush=True
        )

    def _fail(self, task: Task, running: processes.Running, message: str) -> None:
        """Record a failure; where the second run of a row failed, its first is kept."""
        name = task.row.name
        self.failed.append(name)
        append(self.options.out / "failed.jsonl", {"name": name, "part": task.part, "message": message})
        print(f"{name}: {task.part}: FAILED: {message}", flush=True)
        if task.part == "record":
            self._keep(task.row, self.controls.pop(name), running)


def job_of(task: Task, options: argparse.Namespace, *, alone: bool) -> Job:
    """Return the worker's job."""
    mapping = task.row.workload().to_mapping()
    scaled = bool(mapping.get("train", {}).get("fp16"))
    steps = max(options.steps or 0, SCALED_STEPS[task.part]) if scaled else options.steps or STEPS[task.part]
    if task.part == "control":
        return Job(mapping, steps, alone=alone, most_steps=max(steps, MOST_STEPS), seconds=TIMED_SECONDS)
    trace = (options.out / f"{task.row.name}.tape.json.gz").absolute() if options.trace else None
    return Job(mapping, steps, trace, options.stacks if trace else "none", alone, record=True)


def chosen(options: argparse.Namespace) -> list[Row]:
    """Return the requested rows that are not yet measured."""
    names = options.names.split(",") if options.names else None
    found = grid.rows()
    if names and (unknown := set(names) - {row.name for row in found}):
        raise SystemExit(f"no such rows: {', '.join(sorted(unknown))}")
    files = [path for path in (options.out / "measured.jsonl", *options.done) if path.exists()]
    done = {json.loads(line)["name"] for path in files for line in path.read_text(encoding="utf-8").splitlines()}
    return [
        row
        for row in found
        if row.name not in done
        and (names is None or row.name in names)
        and (options.only == "all" or row.held_out == (options.only == "heldout"))
    ]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; ``rows`` holds the chosen rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--work", type=Path, help="folder of workers' logs and results (default: a temporary one)")
    parser.add_argument("--done", type=Path, nargs="*", default=[], help="more measured.jsonl whose rows are done")
    parser.add_argument("--occasion", default="", help="name in records/occasions.yaml (default: the date)")
    parser.add_argument("--only", choices=("tuning", "heldout", "all"), default="all")
    parser.add_argument("--names", help="rows, separated by commas")
    parser.add_argument("--jobs", type=int, default=4, help="rows that run at a time (default: 4)")
    parser.add_argument("--steps", type=int, help="optimizer steps of each run (default: 8, recorded 4; float16: more)")
    parser.add_argument(
        "--time-limit", type=float, default=540, help="seconds after which no row starts (default: 540)"
    )
    parser.add_argument("--row-limit", type=float, default=100, help="seconds that a run may take (default: 100)")
    parser.add_argument("--no-fork", action="store_true", help="start every row's process afresh")
    parser.add_argument("--no-record", dest="record", action="store_false", help="time and peaks only: one run a row")
    parser.add_argument("--trace", action="store_true", help="keep each recorded run's tape in the folder")
    parser.add_argument(
        "--stacks", choices=get_args(Stacks), default="none", help="with --trace: where each allocation came from"
    )
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    options.work = options.work or Path(tempfile.mkdtemp(prefix="trainatomy-grid-"))
    options.work.mkdir(parents=True, exist_ok=True)
    options.rows = chosen(options)
    return options


def main() -> int:
    """Measure; return 1 where a row failed."""
    options = parse()
    print(f"{len(options.rows)} rows on {require_gpu()}", flush=True)
    forking = not options.no_fork and processes.preload()
    print(f"forking: {forking}", flush=True)
    beside = deque(row for row in options.rows if not row.alone)
    campaign = Campaign(options, forking, beside, deque(row for row in options.rows if row.alone))
    campaign.run()
    left = len(options.rows) - len(campaign.done) - len(campaign.failed)
    print(table(campaign.done))
    print(f"{len(campaign.done)} measured, {len(campaign.failed)} failed ({', '.join(campaign.failed)}), {left} left")
    return 1 if campaign.failed else 0


if __name__ == "__main__":
    sys.exit(main())
