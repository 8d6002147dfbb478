"""Measure the trainings of ``trainings.yaml`` on this machine's GPU, those that are predicted as they are written now.

``python lab/timing/measure_trainings.py --out FILE.jsonl [--gpu h100-sxm]
[--parts kernels,steps] [--rounds 3] [--limit 160] [--seeds 35,34]``

Forks of a process that has imported the libraries run all trainings, one after the other, but those that the file
holds already:

kernels   profiles two steps after the warm-up, without recording the CPU: the GPU's own time is the sum of the
          durations of kernels, copies and fills; the host's pace before and after them, on which it depends where a
          library's kernels run beside each other
steps     times steps by CUDA events, without a synchronisation in between, and the host's pace before, between and
          after them; no profiler runs in this process, because it slows later launches.  Each round of them is a fork
          of its own: a training's rounds are minutes apart, because what other machines take of a shared host
          changes from one minute to the next

Each result is a line at once.  Weights are made on the GPU, which saves seconds and changes no time of a step.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "accuracy"))

import grid  # noqa: E402
import processes  # noqa: E402
import trainings  # noqa: E402

from trainatomy.training.observer import Observer  # noqa: E402

TIMED_SECONDS, LEAST_STEPS, MOST_STEPS, PROFILED_STEPS = 0.7, 5, 40, 2
GRACE = 25
"""Seconds beyond the limit after which a part is killed."""


class TimedSteps(Observer):
    """Times steps after the warm-up; the host's pace is probed before, between and after them."""

    def __init__(self, warm_up: int) -> None:
        from trainatomy.measurement.device.host import HostProbe
        from trainatomy.measurement.step.instruments import Stopwatch

        self.first, self.began = warm_up, 0.0
        self.watch, self.probe = Stopwatch(), HostProbe()

    def step_begin(self, step: int) -> None:
        import torch

        from trainatomy.measurement.step.timer import EnoughSteps

        if step < self.first:
            return
        if step == self.first:
            torch.cuda.synchronize()
            self.probe.before()
            self.began = time.perf_counter()
        self.watch.tick()
        timed = step - self.first
        enough = time.perf_counter() - self.began > TIMED_SECONDS and timed >= LEAST_STEPS
        if timed == MOST_STEPS or enough:
            torch.cuda.synchronize()
            self.probe.after()
            self.watch.finish()
            raise EnoughSteps
        if timed and self.probe.is_due():
            self.probe.between()
            self.watch.leave_out()

    def result(self) -> dict[str, Any]:
        """Return the times."""
        seconds, pace = self.watch.seconds, self.probe.result()
        milliseconds = [round(each * 1e3, 4) for each in seconds]
        return {"step_seconds": median(seconds), "steps_ms": milliseconds, "host_pace": pace and asdict(pace)}


class ProfiledSteps(Observer):
    """Profiles some steps after the warm-up; the host's pace is probed before and after them."""

    def __init__(self, warm_up: int, trace: Path) -> None:
        from trainatomy.measurement.device.host import HostProbe

        self.first, self.trace = warm_up, trace
        self.profiler: Any = None
        self.probe = HostProbe()

    def step_begin(self, step: int) -> None:
        import torch

        from trainatomy.measurement.step.timer import EnoughSteps

        if step == self.first:
            torch.cuda.synchronize()
            self.probe.before()
            self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.profiler.__enter__()
        elif step == self.first + PROFILED_STEPS:
            torch.cuda.synchronize()
            self.profiler.__exit__(None, None, None)
            self.probe.after()
            self.profiler.export_chrome_trace(str(self.trace))
            raise EnoughSteps

    def result(self) -> dict[str, Any]:
        """Return the GPU's own time, that in which it is busy, the number of kernels and the longest of them.

        Kernels that run beside each other are busy once.  Copies of batches from pageable memory do not count there.
        """
        from trainatomy.measurement.profiled_calls import read_trace
        from trainatomy.timing.streams import covered

        on_gpu = ("kernel", "gpu_memcpy", "gpu_memset")
        events = [event for event in read_trace(self.trace) if event.get("cat") in on_gpu]
        own = [event for event in events if not event["name"].startswith(trainings.PAGEABLE_COPY)]
        kernels: Counter[str] = Counter()
        for event in events:
            kernels[event["name"][:80]] += event["dur"] / PROFILED_STEPS
        return {
            "gpu_seconds": sum(event["dur"] for event in events) * 1e-6 / PROFILED_STEPS,
            "busy_seconds": covered((one["ts"], one["ts"] + one["dur"]) for one in own) * 1e-6 / PROFILED_STEPS,
            "kernels": len(events) / PROFILED_STEPS,
            "kernels_pace": (pace := self.probe.result()) and asdict(pace),
            "by_kernel": {name: round(us, 1) for name, us in _shown(kernels)},
        }


