"""Predict and measure the time of held-out trainings (``trainings.yaml``): the GPU's own time, and the whole step.

    python benchmarks/timing/trainings.py predict             # anywhere, first: predictions/trainings-h200.jsonl
    python benchmarks/timing/trainings.py measure --out FILE  # on the GPU: only what is predicted as it is written
    python benchmarks/timing/trainings.py report FILE         # errors, by what bounds the step

Each training is measured in a fork of a process that has imported the libraries.  After the warm-up, steps are timed
by CUDA events without a synchronisation in between; two more steps are profiled, without recording the CPU.  The GPU's
own time is the sum of the durations of kernels, copies and fills.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "accuracy"))

import grid  # noqa: E402
import processes  # noqa: E402

from trainatomy.results.host_pace import HostPace  # noqa: E402
from trainatomy.training.observer import Silent  # noqa: E402
from trainatomy.workload.schema import Workload  # noqa: E402

TRAININGS = HERE / "trainings.yaml"
PREDICTIONS = HERE / "predictions"
PACES = (0.7, 0.85, 1.15, 1.3, 1.5, 2.0, 3.0)
"""Paces of the host for which a step is predicted, besides 1; the measured pace lies between two."""
TIMED_SECONDS, LEAST_STEPS, MOST_STEPS, PROFILED_STEPS = 0.4, 5, 40, 2
CASE_LIMIT = 40
SHOWN_KERNELS = 40


def rows() -> list[grid.Row]:
    """Return the trainings in an order without families, so that a time limit cuts all of them short."""
    return sorted(grid.rows(TRAININGS), key=lambda row: hashlib.sha256(row.name.encode()).digest())


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of JSON lines; none if there is no file."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def prediction(row: grid.Row, gpu_id: str) -> dict[str, Any]:
    """Predict the GPU's own time of a training, and the step at several paces of the host."""
    from trainatomy.catalog.gpus import find_gpu
    from trainatomy.prediction import analysis_of
    from trainatomy.simulator.simulate import simulate

    gpu = find_gpu(gpu_id)
    workload = row.workload(HERE).model_copy(update={"gpu": gpu_id})
    simulation = simulate(workload, gpu)
    return priced(row, workload, simulation, analysis_of(workload, simulation).driver_calls)


def priced(row: grid.Row, workload: Workload, simulation: Any, driver_calls: Sequence[Any]) -> dict[str, Any]:
    """Return the predicted times of a simulated training."""
    from trainatomy.prediction import time_of
    from trainatomy.timing.cost_model import cost_model_of, kernel_cost, tensor_cores_for_fp32

    found = time_of(workload, simulation, driver_calls, None, paces=PACES)
    tf32 = tensor_cores_for_fp32(workload.train.tf32, simulation.torch_version)
    model = cost_model_of(workload.resolve_gpu(), tf32=tf32)
    operations, own = simulation.operations, 0.0
    by_operator: dict[str, float] = defaultdict(float)
    for one in operations.operations:
        call = operations.calls[one.call]
        seconds = kernel_cost(call, model).seconds * one.repeats
        own += seconds
        by_operator[call.name] += seconds
    return {
        "name": row.name,
        "workload": dict(row.mapping),
        "gpu_seconds": own,
        "step_seconds": found.step_seconds,
        "at_paces": {one.pace: one.step_seconds for one in found.at_paces},
        "host_seconds": found.host_seconds,
        "bound_by": found.bound_by,
        "launches": found.launches,
        "operators": {
            name: round(seconds * 1e6, 1) for name, seconds in Counter(by_operator).most_common(SHOWN_KERNELS)
        },
    }


class TimedSteps(Silent):
    """Times steps after the warm-up, then profiles some; the host's pace is probed before and after."""

    def __init__(self, warm_up: int, trace: Path) -> None:
        from trainatomy.measurement.device.host_probe import HostProbe
        from trainatomy.measurement.step.stopwatch import Stopwatch

        self.first, self.trace = warm_up, trace
        self.watch, self.probe = Stopwatch(), HostProbe()
        self.began = 0.0
        self.profiling = 0
        self.profiler: Any = None

    def step_begin(self, step: int) -> None:
        import torch

        if step < self.first:
            return
        if step == self.first:
            torch.cuda.synchronize()
            self.probe.before()
            self.began = time.perf_counter()
        if self.profiler is None:
            self.watch.tick()
            timed = step - self.first
            enough = time.perf_counter() - self.began > TIMED_SECONDS and timed >= LEAST_STEPS
            if timed < MOST_STEPS and not enough:
                return
            torch.cuda.synchronize()
            self.probe.after()
            self.watch.finish()
            self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.profiler.__enter__()
            self.profiling = step
        elif step == self.profiling + PROFILED_STEPS:
            from trainatomy.measurement.step.timer import EnoughSteps

            torch.cuda.synchronize()
            self.profiler.__exit__(None, None, None)
            self.profiler.export_chrome_trace(str(self.trace))
            raise EnoughSteps


