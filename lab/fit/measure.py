"""Measure the grids and the chosen settings on this machine's GPU: ``python lab/fit/measure.py --out DIR``.

Each result becomes a line of DIR/measured.jsonl as soon as it is known; a second call resumes (``--done`` names further
files whose runs are done). ``--list`` prints what would run, and how long it would take, without a GPU.

Points of the grid run without a limit, those of one model in one process, one after the other: between two of them
everything but the model is freed. Runs under a limit have a process each, whose allocator is granted what a GPU of that
size leaves it (see ``lab/accuracy/walls.py``); those whose time does not count run several at a time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import fit_cases
import fit_tasks
import processes
from fit_tasks import Group, Task
from measured_lines import append
from walls import limit as limit_allocator

POLL_SECONDS = 0.05
SIDE_BY_SIDE = 4
KEPT_FREE_BYTES = 10 * 2**30
"""Bytes of the GPU left free beside the limits of runs side by side: their contexts."""
TIMED_SECONDS = 1.0
"""Timed steps are repeated until they took this long together."""
SLACK = 3.0
"""Times its estimate that a process may take before it is stopped, and ``SLACK_SECONDS`` more."""
SLACK_SECONDS = 45.0
GRACE_SECONDS = 25.0
"""Seconds after the time limit at which every process is stopped."""


def run_group(group: Group, out: Path, deadline: float) -> None:
    """Run the tasks of a group in this process, which has not used CUDA yet; append a line for each.

    Args:
        group: The tasks; several have the same model.
        out: The file of the lines.
        deadline: ``time.monotonic`` until which the next task must be expected to end.
    """
    import fit_training as training
    import torch

    from trainatomy.measurement.device import nvml

    first = group.tasks[0]
    if first.capacity_bytes is not None:
        limit_allocator(first.capacity_bytes)
    allocator = str(first.workload.get("allocator", ""))
    training.set_allocator(allocator)
    training.settle_loss_scale()
    with nvml.session() as driver:
        gpu = visible_gpu(driver)
        idle = gpu.read().used_bytes if group.alone else None
        model = None
        for task in group.tasks:
            if task is not first and time.monotonic() + task.estimate > deadline:
                return
            began = time.monotonic()
            length = training.Length(*task.steps, TIMED_SECONDS)
            run = training.automatic if task.kind == "automatic" else training.timed_steps
            try:
                model = model or training.on_gpu(training.Workload.from_mapping(task.workload))
            except torch.OutOfMemoryError as error:
                result: dict[str, Any] = {"status": "out of memory", "message": str(error).splitlines()[0]}
            else:
                result = run(task.workload, model, length)
            device = None if idle is None else gpu.read().used_bytes - idle
            append(out, line_of(task, group) | result | {"device_bytes": device, "seconds": time.monotonic() - began})
            if model is not None:
                training.clear(model)
        training.check_allocator(allocator)


def visible_gpu(driver: Any) -> Any:
    """Return NVML's device for CUDA's first one, which CUDA_VISIBLE_DEVICES may choose; CUDA is not initialised."""
    from torch.cuda import _parse_visible_devices

    first = _parse_visible_devices()[0]
    return driver.gpus[first] if isinstance(first, int) else driver.device(first)


def line_of(task: Task, group: Group) -> dict[str, Any]:
    """Return what a line says of its task."""
    described = asdict(task)
    return {name: described[name] for name in ("kind", "case", "limit_gib", "label", "capacity_bytes", "workload")} | {
        "alone": group.alone
    }


@dataclass
class Campaign:
    """Waiting and running groups."""

    options: argparse.Namespace
    waiting: list[Group]
    budget: int
    work: Path
    running: list[tuple[Group, processes.Running]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def deadline(self) -> float:
        """``time.monotonic`` after which nothing starts."""
        return self.began + float(self.options.time_limit)

    def run(self) -> None:
        """Run everything that there is time for; kill running processes when interrupted."""
        try:
            while self._start_more() or self.running:
                time.sleep(POLL_SECONDS)
                for group, process in list(self.running):
                    self._look_after(group, process)
        finally:
            for _, process in self.running:
                process.process.kill()

    def _start_more(self) -> bool:
        """Start what may start now, in order; return False once nothing is left that there is time for."""
        while self.waiting:
            group = self.waiting[0]
            if time.monotonic() + fit_tasks.START_SECONDS + group.tasks[0].estimate > self.deadline:
                self.waiting.pop(0)
                continue
            if not self._may_start(group):
                return True
            self.waiting.pop(0)
            self._start(group)
        return False

    def _may_start(self, group: Group) -> bool:
        if not self.running:
            return True
        if group.alone or any(other.alone for other, _ in self.running):
            return False
        promised = sum(other.bytes for other, _ in self.running)
        return len(self.running) < SIDE_BY_SIDE and promised + group.bytes <= self.budget

    def _start(self, group: Group) -> None:
        log = self.work / f"{group.name}.log"
        run = partial(run_group, group, self.options.out / "measured.jsonl", self.deadline)
        process = processes.fork_and_run(run, log)
        self.running.append((group, processes.Running(group.name, process, log, log, group.alone)))

    def _look_after(self, group: Group, running: processes.Running) -> None:
        status = running.process.status()
        seconds = time.monotonic() - running.began
        if status is None:
            in_time = seconds < SLACK * group.estimate + SLACK_SECONDS
            if in_time and time.monotonic() < self.deadline + GRACE_SECONDS:
                return
            running.process.kill()
        self.running.remove((group, running))
        print(f"{group.name}: {seconds:.1f} s of {group.estimate:.0f} s estimated", flush=True)
        if status != 0:
            self.failed.append(group.name)
            message = f"status {status}:\n{processes.last_lines(running.log)}"
            append(self.options.out / "failed.jsonl", {"name": group.name, "message": message})
            print(f"{group.name}: FAILED: {message}", flush=True)


def keys_done(paths: list[Path]) -> set[tuple[Any, ...]]:
    """Return the keys of the tasks that files of lines have."""
    lines = [json.loads(text) for path in paths if path.exists() for text in path.read_text("utf-8").splitlines()]
    return {(line["kind"], line["case"], line["limit_gib"], line["label"]) for line in lines}


def session(driver: Any) -> dict[str, Any]:
    """Describe the machine and the software."""
    from trainatomy.libraries import installed_versions

    gpu = visible_gpu(driver)
    return {
        "gpu": gpu.name,
        "driver": driver.version,
        "memory_bytes": int(gpu.binding.nvmlDeviceGetMemoryInfo(gpu.handle).total),
        "versions": installed_versions(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def preload() -> None:
    """Import everything that a run needs, in the process that is forked; bitsandbytes, which asks CUDA, is not."""
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]
    if processes.preload():
        import fit_training  # noqa: F401
        import peft  # noqa: F401
        import torch

        if not torch.cuda.is_initialized():
            return
    raise SystemExit("importing the libraries initialised CUDA: no fork could use the GPU")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--cases", type=Path, default=fit_cases.CASES, help="the trainings that the plan is for")
    parser.add_argument("--plan", type=Path, default=fit_tasks.PLAN)
    parser.add_argument("--done", type=Path, nargs="*", default=[], help="more files of lines whose runs are done")
    parser.add_argument("--kinds", help="only these kinds, separated by commas: grid, chosen, verdict, automatic")
    parser.add_argument("--names", help="only these cases, separated by commas")
    parser.add_argument("--time-limit", type=float, default=540, help="seconds (default: 540)")
    parser.add_argument("--list", action="store_true", help="print what would run, and stop")
    return parser.parse_args(arguments)


def waiting(options: argparse.Namespace) -> list[Group]:
    """Return the groups to run."""
    done = keys_done([options.out / "measured.jsonl", *options.done])
    groups = fit_tasks.groups(fit_tasks.read_plan(options.plan), fit_cases.read(options.cases), done)
    kinds = options.kinds.split(",") if options.kinds else None
    names = options.names.split(",") if options.names else None
    return [
        group
        for group in groups
        if (kinds is None or group.tasks[0].kind in kinds) and (names is None or group.tasks[0].case in names)
    ]


def main() -> int:
    """Measure; return 1 where a process failed."""
    options = parse()
    todo = waiting(options)
    if options.list:
        for group in todo:
            print(f"{group.estimate:6.1f} s  {group.name}: {'; '.join(task.label for task in group.tasks)}")
        print(f"{sum(group.estimate for group in todo):.0f} s in all, if one after the other")
        return 0
    from trainatomy.measurement.device import nvml
    from trainatomy.measurement.measure import require_gpu

    print(f"{sum(len(group.tasks) for group in todo)} runs on {require_gpu()}", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    with nvml.session() as driver:
        described = session(driver)
    (options.out / "session.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    preload()
    work = Path(tempfile.mkdtemp(prefix="trainatomy-fit-"))
    campaign = Campaign(options, todo, described["memory_bytes"] - KEPT_FREE_BYTES, work)
    campaign.run()
    left = len(waiting(options))
    print(f"{len(campaign.failed)} processes failed ({', '.join(campaign.failed)}); {left} groups left")
    return int(bool(campaign.failed))


if __name__ == "__main__":
    sys.exit(main())