def _shown(kernels: Counter[str]) -> list[tuple[str, float]]:
    """Return the longest kernels, and all copies of batches, however short, which are not the GPU's own time."""
    longest = kernels.most_common(trainings.SHOWN_KERNELS)
    copies = [one for one in kernels.items() if one[0].startswith(trainings.PAGEABLE_COPY) and one not in longest]
    return [*longest, *copies]


def measured(row: grid.Row, part: str, work: Path) -> dict[str, Any]:
    """Run a training in this process and return its times."""
    import torch

    from trainatomy.measurement.process.job import warm_up_steps
    from trainatomy.measurement.step.timer import EnoughSteps
    from trainatomy.training.model import build_model
    from trainatomy.training.quantization import load_on_device
    from trainatomy.training.run import run

    workload = row.workload(HERE)
    warm_up = warm_up_steps(workload) + 1
    observer: Any = TimedSteps(warm_up) if part == "steps" else ProfiledSteps(warm_up, work / f"{row.name}.trace.json")
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    if workload.model.quantization:
        model = load_on_device(workload, build_model(workload), "cuda")
    else:
        with torch.device("cuda"):
            model = build_model(workload)
    with suppress(EnoughSteps):
        run(workload, model, device="cuda", steps=100, observer=observer)
    return {**observer.result(), "peak_bytes": torch.cuda.max_memory_allocated()}


def run_part(part: str, number: int, rows: list[grid.Row], out: Path, time_limit: float, work: Path) -> None:
    """Measure one part of all trainings in this process, which initialises CUDA: a numbered round of the steps."""
    import torch

    began = time.monotonic()
    torch.zeros(1, device="cuda")
    own = {"part": part, "round": number} if part == "steps" else {"part": part}
    done = {line["name"] for line in trainings.lines(out) if own.items() <= line.items()}
    for row in rows:
        if row.name in done:
            continue
        if time.monotonic() - began > time_limit:
            print(f"{row.name}: {part}: left out, out of time", flush=True)
            continue
        line = {"name": row.name, **own, "gpu": torch.cuda.get_device_name()}
        try:
            line |= measured(row, part, work)
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {error}"[:400]
        gc.collect()
        torch.cuda.empty_cache()
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        shown = line.get("error") or line.get("step_seconds") or line.get("gpu_seconds")
        print(f"{time.monotonic() - began:6.1f} s {part} {row.name}: {shown}", flush=True)


def waiting(names: str, seeds: str, gpu_id: str) -> list[grid.Row]:
    """Return the trainings that are predicted for a GPU as they are written now.

    They come in the order in which ``names`` lists them, or those of the listed draws that have no record yet, draw by
    draw.
    """
    stored = trainings.lines(trainings.predictions_of(gpu_id))
    predicted = {line["name"]: line["workload"] for line in stored}
    chosen = trainings.rows()
    if names:
        known = {row.name: row for row in chosen}
        chosen = [known[name] for name in names.split(",")]
    if seeds:
        recorded = {line["name"] for line in trainings.lines(trainings.records_of(gpu_id))}
        new = [row for row in chosen if row.name not in recorded]
        chosen = [row for seed in seeds.split(",") for row in new if row.name.endswith(f"-drawn-{seed}")]
    if left := [row.name for row in chosen if predicted.get(row.name) != dict(row.mapping)]:
        print(f"left out, predict these first: {', '.join(left)}", flush=True)
    return [row for row in chosen if predicted.get(row.name) == dict(row.mapping)]


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="kernels,steps")
    parser.add_argument("--rounds", type=int, default=1, help="of the steps, each of all trainings")
    parser.add_argument("--limit", type=float, default=160, help="seconds after which no training starts")
    parser.add_argument("--names", default="", help="in the order in which they are measured (default: all)")
    parser.add_argument("--seeds", default="", help="draws, in their order: measures those that have no record yet")
    parser.add_argument("--gpu", default="h200", help="the GPU whose stored predictions are measured")
    parser.add_argument("--work", type=Path, default=Path("/tmp/trainatomy-trainings"))
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    processes.preload_for_forks()
    chosen = waiting(options.names, options.seeds, options.gpu)
    ends = time.monotonic() + options.limit
    rounds = {"kernels": 1, "steps": options.rounds}
    for part, number in [(name, 1 + one) for name in options.parts.split(",") for one in range(rounds[name])]:
        log = options.work / f"{part}-{number}.log"
        todo = partial(run_part, part, number, chosen, options.out, ends - time.monotonic(), options.work)
        process = processes.fork_and_run(todo, log)
        while process.status() is None and time.monotonic() < ends + GRACE:
            time.sleep(0.05)
        if process.status() is None:
            process.kill()
        print(log.read_text(encoding="utf-8", errors="replace")[-3000:], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
