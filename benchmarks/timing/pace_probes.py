"""Which probe of a host's pace says how long steps take that the host bounds?

python benchmarks/timing/pace_probes.py predict [--gpu ID]   # anywhere, first: predictions/pace-h200.jsonl
python benchmarks/timing/pace_probes.py measure --out FILE --draw first [--time-limit 90]   # on the GPU
python benchmarks/timing/pace_probes.py report FILE [--gpu ID]   # errors at the pace, by load

Each training of ``pace.yaml`` runs in blocks of some steps: on the machine as it is, with a spinning process for half
of its processors, and for all of them.  Between steps all candidates run, one after the other (``Candidates``), and the
counters of the scheduler are read before and after a block (``threads``).  Each block is a line.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import resource
import sys
import time
import traceback
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "accuracy"))

import grid  # noqa: E402
import trainings  # noqa: E402
from monitors import spinning  # noqa: E402

from trainatomy.catalog.hosts import reference_host  # noqa: E402
from trainatomy.measurement.device.host_probe import PROBE  # noqa: E402
from trainatomy.results.host_pace import HostPace  # noqa: E402
from trainatomy.training.observer import Silent  # noqa: E402

PACE = HERE / "pace.yaml"
PACES = (0.7, 0.85, 1.15, 1.3, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0)
BLOCK_SECONDS, LEAST_STEPS, MOST_STEPS, LAUNCHES = 0.8, 8, 80, 30


def draw(name: str) -> list[grid.Row]:
    """Return the trainings of a draw, in their order."""
    by_name = {row.name: row for row in grid.rows(PACE)}
    return [by_name[each] for each in yaml.safe_load(PACE.read_text(encoding="utf-8"))["draws"][name]]


def predictions_of(gpu_id: str) -> Path:
    """Return the file with the predictions for a GPU."""
    return HERE / "predictions" / f"pace-{gpu_id}.jsonl"


def predict(gpu_id: str) -> None:
    """Store the predictions of trainings that have none: steps at several paces, and the CPU's time by phase."""
    from trainatomy.catalog.gpus import find_gpu
    from trainatomy.catalog.hosts import reference_host
    from trainatomy.prediction import analysis_of, time_of
    from trainatomy.simulator.simulate import simulate
    from trainatomy.timing.launch import cpu_costs, cpu_seconds_by_phase
    from trainatomy.workload.loops import loop_of

    path = predictions_of(gpu_id)
    done = {line["name"] for line in trainings.lines(path)}
    for row in (*draw("first"), *draw("second"), *draw("third")):
        if row.name in done:
            continue
        workload = row.workload(HERE).model_copy(update={"gpu": gpu_id})
        simulation = simulate(workload, find_gpu(gpu_id))
        calls = analysis_of(workload, simulation).driver_calls
        found = time_of(workload, simulation, calls, None, paces=PACES)
        costs = cpu_costs(reference_host().microseconds)
        line = {
            "name": row.name,
            "workload": dict(row.mapping),
            "step_seconds": found.step_seconds,
            "gpu_seconds": found.gpu_seconds,
            "host_seconds": found.host_seconds,
            "bound_by": found.bound_by,
            "launches": found.launches,
            "at_paces": {one.pace: one.step_seconds for one in found.at_paces},
            "host_phases": cpu_seconds_by_phase(simulation.operations, costs, loop_of(workload).cpu_costs),
        }
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{row.name}: {found.step_seconds * 1e3:.2f} ms, {found.bound_by}", flush=True)


