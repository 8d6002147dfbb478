"""Which probe of a host's pace says how long steps take that the host bounds?

python benchmarks/timing/pace_probes.py predict [--gpu ID]   # anywhere, first: predictions/pace-h200.jsonl
python benchmarks/timing/pace_probes.py measure --out FILE --draw first [--time-limit 90]   # on the GPU
python benchmarks/timing/pace_probes.py report FILE [--gpu ID]   # errors at the pace, by load

Each training of ``pace.yaml`` runs in blocks of some steps: on the machine as it is, with a spinning process for half
of its processors, and for all of them.  Between steps all candidates run, one after the other, and the counters of the
scheduler are read before and after a block (``pace_blocks.py``).  Each block is a line.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
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
import training_errors  # noqa: E402
import trainings  # noqa: E402
from monitors import spinning  # noqa: E402
from pace_blocks import Block, Candidates  # noqa: E402

from trainatomy.catalog.hosts import reference_host  # noqa: E402
from trainatomy.measurement.device.host_probe import PROBE  # noqa: E402
from trainatomy.results.host_pace import HostPace  # noqa: E402

PACE = HERE / "pace.yaml"
PACES = (0.7, 0.85, 1.15, 1.3, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0)


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
    from trainatomy.timing.host_costs import cpu_costs
    from trainatomy.timing.launch import cpu_seconds_by_phase
    from trainatomy.workload.loops import loop_of

    path = predictions_of(gpu_id)
    done = {line["name"] for line in trainings.lines(path)}
    for row in (*draw("first"), *draw("second"), *draw("third")):
        if row.name in done:
            continue
        workload = row.workload(HERE).model_copy(update={"gpu": gpu_id})
        simulation = simulate(workload, find_gpu(gpu_id))
        calls = analysis_of(workload, simulation, None).driver_calls
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
        return training_errors.todays(HostPace(**stored))
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
        errors = ours["step_seconds"] / step - 1, training_errors.at_pace(ours, pace.beside(assumed)) / step - 1
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
