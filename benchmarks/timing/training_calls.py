"""Measure each operation of trainings where it runs, between the others, and compare the prices.

``python benchmarks/timing/training_calls.py measure --out FILE.jsonl [--time-limit 60] [--rows random_calls.yaml]``
runs the trainings of ``training_calls.yaml`` on this machine's GPU, and writes a line for each distinct call of one
step after the warm-up, in the form of ``drawn_kernels.py``, which compares them and adds them to a calibration.  Every
other training is held out.  ``training_calls.py compare FILE.jsonl`` prints the errors of each training by operator.

A call of its own finds its operands in the cache or not; in a training some of them are there.  Single calls show which
operator is off, where the sum of a step shows only that one is.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import Counter, defaultdict
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "accuracy"))

import grid  # noqa: E402
import processes  # noqa: E402
import trainings  # noqa: E402

from trainatomy.catalog.calls import from_text, to_text  # noqa: E402
from trainatomy.training.observer import Silent  # noqa: E402

TRAININGS = HERE / "training_calls.yaml"
GRACE = 20
"""Seconds beyond its limit after which the process that measures is killed."""


class RecordedStep(Silent):
    """Records the calls of one step after the warm-up, with the kernels of each."""

    def __init__(self, warm_up: int) -> None:
        from trainatomy.measurement.profiler.calls import CallRecorder

        self.first, self.recorder = warm_up, CallRecorder()
        self.events: list[dict[str, Any]] = []
        self._recording = ExitStack()

    def step_begin(self, step: int) -> None:
        import torch

        from trainatomy.measurement.profiler.calls import profiled
        from trainatomy.measurement.step.timer import EnoughSteps

        if step == self.first:
            torch.cuda.synchronize()
            self._recording.enter_context(profiled(self.events))
            self._recording.enter_context(self.recorder)
        elif step > self.first:
            self.close()
            raise EnoughSteps

    def close(self) -> None:
        """End the recording, also of a step that failed: what comes next must not be recorded."""
        self._recording.close()

    def lines(self) -> list[dict[str, Any]]:
        """Return a line for each distinct call with kernels: runs, their mean time, and kernels."""
        found = defaultdict(list)
        for sample in self.recorder.samples(self.events):
            if sample.microseconds:
                found[sample.call].append(sample)
        calls = {number: call for call, number in self.recorder.calls.items()}
        return [
            {
                "call": to_text(calls[number]),
                "us": round(mean(one.microseconds for one in samples), 2),
                "kernels": round(mean(len(one.kernels) for one in samples), 1),
                "runs": len(samples),
                "names": sorted({name[:80] for one in samples for name in one.kernels})[:8],
            }
            for number, samples in found.items()
        ]


def _recorded(row: grid.Row) -> list[dict[str, Any]]:
    """Run a training in this process and return the lines of its calls."""
    import torch

    from trainatomy.measurement.process.job import warm_up_steps
    from trainatomy.measurement.step.timer import EnoughSteps
    from trainatomy.training.model import build_model
    from trainatomy.training.quantization import load_on_device
    from trainatomy.training.run import run

    workload = row.workload(HERE)
    observer = RecordedStep(warm_up_steps(workload) + 1)
    torch.manual_seed(0)
    if workload.model.quantization:
        model = load_on_device(workload, build_model(workload), "cuda")
    else:
        with torch.device("cuda"):
            model = build_model(workload)
    try:
        with suppress(EnoughSteps):
            run(workload, model, device="cuda", steps=100, observer=observer)
    finally:
        observer.close()
    return observer.lines()


def _measure(out: Path, deadline: float, rows: Path) -> None:
    import torch

    torch.zeros(1, device="cuda")
    for number, row in enumerate(grid.rows(rows, trainings.TRAININGS)):
        if time.monotonic() > deadline:
            return
        tf32 = bool(row.mapping.get("train", {}).get("tf32"))
        about = {"training": row.name, "split": ("fit", "held out")[number % 2], **({"tf32": True} if tf32 else {})}
        began = time.monotonic()
        try:
            found = _recorded(row)
        except Exception as error:
            found = [{"error": f"{type(error).__name__}: {error}"[:300]}]
        with out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(about | line, separators=(",", ":")) + "\n" for line in found)
        gc.collect()
        torch.cuda.empty_cache()
        print(f"{row.name}: {len(found)} calls in {time.monotonic() - began:.1f} s", flush=True)


def measure(out: Path, time_limit: float, rows: Path) -> None:
    """Measure training after training in a fork until the time is up."""
    from trainatomy.measurement.calibration import calibrate

    processes.preload_for_forks()
    began, log = time.monotonic(), out.with_suffix(".log")
    process = processes.fork_and_run(partial(_measure, out, began + time_limit, rows), log)
    while process.status() is None and time.monotonic() - began < time_limit + GRACE:
        time.sleep(0.1)
    if process.status() is None:
        process.kill()
    print(log.read_text(encoding="utf-8", errors="replace")[-3000:], flush=True)
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"environment": calibrate.environment()}) + "\n")


def compare(path: Path, gpu_id: str, least: float) -> None:
    """Print for each training the errors of its operators that are at least a share of its GPU time."""
    from trainatomy.catalog.gpus import find_gpu
    from trainatomy.timing.cost_model import cost_model_of, kernel_cost

    models = {tf32: cost_model_of(find_gpu(gpu_id), tf32=True if tf32 else None) for tf32 in (False, True)}
    real: dict[str, Counter[str]] = defaultdict(Counter)
    ours: dict[str, Counter[str]] = defaultdict(Counter)
    for line in trainings.lines(path):
        if "call" in line:
            call = from_text(line["call"])
            seconds = kernel_cost(call, models[line.get("tf32", False)]).seconds
            real[line["training"]][call.name] += line["us"] * line["runs"]
            ours[line["training"]][call.name] += seconds * 1e6 * line["runs"]
    for name, measured in real.items():
        whole = sum(measured.values())
        print(f"{name}: {whole / 1e3:.2f} ms {sum(ours[name].values()) / whole - 1:+.1%}")
        for operator, us in measured.most_common():
            if abs(ours[name][operator] - us) > least * whole:
                print(f"    {operator:45} {us / 1e3:8.2f} ms, {(ours[name][operator] - us) / whole:+.1%} of the step")


def main() -> int:
    """Measure or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--time-limit", type=float, default=60)
    measuring.add_argument("--rows", type=Path, default=TRAININGS, help="the file of the trainings")
    comparing = commands.add_parser("compare")
    comparing.add_argument("file", type=Path)
    comparing.add_argument("--gpu", default="h200")
    comparing.add_argument("--least", type=float, default=0.01, help="errors below this share of a step are left out")
    options = parser.parse_args()
    if options.command == "measure":
        measure(options.out, options.time_limit, options.rows)
    else:
        compare(options.file, options.gpu, options.least)
    return 0


if __name__ == "__main__":
    sys.exit(main())