class Candidates:
    """Candidates for the probe, each timed in seconds; nothing but ``launch`` gives the GPU work."""

    def __init__(self, device: str) -> None:
        import torch

        self._device = torch.device(device)
        leaves = (torch.empty(0, device=device) for _ in range(3))
        self._scale, self._shift, self._input = leaves
        self._scale.requires_grad_()
        self._shift.requires_grad_()
        self._one = torch.zeros(1, device=device)
        self._inside: list[float] = []
        self._visit = self._visitor()

    def take(self) -> dict[str, float]:
        """Run all candidates once; ``first`` is the shipped probe without its untimed pass."""
        import torch

        from trainatomy.measurement.device import host_probe

        clock, found = time.perf_counter, {}
        with torch.enable_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            began = clock()
            host_probe._work()
            found["first"] = clock() - began
            began = clock()
            host_probe._work()
            found["main"] = clock() - began
            for name in ("empty_first", "empty"):
                began = clock()
                total = self._empty_forward()
                middle = clock()
                torch.autograd.grad(total, (self._scale, self._shift))
                found[f"{name}_forward"], found[f"{name}_backward"] = middle - began, clock() - middle
            self._inside.clear()
            began = clock()
            torch.autograd.grad(self._visit(self._scale), self._scale, grad_outputs=self._input)
            found["visit"] = clock() - began
            found["thread_first"], found["thread"] = self._inside[-2:]
        began = clock()
        with torch.no_grad():
            for _ in range(LAUNCHES):
                self._one.add_(1.0)
        found["launch"] = clock() - began
        began = clock()
        _python()
        found["python"] = clock() - began
        return found

    def _empty_forward(self) -> Any:
        value = self._input
        for _ in range(4):
            value = (value * self._scale + self._shift).view(0, 1).transpose(0, 1).tanh().reshape(0)
        return value.sum()

    def _visitor(self) -> Any:
        """Return a function whose backward pass times work of the CPU on the thread that autograd uses for the GPU."""
        import torch

        from trainatomy.measurement.device import host_probe

        inside = self._inside

        class Visit(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, value: Any) -> Any:
                return value.view_as(value)

            @staticmethod
            def backward(ctx: Any, gradient: Any) -> Any:
                scale, shift, value = host_probe._tensors()
                with torch.enable_grad():
                    for _ in range(2):
                        began = time.perf_counter()
                        for _ in range(4):
                            host_probe._layer(value, scale, shift)
                        inside.append(time.perf_counter() - began)
                return gradient

        return Visit.apply


def _python() -> int:
    total = 0
    for number in range(1500):
        total += number & 7
    return total


def threads() -> dict[str, Any]:
    """Return what the scheduler counted so far: seconds run and waited by thread, time of the process, switches."""
    found: dict[str, list[int]] = {}
    for path in Path("/proc/self/task").iterdir():
        with suppress(OSError, ValueError):
            found[path.name] = [int(each) for each in (path / "schedstat").read_text().split()]
    use = resource.getrusage(resource.RUSAGE_SELF)
    own = resource.getrusage(resource.RUSAGE_THREAD)
    return {
        "at": time.perf_counter(),
        "main": str(os.getpid()),
        "schedstat": found,
        "process_seconds": time.process_time(),
        "thread_seconds": time.thread_time(),
        "switches": [use.ru_nvcsw, use.ru_nivcsw, own.ru_nvcsw, own.ru_nivcsw],
    }


