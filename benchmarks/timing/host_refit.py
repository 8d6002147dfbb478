"""Fit the CPU costs of operations again (``catalog/hosts.yaml``): to measured steps that the CPU bounds, and phases.

python benchmarks/timing/host_refit.py observe --out FILE   # simulates what was measured: minutes
python benchmarks/timing/host_refit.py fit FILE [--folds 6]

An observation is a step (``records/trainings-*.jsonl.gz``) or a phase of a small training (``records/host-*.jsonl.gz``,
``pace-forms-h200.jsonl.gz``), with what it costs by today's costs, part by part.  The fit multiplies the costs.  It
minimises relative errors (Huber loss), lets each machine's visit be slower or quicker as a whole, and stays near
today's costs, because parts are correlated.  ``fit`` prints errors of folds that were left out, then the multipliers.
Predict the steps again first: ``trainings.py predict --again``.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "accuracy"))

import grid  # noqa: E402
import trainings  # noqa: E402

from trainatomy.catalog.hosts import reference_host  # noqa: E402
from trainatomy.measurement.device.host_probe import PROBE  # noqa: E402
from trainatomy.results.host_pace import HostPace  # noqa: E402
from trainatomy.timing import launch  # noqa: E402
from trainatomy.workload.loops import loop_of  # noqa: E402
from trainatomy.workload.schema import Workload  # noqa: E402

HOST = reference_host()
COSTS = launch.cpu_costs(HOST.microseconds)
GPUS = ("h200", "h100-sxm")
SMALL = ("host-everyday-h200", "host-drawn-h200", "pace-forms-h200")
GAP = 12
"""Lines between two records of a GPU above which another visit of the machine began."""
PHASES = {"micro_step_begin>forward_end": "forward", "forward_end>loss_kept": "backward"}
PHASES |= {"optimizer_begin>optimizer_end": "optimizer"}
FITTED = ("graph.", "backward.", "step.", "module_step.", "module_micro_step.", "parameter_step.")
KEPT = ("graph.host", "graph.list", "graph.library", "backward.list", "backward.library")
FREE = ("backward.accumulation", "graph.quantised", "backward.quantised")
DEVIATION, PULL, FREE_PULL, SESSION_PULL = 0.1, 20.0, 3.0, 20.0
"""Relative error of an observation; pulls of a cost's logarithm towards today's, of ``FREE``, and of sessions to 0."""
TURNS = 30
Parts = dict[str, defaultdict[str, float]]


def parts_of(operations: Any, loop: str) -> Parts:
    """Return the microseconds of today's costs in a step, by phase and by the name of the cost."""
    found: Parts = defaultdict(lambda: defaultdict(float))
    graph = any(one.phase == "backward" for one in operations.operations)
    tables = {"graph": COSTS.graph, "backward": COSTS.backward, "plain": COSTS.plain}
    seconds = list(launch.launch_seconds(operations, COSTS, loop))
    for one, whole in zip(operations.operations, seconds, strict=True):
        context, kind = launch.priced_launch(one, operations.calls[one.call], graph=graph)
        phase = {"recompute": "backward", "zero_grad": "other"}.get(one.phase, one.phase)
        own = tables[context][kind] * one.threads if context in tables else 0.0
        found[phase][f"{context}.{kind}"] += own * one.repeats * 1e6
        found[phase]["rest"] += (whole - own) * one.repeats * 1e6
    micro_steps = launch._count_micro_steps(operations)
    modules = operations.modules or operations.module_calls.get("forward", 0) / micro_steps
    own_costs = {
        f"step.{loop}": COSTS.step[loop],
        f"module_step.{loop}": COSTS.module_step[loop] * modules,
        f"module_micro_step.{loop}": COSTS.module_micro_step[loop] * modules * micro_steps,
        f"parameter_step.{loop}": COSTS.parameter_step[loop] * operations.parameters,
        "rest": COSTS.micro_step[loop] * micro_steps,
    }
    for name, value in own_costs.items():
        found["other"][name] += value * 1e6
    if found["optimizer"]:
        found["optimizer"]["rest"] += COSTS.optimizer_step[loop] * 1e6
    return found


