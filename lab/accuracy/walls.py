"""Run trainings at the memory limit: ``python lab/accuracy/walls.py --out DIR`` on a machine with a GPU.

Runs what ``plan_walls.py`` planned.  PyTorch's allocator is granted ``capacity_bytes`` of the GPU by its own limit
(``torch.cuda.set_per_process_memory_fraction``): a request beyond it fails like ``cudaMalloc`` on a full GPU, and the
allocator reacts in the same way (frees cached segments, retries, raises).  The limit applies to reserved memory,
rounded down to a byte (``setMemoryFraction``, c10/cuda/CUDACachingAllocator.cpp); the context lies outside of it, so
the plan subtracts it from the GPU's size beforehand.

Several runs share the GPU, each within its bounds, the largest first.  Each result becomes a line of DIR/walls.jsonl at
once; a second call resumes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import processes
from grid import Row
from measured_lines import append
from plan_walls import PLAN, Planned, read

from trainatomy.errors import TrainatomyError
from trainatomy.measurement.measure import require_gpu
from trainatomy.measurement.process.job import Job, set_environment
from trainatomy.measurement.process.pool import process_died

if TYPE_CHECKING:
    from trainatomy.results.measurement import Measurement

POLL_SECONDS = 0.05
KEPT_FREE_BYTES = 6 * 2**30
"""Bytes of the GPU left free for memory that processes hold outside the allocator beyond the planned context."""
KEYS = (
    "status", "gpu", "driver", "versions", "date", "peak_allocated_bytes", "peak_reserved_bytes", "process_bytes",
    "num_alloc_retries", "steps", "message",
)  # fmt: skip


def limit(capacity_bytes: int) -> None:
    """Limit this process's allocator to so many bytes, once CUDA is initialised.

    The allocator multiplies the fraction by the GPU's memory and truncates; half a byte more makes up for the rounding
    of the division.
    """
    import torch

    def set_fraction() -> None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((capacity_bytes + 0.5) / total, 0)

    torch.cuda._lazy_call(set_fraction)


def job_of(planned: Planned) -> Job:
    """Return the worker's job; its files of factories are found beside this one."""
    workload = Row(planned.row, "", planned.workload, False, planned.held_out).workload().to_mapping()
    return Job(workload, workload["steps"], alone=False)


