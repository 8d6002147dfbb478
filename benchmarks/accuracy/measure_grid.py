"""Measure the grid on this machine's GPU: ``python benchmarks/accuracy/measure_grid.py --out DIR [--only tuning]``.

Several rows run at a time, each in a process of its own: what PyTorch's allocator holds is a matter of one process.
What the whole card holds is not, so rows marked ``alone`` come last, one after the other; so do rows that ran out of
memory or made the allocator retry beside others.  Each result is a line of DIR/measured.jsonl as soon as it is there,
failures are lines of DIR/failed.jsonl, and a second call goes on where the first one ended.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import deque
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import grid
import processes
from grid import Row

from trainatomy.errors import TrainatomyError
from trainatomy.gpu.job import STACKS, Job, read_result
from trainatomy.gpu.measure import died, last_lines, require_gpu

if TYPE_CHECKING:
    from trainatomy.results.bill import Measurement

POLL_SECONDS = 0.05
SCALED_STEPS = 8
"""With float16 gradients: a scale that starts too high skips its first steps, and with them the optimizer's states."""


@dataclass
class Campaign:
    """The measuring of many rows: what waits, what runs, what is done."""

    options: argparse.Namespace
    forking: bool
    beside: deque[Row]
    alone: deque[Row]
    running: list[processes.Running] = field(default_factory=list)
    done: list[Measurement] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        """Run everything that there is time for; kills what runs when interrupted."""
        try:
            while self._start_more() or self.running:
                time.sleep(POLL_SECONDS)
                for process in list(self.running):
                    self._look_after(process)
        finally:
            for process in self.running:
                process.process.kill()

    def _start_more(self) -> bool:
        """Start what may start now; False once nothing is left to start."""
        if time.monotonic() - self.began > self.options.time_limit:
            return False
        while self.beside and len(self.running) < self.options.jobs:
            self._start(self.beside.popleft(), alone=self.options.jobs == 1)
        if self.alone and not self.beside and not self.running:
            self._start(self.alone.popleft(), alone=True)
        return bool(self.beside or self.alone)

    def _start(self, row: Row, *, alone: bool) -> None:
        job = job_of(row, self.options, alone=alone)
        description, result, log = (self.options.work / f"{row.name}.{kind}" for kind in ("json", "result.json", "log"))
        result.unlink(missing_ok=True)
        description.write_text(json.dumps(job.workload), encoding="utf-8")
        if self.forking and processes.can_fork(job):
            process: processes.Process = processes.fork(job, result, log)
        else:
            process = processes.start(job, description, result, log)
        self.running.append(processes.Running(row.name, process, result, log, alone))

    def _look_after(self, running: processes.Running) -> None:
        """Take the result of a process that ended; stop one that takes too long."""
        status = running.process.status()
        if status is None:
            if time.monotonic() - running.began < self.options.row_limit:
                return
            running.process.kill()
        self.running.remove(running)
        try:
            measurement = read_result(running.result)
        except FileNotFoundError:
            late = f"did not end within {self.options.row_limit} s; its last lines:\n{last_lines(running.log)}"
            self._fail(running.name, late if status is None else died(status, last_lines(running.log)))
        except TrainatomyError as error:
            self._fail(running.name, str(error))
        else:
            self._take(running, measurement)

    def _take(self, running: processes.Running, measurement: Measurement) -> None:
        row = next(row for row in self.options.rows if row.name == running.name)
        if not running.alone and (measurement.status != "completed" or measurement.num_alloc_retries):
            self.alone.append(row)  # the others may have taken the memory that it lacked
            return
        measurement = replace(measurement, workload=dict(row.mapping))
        self.done.append(measurement)
        seconds = time.monotonic() - running.began
        line = asdict(measurement) | {"held_out": row.held_out, "family": row.family, "alone": running.alone}
        append(self.options.out / "measured.jsonl", line)
        print(
            f"{row.name}: {measurement.status}, {measurement.peak_allocated_bytes:,} B in {seconds:.1f} s", flush=True
        )

    def _fail(self, name: str, message: str) -> None:
        self.failed.append(name)
        append(self.options.out / "failed.jsonl", {"name": name, "message": message})
        print(f"{name}: FAILED: {message}", flush=True)


def job_of(row: Row, options: argparse.Namespace, *, alone: bool) -> Job:
    """What the row's worker is asked to do."""
    mapping = row.workload().to_mapping()
    steps = max(options.steps, SCALED_STEPS) if mapping.get("train", {}).get("fp16") else options.steps
    tape = (options.out / f"{row.name}.tape.json.gz").absolute() if options.tape else None
    return Job(mapping, steps, tape, options.stacks if options.tape else "none", alone)


def append(path: Path, content: dict[str, object]) -> None:
    """Add one JSON line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(content) + "\n")


def chosen(options: argparse.Namespace) -> list[Row]:
    """The rows that were asked for and are not yet measured."""
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
    """The command line, with the chosen rows as ``rows``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--work", type=Path, help="folder of workers' logs and results (default: a temporary one)")
    parser.add_argument("--done", type=Path, nargs="*", default=[], help="more measured.jsonl whose rows are done")
    parser.add_argument("--only", choices=("tuning", "heldout", "all"), default="all")
    parser.add_argument("--names", help="rows, separated by commas")
    parser.add_argument("--jobs", type=int, default=4, help="rows that run at a time (default: 4)")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps (default: 4; float16: at least 8)")
    parser.add_argument(
        "--time-limit", type=float, default=480, help="seconds after which no row starts (default: 480)"
    )
    parser.add_argument("--row-limit", type=float, default=100, help="seconds that a row may take (default: 100)")
    parser.add_argument("--no-fork", action="store_true", help="start every row's process afresh")
    parser.add_argument("--tape", action="store_true", help="keep each row's tape in the folder")
    parser.add_argument("--stacks", choices=STACKS, default="none", help="with --tape: where each allocation came from")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    options.work = options.work or Path(tempfile.mkdtemp(prefix="trainatomy-grid-"))
    options.work.mkdir(parents=True, exist_ok=True)
    options.rows = chosen(options)
    return options


def main() -> int:
    """Measure; 1 where a row failed."""
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


def table(done: list[Measurement]) -> str:
    """One short line for each measurement, MiB."""
    lines = [f"{'row':40} {'allocated':>10} {'reserved':>10} {'device':>10} {'context':>8} {'step ms':>8}"]
    for one in done:
        sizes = (one.peak_allocated_bytes, one.peak_reserved_bytes, one.device_bytes, one.context_bytes)
        cells = ["-" if size is None else f"{size / 2**20:.1f}" for size in sizes]
        seconds = "-" if one.step_seconds is None else f"{one.step_seconds * 1000:.0f}"
        lines.append(f"{one.name:40} {cells[0]:>10} {cells[1]:>10} {cells[2]:>10} {cells[3]:>8} {seconds:>8}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