def steps() -> Iterator[dict[str, Any]]:
    """Yield the measured steps that the CPU bounds."""
    found = [(gpu, *one) for gpu in GPUS for one in bound_steps(gpu)]
    parts = simulated({line["name"] for _, _, line, _ in found})
    for gpu, session, line, ours in found:
        if (of_phases := parts.get(line["name"])) is None:
            continue
        whole: dict[str, float] = defaultdict(float)
        for of_phase in of_phases.values():
            for part, us in of_phase.items():
                whole[part] += us
        yield _observation(line["name"], gpu, session, "step", whole, line["step_seconds"] * 1e6, ours, 1.0)


def bound_steps(gpu: str) -> Iterator[tuple[str, dict[str, Any], float]]:
    """Yield the visit of the machine, the record and the predicted microseconds of steps that the CPU bounds."""
    predicted, session, last = {one["name"]: one for one in trainings.lines(trainings.predictions_of(gpu))}, "", -GAP
    for place, line in enumerate(trainings.lines(trainings.records_of(gpu))):
        pace, ours = line.get("host_pace"), predicted.get(line["name"])
        if line.get("part") != "steps" or ours is None or not pace or pace["probe"] != PROBE:
            continue
        recorded = trainings.todays(HostPace(**pace))
        factor = recorded.beside(recorded.reference_seconds or 1.0)
        if trainings.bound_at(ours, factor) != "host":
            continue
        session, last = (f"{gpu} {place}" if place - last > GAP else session), place
        yield session, line, trainings.at_pace(ours, factor) * 1e6


def simulated(names: set[str]) -> dict[str, Parts]:
    """Return what trainings cost; those of torchvision come last (torchvision_path.py says why)."""
    from trainatomy.catalog.gpus import find_gpu
    from trainatomy.simulator.simulate import simulate

    found, rows = dict[str, Parts](), [row for row in grid.rows(trainings.TRAININGS) if row.name in names]
    for row in sorted(rows, key=lambda row: "factory" in row.mapping["model"]):
        workload = row.workload(HERE).model_copy(update={"gpu": "h200"})
        try:
            operations = simulate(workload, find_gpu("h200")).operations
        except Exception as error:
            print(f"{row.name}: left out: {error}", flush=True)
            continue
        found[row.name] = parts_of(operations, loop_of(workload).cpu_costs)
    return found


def phases() -> Iterator[dict[str, Any]]:
    """Yield the measured phases of small trainings."""
    from trainatomy.simulator.simulate import simulate

    for source in SMALL:
        for line in trainings.lines(HERE / "records" / f"{source}.jsonl.gz"):
            mapping = line.get("mapping")
            if "us" not in line or not mapping or mapping.get("mode") == "generation" or mapping.get("loop") == "grpo":
                continue
            workload = Workload.from_mapping({**mapping, "name": line["name"], "gpu": "h200"})
            times: dict[str, float] = defaultdict(float)
            for between, us in line["us"].items():
                times[PHASES.get(between, "other")] += us if isinstance(us, float | int) else _trimmed(us)
            if not times["forward"] or not times["backward"]:
                continue
            parts = parts_of(simulate(workload, workload.resolve_gpu()).operations, loop_of(workload).cpu_costs)
            pace = HostPace(PROBE, during_seconds=tuple(one * 1e-6 for one in _probes(line)))
            factor = float((pace.seconds / HOST.probe_seconds[PROBE]) ** HOST.pace_exponents[PROBE])
            for phase, us in times.items():
                ours, share = factor * sum(parts[phase].values()), us / sum(times.values())
                if ours and us:
                    yield _observation(line["name"], "h200", source, phase, parts[phase], us, ours, share)


def _probes(line: Mapping[str, Any]) -> list[float]:
    if (readings := line.get("readings")) is not None:
        return [main + visit for main, visit in zip(readings["main_warm"], readings["visit_warm"], strict=True)]
    return list(line.get("step_probes_us") or line["probe_us"])[-8:]


