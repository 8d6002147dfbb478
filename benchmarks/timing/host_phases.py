"""Measure the CPU's time of the phases of trainings that the host bounds, and count what each phase launches.

python benchmarks/timing/host_phases.py measure --out FILE [--time-limit 120]   # on a GPU: the rows of host_phases.yaml
python benchmarks/timing/host_phases.py count FILE     # anywhere: records/host-counts.jsonl.gz, for host_costs.py

``count`` also simulates the trainings to which the costs were fitted before, with one sample of 16 tokens, and keeps
what those costs say about them: their measurements are no longer there, and a fit must not forget them.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import sys
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "accuracy"))

import grid  # noqa: E402
import processes  # noqa: E402
import trainings  # noqa: E402

from trainatomy.workload.schema import Workload  # noqa: E402

ROWS = HERE / "host_phases.yaml"
COUNTS = HERE / "records" / "host-counts.jsonl.gz"
EARLIER = HERE / "records" / "h200-steps.jsonl"
"""Trainings of the accuracy grid to which the first costs were fitted."""
WARM_UP, FP16_WARM_UP, TIMED = 4, 10, 12
PHASES = ("forward", "backward", "optimizer", "other")
GRACE = 20
"""Seconds beyond its limit after which the process that measures is killed."""


def measure(out: Path, time_limit: float) -> None:
    """Measure all rows in a fork, twice if there is time; each result is a line at once."""
    processes.preload_for_forks()
    log, began = out.with_suffix(".log"), time.monotonic()
    process = processes.fork_and_run(partial(_measure, out, time_limit), log)
    while process.status() is None and time.monotonic() - began < time_limit + GRACE:
        time.sleep(0.05)
    if process.status() is None:
        process.kill()
    print(log.read_text(encoding="utf-8", errors="replace")[-9000:], flush=True)


def _measure(out: Path, time_limit: float) -> None:
    import torch

    began = time.monotonic()
    for turn in range(2):
        for row in grid.rows(ROWS):
            if time.monotonic() - began > time_limit:
                print(f"turn {turn}: {row.name} and what follows are left out", flush=True)
                return
            line: dict[str, Any] = {"name": row.name, "gpu": torch.cuda.get_device_name()}
            try:
                line |= _phases(row)
            except Exception as error:
                line["error"] = f"{type(error).__name__}: {error}"[:300]
            gc.collect()
            torch.cuda.empty_cache()
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{time.monotonic() - began:6.1f} s {row.name}: {line.get('error', line.get('us'))}", flush=True)


def _phases(row: grid.Row) -> dict[str, Any]:
    """Return the CPU's microseconds by phase and those of the probe of the host's pace: medians of the timed steps."""
    import torch

    from trainatomy.measurement.calibration.phases import PhaseTimer
    from trainatomy.training.model import build_model
    from trainatomy.training.run import run

    workload = row.workload(HERE)
    warm_up = FP16_WARM_UP if workload.train.fp16 else WARM_UP
    timer = PhaseTimer(warm_up)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = build_model(workload)
    run(workload, model, device="cuda", steps=warm_up + TIMED, observer=timer)
    us = {phase: round(median(step.get(phase, 0.0) for step in timer.steps[warm_up:]), 1) for phase in PHASES}
    return {"us": us, "probe_us": round(median(timer.probes[warm_up:]) * 1e6, 1), "waited": timer.waits.read()}


def count(path: Path) -> None:
    """Simulate the trainings that were measured and those of earlier, and write what their phases launch."""
    measured = {line["name"] for line in trainings.lines(path) if "us" in line}
    chosen = [row for row in grid.rows(ROWS) if row.name in measured]
    known = {row.name: row for row in grid.rows()}
    found = []
    for name in sorted({line["row"] for line in trainings.lines(EARLIER)} & known.keys()):
        workload = Workload.from_mapping({**tiny(known[name].workload().to_mapping()), "gpu": "h200"})
        found.append({"name": name, "earlier": True, **counted(workload)})
        print(name, flush=True)
    for row in sorted(chosen, key=lambda row: "factory" in row.mapping["model"]):  # torchvision_path.py says why
        workload = row.workload(HERE).model_copy(update={"gpu": "h200"})
        found.append({"name": row.name, "earlier": False, **counted(workload)})
        print(row.name, flush=True)
    COUNTS.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in found).encode(), mtime=0))


def tiny(mapping: dict[str, Any]) -> dict[str, Any]:
    """Reduce a training to one short sample, so that only the CPU's work is left."""
    mapping.setdefault("train", {})["per_device_train_batch_size"] = 1
    if "sequence_length" in mapping.get("data", {}):
        mapping["data"]["sequence_length"] = 16
    if "target_length" in mapping.get("data", {}):
        mapping["data"]["target_length"] = 8
    return mapping


def counted(workload: Workload) -> dict[str, Any]:
    """Return how often each cost occurs in the phases of a training, and what today's costs say of them."""
    from trainatomy.catalog.hosts import reference_host
    from trainatomy.simulator.simulate import simulate
    from trainatomy.timing.host_costs import cpu_costs
    from trainatomy.timing.launch import cpu_seconds_by_phase
    from trainatomy.workload.loops import loop_of

    operations = simulate(workload, workload.resolve_gpu()).operations
    costs = cpu_costs(reference_host().microseconds)
    predicted = cpu_seconds_by_phase(operations, costs, loop_of(workload).cpu_costs)
    return {
        "loop": workload.loop,
        "micro_steps": workload.train.gradient_accumulation_steps,
        "counts": {phase: dict(found) for phase, found in counts(operations).items()},
        "us": {phase: round(predicted[phase] * 1e6, 1) for phase in PHASES},
    }


def counts(operations: Any) -> dict[str, Counter[str]]:
    """Count how often each cost of ``timing.host_costs.CPUCosts`` occurs, by phase."""
    from trainatomy.operators.cost import recurrence
    from trainatomy.timing.launch import checkpointed_regions, list_length, priced_launch

    graph = any(operation.phase == "backward" for operation in operations.operations)
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for operation in operations.operations:
        call = operations.calls[operation.call]
        phase = {"recompute": "backward", "zero_grad": "other"}.get(operation.phase, operation.phase)
        context, kind = priced_launch(operation, call, graph=graph)
        found[phase][f"{context}.{kind}"] += operation.repeats
        if kind == "list" or call.name == "aten::stack":
            found[phase]["list_item"] += list_length(call) * operation.repeats
        if kind == "recurrent":
            found[phase][f"recurrent_layer.{context}"] += recurrence.layers(call) * operation.repeats
            found[phase]["inner_kernel"] += recurrence.launches(call) * operation.repeats
    for phase, calls in operations.module_calls.items():
        found["backward" if phase == "recompute" else phase]["module_call"] += calls
    for phase in ("forward", "backward"):
        found[phase]["checkpoint"] += checkpointed_regions(operations)
    return found


def main() -> int:
    """Measure or count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--time-limit", type=float, default=120)
    commands.add_parser("count").add_argument("file", type=Path)
    options = parser.parse_args()
    if options.command == "measure":
        measure(options.out, options.time_limit)
    else:
        count(options.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