class Block(Silent):
    """Times steps, their phases on the CPU, and all candidates between them."""

    def __init__(self, candidates: Candidates, warm_up: int) -> None:
        from trainatomy.measurement.device.host_probe import HostProbe
        from trainatomy.measurement.step.stopwatch import Stopwatch

        self._candidates, self._first = candidates, warm_up
        self._watch, self._probe = Stopwatch(), HostProbe()
        self._began = self._since = self._step_began = 0.0
        self._phase = "other"
        self._step: dict[str, float] = defaultdict(float)
        self._process = self._process_in_steps = 0.0
        self.phases: list[dict[str, float]] = []
        self.wall: list[float] = []
        self.taken: list[list[Any]] = []
        self.before: dict[str, Any] = {}
        self.after: dict[str, Any] = {}

    def _enter(self, phase: str) -> None:
        now = time.perf_counter()
        self._step[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def step_begin(self, step: int) -> None:
        import torch

        from trainatomy.measurement.step.timer import EnoughSteps

        if step < self._first:
            return
        if step > self._first:
            self._enter("other")
            self.phases.append(dict(self._step))
            self.wall.append(time.perf_counter() - self._step_began)
            self._process_in_steps += time.process_time() - self._process
            self._watch.tick()
            timed = len(self.wall)
            enough = time.perf_counter() - self._began > BLOCK_SECONDS and timed >= LEAST_STEPS
            if timed >= MOST_STEPS or enough:
                self.after = threads()
                self._probe.after()
                torch.cuda.synchronize()
                self._watch.finish()
                raise EnoughSteps
            if timed % 2 == 0:
                if self._probe.is_due():
                    self._probe.between()
                self.taken.append([timed, self._candidates.take()])
                self._watch.leave_out()
        else:
            torch.cuda.synchronize()
            for _ in range(3):
                self._candidates.take()
            self._probe.before()
            self.before, self._began = threads(), time.perf_counter()
            self._watch.tick()
        self._step = defaultdict(float)
        self._process = time.process_time()
        self._step_began = self._since = time.perf_counter()

    def micro_step_begin(self, micro_step: int) -> None:
        self._enter("forward")

    def forward_end(self) -> None:
        self._enter("backward")

    def micro_step_end(self, micro_step: int) -> None:
        self._enter("other")

    def optimizer_begin(self) -> None:
        self._enter("optimizer")

    def optimizer_end(self) -> None:
        self._enter("other")

    def result(self) -> dict[str, Any]:
        """Return the times of the block."""
        from dataclasses import asdict

        columns = {
            key: [one.get(key, 0.0) for one in self.phases] for key in ("forward", "backward", "optimizer", "other")
        }
        rounded = {key: [round(each * 1e6, 1) for each in values] for key, values in columns.items()}
        return {
            "steps_us": [round(each * 1e6, 1) for each in self._watch.seconds],
            "wall_us": [round(each * 1e6, 1) for each in self.wall],
            "phases_us": rounded,
            "process_seconds": self._process_in_steps,
            "taken_us": [[at, {key: round(value * 1e6, 1) for key, value in one.items()}] for at, one in self.taken],
            "before": self.before,
            "after": self.after,
            "host_pace": asdict(pace) if (pace := self._probe.result()) else None,
        }


def machine() -> dict[str, Any]:
    """Return what this machine says of its processors."""
    import torch

    found: dict[str, Any] = {
        "line": "machine",
        "system": platform.uname()._asdict(),
        "gpu": torch.cuda.get_device_name(),
    }
    found["processors"] = os.cpu_count()
    found["usable"] = len(os.sched_getaffinity(0))
    found["threads"] = torch.get_num_threads()
    for name in ("/proc/cpuinfo", "/sys/fs/cgroup/cpu.max", "/proc/self/schedstat", "/proc/loadavg", "/proc/stat"):
        with suppress(OSError):
            found[name] = Path(name).read_text()[:1600]
    return found


def measure(out: Path, name: str, time_limit: float) -> None:
    """Run the blocks of all trainings of a draw; an error in one stops no other."""
    import torch

    began = time.monotonic()
    _write(out, machine())
    candidates = Candidates("cuda")
    for row in draw(name):
        if time.monotonic() - began > time_limit:
            print(f"{row.name}: left out, out of time", flush=True)
            continue
        try:
            _blocks(out, row, candidates, began)
        except Exception as error:
            _write(out, {"line": "error", "name": row.name, "error": traceback.format_exc()[-800:]})
            print(f"{row.name}: {type(error).__name__}: {error}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()


def _blocks(out: Path, row: grid.Row, candidates: Candidates, began: float) -> None:
    import torch

    from trainatomy.measurement.process.job import warm_up_steps
    from trainatomy.measurement.step.timer import EnoughSteps
    from trainatomy.training.model import build_model
    from trainatomy.training.run import run

    workload = row.workload(HERE)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = build_model(workload)
    processors = len(os.sched_getaffinity(0))
    for kind, count in (("quiet", 0), ("half", processors // 2), ("all", processors)):
        block = Block(candidates, warm_up_steps(workload) + 1)
        with spinning(count), suppress(EnoughSteps):
            run(workload, model, device="cuda", steps=200, observer=block)
        _write(out, {"line": "block", "name": row.name, "load_kind": kind, "spinning": count, **block.result()})
        typical = sorted(block.wall)[len(block.wall) // 2]
        print(f"{time.monotonic() - began:6.1f} s {row.name} {kind}: {typical * 1e3:.2f} ms", flush=True)


def pace_of(line: dict[str, Any]) -> HostPace:
    """Return the pace of a block; of those that were measured before the probe had its form, from the candidates."""
    if line.get("host_pace"):
        stored: dict[str, Any] = {
            name: tuple(each) if isinstance(each, list) else each for name, each in line["host_pace"].items()
        }
        return trainings.todays(HostPace(**stored))
    times = tuple((one["main"] + 2 * one["thread"]) * 1e-6 for _, one in line["taken_us"])
    before, after = line["before"]["schedstat"], line["after"]["schedstat"]
    passed = [
        [now - was for now, was in zip(after[name], before[name], strict=True)] for name in after if name in before
    ]
    launching = sorted(passed, reverse=True)[:2]
    waited = sum(one[1] for one in launching) / sum(one[0] + one[1] for one in launching)
    return HostPace(PROBE, (), times, waited_share=waited, exponent=reference_host().pace_exponents[PROBE])


def report(path: Path, gpu_id: str) -> None:
    """Print each block's error on a quiet host and at its pace, and both by load."""
    predicted = {line["name"]: line for line in trainings.lines(predictions_of(gpu_id))}
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for line in trainings.lines(path):
        if line["line"] != "block":
            continue
        ours, pace, step = predicted[line["name"]], pace_of(line), median(line["steps_us"]) * 1e-6
        assumed = reference_host().probe_seconds[pace.probe]
        errors = ours["step_seconds"] / step - 1, trainings.at_pace(ours, pace.beside(assumed)) / step - 1
        groups[line["load_kind"]].append((abs(errors[0]), abs(errors[1])))
        beside = pace.beside(assumed)
        print(
            f"{line['name']:18} {line['load_kind']:5} {step * 1e3:7.2f} ms"
            f" {errors[0]:+7.1%} at the pace {errors[1]:+7.1%}"
            f" (pace {beside:.2f}, probe {pace.seconds * 1e6:.0f} us, waits {pace.waited_share or 0:.0%})"
        )
    groups["every"] = [each for one in list(groups.values()) for each in one]
    for name, every in groups.items():
        quiet, paced = zip(*every, strict=True)
        print(
            f"{name}: {len(every)} blocks, median {median(quiet):.1%}, worst {max(quiet):.1%}; "
            f"at the pace median {median(paced):.1%}, worst {max(paced):.1%}"
        )


def _write(out: Path, content: dict[str, Any]) -> None:
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(content) + "\n")


def main() -> int:
    """Predict or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    predicting = commands.add_parser("predict")
    predicting.add_argument("--gpu", default="h200")
    measuring = commands.add_parser("measure")
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--draw", default="first")
    measuring.add_argument("--time-limit", type=float, default=90, help="seconds after which no training starts")
    reporting = commands.add_parser("report")
    reporting.add_argument("file", type=Path)
    reporting.add_argument("--gpu", default="h200")
    options = parser.parse_args()
    if options.command == "predict":
        predict(options.gpu)
    elif options.command == "report":
        report(options.file, options.gpu)
    else:
        measure(options.out, options.draw, options.time_limit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