def _trimmed(values: Sequence[float]) -> float:
    ordered = sorted(values)
    left_out = max(1, len(ordered) // 5)
    return fmean(ordered[left_out:-left_out] or ordered)


def _observation(
    name: str, gpu: str, session: str, phase: str, parts: Mapping[str, float], us: float, ours: float, share: float
) -> dict[str, Any]:
    kept = {key: round(value, 1) for key, value in parts.items() if value}
    about = {"name": name, "gpu": gpu, "session": session, "phase": phase, "share": round(share, 3)}
    return {**about, "us": round(us, 1), "predicted_us": round(ours, 1), "parts": kept}


def fold_of(name: str, folds: int) -> int:
    """Return the fold of a training, which depends on its name alone."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % folds


def fit(observations: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the logarithms of the multipliers of today's costs."""
    names = sorted({key for one in observations for key in one["parts"] if key.startswith(FITTED) and key not in KEPT})
    sessions = sorted({one["session"] for one in observations})
    matrix = numpy.array([[one["parts"].get(key, 0.0) for key in names] for one in observations])
    rest = numpy.array([sum(one["parts"].values()) for one in observations]) - matrix.sum(1)
    scale = numpy.array([one["predicted_us"] / sum(one["parts"].values()) for one in observations])
    times, visits = (
        numpy.array([one["us"] for one in observations]),
        numpy.array([[one["session"] == session for session in sessions] for one in observations], float),
    )
    weights = numpy.sqrt([one["share"] for one in observations]) / DEVIATION
    pulls = numpy.array([FREE_PULL if key in FREE else PULL for key in names] + [SESSION_PULL] * len(sessions))
    found = numpy.zeros(len(pulls))
    for _ in range(TURNS):
        costs = matrix * numpy.exp(found[: len(names)])
        whole = costs.sum(1) + rest
        errors = numpy.log(whole * scale / times) + visits @ found[len(names) :]
        slopes = numpy.hstack([costs / whole[:, None], visits])
        damped = weights / numpy.sqrt(numpy.maximum(1.0, abs(errors) * weights))
        rows = slopes * damped[:, None]
        gradient = rows.T @ (damped * errors) + pulls * found
        found -= numpy.linalg.solve(rows.T @ rows + numpy.diag(pulls), gradient)
    return {key: float(value) for key, value in zip(names, found[: len(names)], strict=True)}


def error_of(one: Mapping[str, Any], logarithms: Mapping[str, float]) -> float:
    """Return the relative error of an observation with multiplied costs."""
    whole = sum(value * numpy.exp(logarithms.get(key, 0.0)) for key, value in one["parts"].items())
    return float(one["predicted_us"] * whole / sum(one["parts"].values()) / one["us"] - 1)


def report(title: str, observations: Sequence[Mapping[str, Any]], errors: Sequence[float]) -> None:
    """Print the errors by GPU and phase."""
    groups: dict[str, list[float]] = defaultdict(list)
    for one, error in zip(observations, errors, strict=True):
        groups[f"{one['phase']} {one['gpu']}"].append(error)
    for name, found in sorted(groups.items()):
        off, beyond = median(map(abs, found)), sum(abs(error) > 0.25 for error in found)
        print(f"{title:8} {name:20} {len(found):4} mean {median(found):+6.1%} off {off:5.1%}, {beyond} beyond 25 %")


def main() -> int:
    """Observe or fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("observe").add_argument("--out", type=Path, required=True)
    fitting = commands.add_parser("fit")
    fitting.add_argument("file", type=Path)
    fitting.add_argument("--folds", type=int, default=6)
    options = parser.parse_args()
    if options.command == "observe":
        found = "".join(json.dumps(one) + "\n" for one in (*phases(), *steps()))
        options.out.write_bytes(gzip.compress(found.encode(), mtime=0))
        return 0
    every = trainings.lines(options.file)
    report("today", every, [error_of(one, {}) for one in every])
    left_out = [fit([one for one in every if fold_of(one["name"], options.folds) != n]) for n in range(options.folds)]
    report("left out", every, [error_of(one, left_out[fold_of(one["name"], options.folds)]) for one in every])
    for name, value in fit(every).items():
        print(f"{name:32} x {numpy.exp(value):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
