"""Record where the time of real steps goes: ``python benchmarks/timing/probe.py --out DIR [--names a,b] [--tiny c,d]``.

Each row runs alone, in a fork of a process that has imported the libraries.  For some undisturbed steps it records when
the CPU and the GPU pass the points at which the loop calls its observer, and for one more step the profiler's trace.
Rows named by ``--tiny`` run with one sample of 16 tokens, so that only the CPU's time counts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "accuracy"))

import grid
import processes

from trainatomy.training.observer import Silent
from trainatomy.workload.schema import Workload

WARM, TIMED = 3, 8


class Points(Silent):
    """Records time stamps of CPU and GPU at every point of every step, and profiles the last step."""

    def __init__(self, trace: Path | None) -> None:
        self.trace = trace
        self.step = -1
        self.stamps: list[tuple[int, str, float, Any]] = []
        self.profiler: Any = None
        self.wall: list[float] = []

    def _at(self, name: str) -> None:
        import torch

        event = torch.cuda.Event(enable_timing=True)
        self.stamps.append((self.step, name, time.perf_counter(), event))
        event.record()

    def step_begin(self, step: int) -> None:
        import torch

        self.step = step
        if step == WARM or step == WARM + TIMED:
            torch.cuda.synchronize()
            self.wall.append(time.perf_counter())
        if step == WARM + TIMED and self.trace is not None:
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            self.profiler = torch.profiler.profile(activities=activities, record_shapes=True)
            self.profiler.__enter__()
        self._at("step")

    def micro_step_begin(self, micro_step: int) -> None:
        self._at("forward")

    def forward_end(self) -> None:
        self._at("forward end")

    def micro_step_end(self, micro_step: int) -> None:
        self._at("backward end")

    def optimizer_begin(self) -> None:
        self._at("optimizer")

    def optimizer_end(self) -> None:
        self._at("optimizer end")

    def zero_grad_end(self) -> None:
        self._at("zero_grad end")

    def step_end(self, step: int) -> None:
        import torch

        self._at("step end")
        if self.profiler is not None:
            torch.cuda.synchronize()
            self.profiler.__exit__(None, None, None)
            self.profiler.export_chrome_trace(str(self.trace))


def tiny(mapping: dict[str, Any]) -> dict[str, Any]:
    """Reduce a training to one short sample, so that only the CPU's work is left."""
    mapping.setdefault("train", {})["per_device_train_batch_size"] = 1
    if "sequence_length" in mapping.get("data", {}):
        mapping["data"]["sequence_length"] = 16
    if "target_length" in mapping.get("data", {}):
        mapping["data"]["target_length"] = 8
    return mapping


def run(row: grid.Row, out: Path, small: bool, trace: bool) -> dict[str, Any]:
    """Run a row in this process, which initialises CUDA."""
    import torch

    from trainatomy.training.model import build_model
    from trainatomy.training.run import run as run_steps

    mapping = row.workload().to_mapping()
    workload = Workload.from_mapping(tiny(mapping) if small else mapping)
    name = f"{row.name}{'-tiny' if small else ''}"
    points = Points(out / f"{name}.trace.json.gz" if trace else None)
    torch.manual_seed(0)
    run_steps(workload, build_model(workload), device="cuda", steps=WARM + TIMED + 1, observer=points)
    torch.cuda.synchronize()
    origin = points.stamps[0]
    stamps = [
        [step, what, round((host - origin[2]) * 1e6, 1), round(origin[3].elapsed_time(event) * 1e3, 1)]
        for step, what, host, event in points.stamps
    ]
    seconds = (points.wall[1] - points.wall[0]) / TIMED
    return {
        "name": name,
        "row": row.name,
        "gpu": torch.cuda.get_device_name(),
        "step_seconds": seconds,
        "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
        "stamps": stamps,
    }


def child(row: grid.Row, out: Path, small: bool, trace: bool) -> None:
    """Run a row in a forked process, and exit."""
    code = 1
    try:
        os.environ.pop(processes.NVML_CHECK, None)
        result = run(row, out, small, trace)
        with (out / "points.jsonl").open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{result['name']}: {result['step_seconds'] * 1e3:.2f} ms", flush=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> int:
    """Run the rows, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--names", default="")
    parser.add_argument("--tiny", default="")
    parser.add_argument("--no-trace", action="store_true")
    parser.add_argument("--time-limit", type=float, default=300)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    processes.preload()
    by_name = {row.name: row for row in grid.rows()}
    began = time.monotonic()
    todo = [(name, True) for name in options.tiny.split(",") if name]
    todo += [(name, False) for name in options.names.split(",") if name]
    for name, small in todo:
        if time.monotonic() - began > options.time_limit:
            print("time limit reached before", name)
            break
        if by_name[name].held_out:
            raise SystemExit(f"{name} is held out")
        pid = os.fork()
        if pid == 0:
            child(by_name[name], options.out, small, not options.no_trace)
        limit = time.monotonic() + 60
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > limit:
                os.kill(pid, 9)
            time.sleep(0.05)
    return 0


if __name__ == "__main__":
    sys.exit(main())