def measured(row: grid.Row, trace: Path) -> dict[str, Any]:
    """Run a training in this process, which initialises CUDA, and return its times."""
    import torch

    from trainatomy.measurement.process.job import warm_up_steps
    from trainatomy.measurement.profiler.calls import read_trace
    from trainatomy.measurement.step.timer import EnoughSteps
    from trainatomy.training.model import build_model
    from trainatomy.training.quantization import load_on_device
    from trainatomy.training.run import run

    workload = row.workload(HERE)
    observer = TimedSteps(warm_up_steps(workload) + 1, trace)
    torch.manual_seed(0)
    if workload.model.quantization:
        model = load_on_device(workload, build_model(workload), "cuda")
    else:
        with torch.device("cuda"):
            model = build_model(workload)
    with suppress(EnoughSteps):
        run(workload, model, device="cuda", steps=100, observer=observer)
    events = [event for event in read_trace(trace) if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    kernels: Counter[str] = Counter()
    for event in events:
        kernels[event["name"][:80]] += event["dur"] / PROFILED_STEPS
    return {
        "name": row.name,
        "gpu": torch.cuda.get_device_name(),
        "gpu_seconds": sum(event["dur"] for event in events) * 1e-6 / PROFILED_STEPS,
        "kernels": len(events) / PROFILED_STEPS,
        "step_seconds": median(observer.watch.seconds),
        "steps": [round(seconds * 1e3, 4) for seconds in observer.watch.seconds],
        "host_pace": asdict(pace) if (pace := observer.probe.result()) is not None else None,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
        "by_kernel": {name: round(us, 1) for name, us in kernels.most_common(SHOWN_KERNELS)},
    }


def measure(out: Path, time_limit: float, names: str, work: Path) -> None:
    """Measure all trainings that are predicted as they are written now, one after the other."""
    predicted = {line["name"]: line["workload"] for line in lines(PREDICTIONS / "trainings-h200.jsonl")}
    done = {line["name"] for line in lines(out) if "error" not in line}
    began = time.monotonic()
    processes.preload()
    work.mkdir(parents=True, exist_ok=True)
    for row in rows():
        if row.name in done or (names and row.name not in names.split(",")):
            continue
        if predicted.get(row.name) != dict(row.mapping):
            print(f"{row.name}: left out, predict it first", flush=True)
            continue
        if time.monotonic() - began > time_limit:
            print(f"{row.name}: left out, out of time", flush=True)
            continue
        result = _in_fork(row, work)
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        took = time.monotonic() - began
        print(f"{took:6.1f} s {row.name}: {result.get('error') or result['step_seconds']}", flush=True)


def _in_fork(row: grid.Row, work: Path) -> dict[str, Any]:
    result, log = work / f"{row.name}.json", work / f"{row.name}.log"

    def run() -> None:
        result.write_text(json.dumps(measured(row, work / f"{row.name}.trace.json")), encoding="utf-8")

    process, began = processes.fork_and_run(run, log), time.monotonic()
    while process.status() is None and time.monotonic() - began < CASE_LIMIT:
        time.sleep(0.01)
    if process.status() is None:
        process.kill()
    if not result.exists():
        return {"name": row.name, "error": processes.last_lines(log)[-600:]}
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


def at_pace(line: dict[str, Any], pace: float) -> float:
    """Return the predicted step at a pace of the host; beyond those that were predicted, at the last of them."""
    known = sorted([(1.0, line["step_seconds"]), *((float(key), value) for key, value in line["at_paces"].items())])
    pace = min(max(pace, known[0][0]), known[-1][0])
    for (low, before), (high, after) in pairwise(known):
        if pace <= high:
            return float(before + (after - before) * (pace - low) / (high - low))
    return float(known[-1][1])


def compared(measurements: Path, predictions: Path, quiet_us: float | None) -> Iterator[dict[str, Any]]:
    """Yield the errors of each training."""
    predicted = {line["name"]: line for line in lines(predictions)}
    found = [line for line in lines(measurements) if "error" not in line and line["name"] in predicted]
    probes = {line["name"]: HostPace(**line["host_pace"]).seconds for line in found}
    reference = {line["host_pace"]["reference_seconds"] for line in found} - {None}
    quiet = quiet_us * 1e-6 if quiet_us else reference.pop() if reference else min(probes.values())
    for line in found:
        ours = predicted[line["name"]]
        pace = probes[line["name"]] / quiet
        yield {
            "name": line["name"],
            "bound": "host" if ours["bound_by"] == "host" else "GPU",
            "pace": pace,
            "gpu": line["gpu_seconds"],
            "step": line["step_seconds"],
            "gpu_error": ours["gpu_seconds"] / line["gpu_seconds"] - 1,
            "step_error": at_pace(ours, pace) / line["step_seconds"] - 1,
            "quiet_error": ours["step_seconds"] / line["step_seconds"] - 1,
        }


def report(measurements: Path, predictions: Path, quiet_us: float | None) -> None:
    """Print the errors: each training, then median and worst by what bounds the step."""
    every = sorted(compared(measurements, predictions, quiet_us), key=lambda one: one["gpu_error"])
    groups: dict[str, list[float]] = defaultdict(list)
    for one in every:
        groups["the GPU's own time"].append(abs(one["gpu_error"]))
        groups[f"whole steps that the {one['bound']} bounds, at the measured pace"].append(abs(one["step_error"]))
        groups[f"whole steps that the {one['bound']} bounds, at a quiet host"].append(abs(one["quiet_error"]))
        print(
            f"{one['name']:32} {one['bound']:4} pace {one['pace']:4.2f}  GPU {one['gpu'] * 1e3:8.2f} ms "
            f"{one['gpu_error']:+7.1%}  step {one['step'] * 1e3:8.2f} ms {one['step_error']:+7.1%} "
            f"(quiet {one['quiet_error']:+7.1%})"
        )
    for name, errors in sorted(groups.items()):
        print(f"{name}: {len(errors)} trainings, median {median(errors):.1%}, worst {max(errors):.1%}")


def predict(gpu_id: str, names: str, again: bool) -> None:
    """Store the predictions of all trainings, or of those that have none."""
    path = PREDICTIONS / f"trainings-{gpu_id}.jsonl"
    path.parent.mkdir(exist_ok=True)
    if again:
        path.unlink(missing_ok=True)
    done = {line["name"]: line["workload"] for line in lines(path)}
    for row in sorted(rows(), key=lambda row: "factory" in row.mapping["model"]):  # torchvision_path.py says why
        if done.get(row.name) == dict(row.mapping) or (names and row.name not in names.split(",")):
            continue
        began = time.monotonic()
        try:
            found = prediction(row, gpu_id)
        except Exception as error:
            print(f"{row.name}: NOT PREDICTED: {type(error).__name__}: {error}", flush=True)
            continue
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        times = f"{found['gpu_seconds'] * 1e3:.2f} {found['step_seconds'] * 1e3:.2f} ms {found['bound_by']}"
        print(f"{row.name}: {times} in {time.monotonic() - began:.1f} s", flush=True)


def main() -> int:
    """Predict, measure or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    predicting = commands.add_parser("predict")
    predicting.add_argument("--gpu", default="h200")
    predicting.add_argument("--names", default="")
    predicting.add_argument("--again", action="store_true", help="replace all stored predictions")
    measuring = commands.add_parser("measure")
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--time-limit", type=float, default=285)
    measuring.add_argument("--names", default="")
    measuring.add_argument("--work", type=Path, default=Path("/tmp/trainatomy-trainings"))
    reporting = commands.add_parser("report")
    reporting.add_argument("file", type=Path)
    reporting.add_argument("--predictions", type=Path, default=PREDICTIONS / "trainings-h200.jsonl")
    reporting.add_argument("--quiet-us", type=float, help="the probe on a quiet host (default: the least measured)")
    options = parser.parse_args()
    if options.command == "predict":
        predict(options.gpu, options.names, options.again)
    elif options.command == "measure":
        measure(options.out, options.time_limit, options.names, options.work)
    else:
        report(options.file, options.predictions, options.quiet_us)
    return 0


if __name__ == "__main__":
    sys.exit(main())