@dataclass
class Walls:
    """Waiting and running jobs; ``budget``: bytes of the GPU that may be promised at a time."""

    out: Path
    work: Path
    plan_file: Path
    waiting: list[Planned]
    budget: int
    options: argparse.Namespace
    running: dict[str, tuple[Planned, processes.Running]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        """Run everything that there is time for."""
        try:
            while self._start_more() or self.running:
                time.sleep(POLL_SECONDS)
                for planned, process in list(self.running.values()):
                    self._look_after(planned, process)
        finally:
            for _, process in self.running.values():
                process.process.kill()

    def _start_more(self) -> bool:
        if time.monotonic() - self.began > self.options.time_limit:
            return False
        promised = sum(planned.size_gib * 2**30 for planned, _ in self.running.values())
        for planned in list(self.waiting):
            size = planned.size_gib * 2**30
            if len(self.running) < self.options.jobs and promised + size <= self.budget:
                promised += size
                self.waiting.remove(planned)
                self._start(planned)
        return bool(self.waiting)

    def _start(self, planned: Planned) -> None:
        job = job_of(planned)
        result, log = self.work / f"{planned.name}.result.json", self.work / f"{planned.name}.log"
        result.unlink(missing_ok=True)
        if processes.can_fork(job):
            process: processes.Process = processes.fork(job, result, log, lambda: limit(planned.capacity_bytes))
        else:
            process = self._afresh(planned, result, log)
        self.running[planned.name] = planned, processes.Running(planned.name, process, result, log, False)

    def _afresh(self, planned: Planned, result: Path, log: Path) -> processes.Started:
        """Start a fresh process, for allocator settings that PyTorch reads once."""
        environment = {name: value for name, value in os.environ.items() if name != processes.NVML_CHECK}
        set_environment(environment, str(planned.workload.get("allocator", "")))
        arguments = ["--plan", str(self.plan_file), "--one", planned.name, "--out", str(result)]
        with log.open("wb") as output:
            return processes.Started(
                subprocess.Popen(
                    [sys.executable, __file__, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environment,
                )
            )

    def _look_after(self, planned: Planned, running: processes.Running) -> None:
        status = running.process.status()
        if status is None:
            if time.monotonic() - running.began < self.options.row_limit:
                return
            running.process.kill()
        del self.running[planned.name]
        try:
            measured = processes.read_result(running.result)
        except FileNotFoundError:
            log = processes.last_lines(running.log)
            late = f"did not end within {self.options.row_limit} s; its last lines:\n{log}"
            self._fail(planned.name, late if status is None else process_died(status, log))
        except TrainatomyError as error:
            self._fail(planned.name, str(error))
        else:
            self._take(planned, measured, time.monotonic() - running.began)

    def _take(self, planned: Planned, measured: Measurement, seconds: float) -> None:
        append(self.out / "walls.jsonl", {"name": planned.name} | asdict(planned) | {"measured": kept(measured)})
        expected = "completed" if planned.predicted["fits"] else "out of memory"
        verdict = "as predicted" if measured.status == expected else f"PREDICTED: {expected}"
        retries = f"{measured.num_alloc_retries} retries ({planned.predicted['num_alloc_retries']} predicted)"
        print(f"{planned.name}: {measured.status}, {verdict}, {retries}, {seconds:.1f} s", flush=True)

    def _fail(self, name: str, message: str) -> None:
        self.failed.append(name)
        append(self.out / "walls-failed.jsonl", {"name": name, "message": message})
        print(f"{name}: FAILED: {message}", flush=True)


def kept(measured: Measurement) -> dict[str, Any]:
    """Return the figures of a measurement that are kept."""
    return {key: getattr(measured, key) for key in KEYS}


def waiting(plan: list[Planned], out: Path, names: str | None) -> list[Planned]:
    """Return the runs that are not yet measured: both sides of each limit first, large GPUs first."""
    path = out / "walls.jsonl"
    done = {json.loads(line)["name"] for line in path.read_text("utf-8").splitlines()} if path.exists() else set()
    wanted = [one for one in plan if one.name not in done and (names is None or one.name in names.split(","))]
    return sorted(wanted, key=lambda one: (one.above > 1, -one.size_gib, one.above))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--plan", type=Path, default=PLAN)
    parser.add_argument("--names", help="runs, separated by commas")
    parser.add_argument("--jobs", type=int, default=10, help="runs at a time at most (default: 10)")
    parser.add_argument("--time-limit", type=float, default=300, help="seconds after which no run starts")
    parser.add_argument("--row-limit", type=float, default=90, help="seconds that a run may take (default: 90)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    """Run the plan; return 1 where a run gave no result."""
    options = parse()
    plan = read(options.plan)
    if options.one:
        planned = next(one for one in plan if one.name == options.one)
        limit(planned.capacity_bytes)
        processes.execute(job_of(planned), options.out)
        return 0
    from trainatomy.measurement.device import nvml

    print(f"the wall on {require_gpu()}", flush=True)
    with nvml.session() as driver:
        gpu = driver.gpus[0]
        total = int(gpu.binding.nvmlDeviceGetMemoryInfo(gpu.handle).total)
    if not processes.preload():
        raise SystemExit("importing the libraries initialised CUDA: no fork could use the GPU")
    options.out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="trainatomy-walls-"))
    todo = waiting(plan, options.out, options.names)
    walls = Walls(options.out, work, options.plan, todo, total - KEPT_FREE_BYTES, options)
    walls.run()
    print(f"{len(todo) - len(walls.failed)} runs, {len(walls.failed)} failed, {len(walls.waiting)} not started")
    return int(bool(walls.failed))


if __name__ == "__main__":
    sys.exit(main())
