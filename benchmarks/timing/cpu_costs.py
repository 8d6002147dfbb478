"""Fit the CPU costs of launching operations: ``python benchmarks/timing/cpu_costs.py POINTS.jsonl --out hosts.yaml``.

POINTS.jsonl is written by ``probe.py``.  Each phase of each row gives one equation: the number of operations of each
kind times its cost is the CPU time of the phase.  Only phases in which the CPU did not wait for the GPU are used.  The
fit minimises relative errors (Huber loss) with a prior from the profiler's traces, because the counts of different
kinds are correlated.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy
import yaml
from scipy.optimize import least_squares, nnls

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "accuracy"))

import grid
from probe import WARM, tiny

from trainatomy.timing.launch import KINDS, batch_bytes, checkpointed_regions, kind_of, launch_context, list_length
from trainatomy.workload.schema import Workload

PRIOR = {
    place: dict(zip(KINDS, values, strict=True))
    for place, values in {
        "graph": (2.5, 11, 13, 16, 26, 45, 70, 33, 28, 30, 40, 31, 3),
        "backward": (5, 12, 15, 17, 24, 75, 100, 35, 16, 40, 40, 31, 3),
        "plain": (2, 9, 11, 13, 20, 35, 50, 25, 20, 25, 40, 31, 3),
    }.items()
}
"""Microseconds: rounded medians of the durations of these operations in the traces of profiled steps, plus a little for
the autograd engine or Python."""
OTHERS = {"list_item": 0.6, "module_call": 5.0, "checkpoint": 300.0}
PHASES = {"forward": "forward", "forward end": "backward", "optimizer": "optimizer"}
PULL = 0.15
STEP_MICROSECONDS = 300.0
"""Initial value of what the optimizer's step costs besides its operations."""
MIN_MICROSECONDS = 200
"""Shorter phases are dominated by the cost of the time stamps."""
LOOP = ("step", "micro_step", "module_step", "module_micro_step", "batch_byte")
"""The loop's costs, named as in ``timing.launch.CPUCosts``."""


class Phase(NamedTuple):
    """An equation: the CPU time of a phase without waits, and how often each cost occurs in it."""

    training: str
    name: str
    microseconds: float
    counts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Training:
    """A measured training: microseconds of CPU and GPU by phase, and the operations of its step."""

    name: str
    workload: Workload
    operations: Any
    host: Mapping[str, float]
    gpu: Mapping[str, float]
    counts: Mapping[str, Counter[str]]

    @property
    def is_tiny(self) -> bool:
        """True if it has one short sample, so that the CPU never waits for the GPU."""
        return self.name.endswith("-tiny")

    def phases(self) -> list[Phase]:
        """Return the phases in which the CPU was busy all the time."""
        if self.host["backward"] < MIN_MICROSECONDS:
            return []
        return [
            Phase(self.name, phase, self.host[phase], self.counts[phase])
            for phase in PHASES.values()
            if self.host[phase] > MIN_MICROSECONDS and (self.is_tiny or self.gpu[phase] <= 1.1 * self.host[phase])
        ]


def host_microseconds(stamps: list[Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the median CPU and GPU microseconds of the timed steps, by phase."""
    host: dict[int, Counter[str]] = defaultdict(Counter)
    gpu: dict[int, Counter[str]] = defaultdict(Counter)
    timed = [stamp for stamp in stamps if WARM <= stamp[0] < max(s[0] for s in stamps)]
    for (step, name, at, on_gpu), (_, _, next_at, next_on_gpu) in pairwise(timed):
        phase = PHASES.get(name, "other")
        host[step][phase] += next_at - at
        gpu[step][phase] += next_on_gpu - on_gpu
    return tuple(  # type: ignore[return-value]
        {phase: median(one[phase] for one in steps.values()) for phase in (*PHASES.values(), "other")}
        for steps in (host, gpu)
    )


def counts(operations: Any) -> dict[str, Counter[str]]:
    """Count how often each cost occurs, by phase of the time stamps."""
    graph = any(operation.phase == "backward" for operation in operations.operations)
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for operation in operations.operations:
        call = operations.calls[operation.call]
        phase = {"recompute": "backward", "zero_grad": "other"}.get(operation.phase, operation.phase)
        kind = kind_of(call)
        found[phase][f"{launch_context(operation, graph=graph)}.{kind}"] += operation.repeats
        if kind == "list" or call.name == "aten::stack":
            found[phase]["list_item"] += list_length(call) * operation.repeats
        found[phase]["bytes"] += batch_bytes(call) * operation.repeats
    for phase, calls in operations.module_calls.items():
        found["backward" if phase == "recompute" else phase]["module_call"] += calls
    regions = checkpointed_regions(operations)
    found["forward"]["checkpoint"] += regions
    found["backward"]["checkpoint"] += regions
    return found


def simulated(name: str, small: bool) -> tuple[Workload, Any]:
    """Return the workload of a row of the grid and the operations of its step."""
    from trainatomy.simulator.simulate import simulate

    row = next(row for row in grid.rows() if row.name == name)
    mapping = row.workload().to_mapping()
    mapping = {**(tiny(mapping) if small else mapping), "gpu": "h200", "software": {"torch": "2.11"}}
    workload = Workload.from_mapping(mapping)
    return workload, simulate(workload, workload.resolve_gpu()).operations


def read(path: Path) -> list[Training]:
    """Read the trainings of a file of points, and simulate their operations."""
    found = []
    for line in path.read_text().splitlines():
        point = json.loads(line)
        workload, operations = simulated(point["row"], point["name"].endswith("-tiny"))
        host, gpu = host_microseconds(point["stamps"])
        found.append(Training(point["name"], workload, operations, host, gpu, counts(operations)))
    return found


def fit_operations(phases: Sequence[Phase]) -> dict[str, float]:
    """Fit the microseconds of each kind of operation, of ``OTHERS`` and of ``optimizer_step``; print the residuals."""
    names = [f"{place}.{kind}" for place in PRIOR for kind in KINDS] + list(OTHERS)
    prior = numpy.array([PRIOR[n.split(".")[0]][n.split(".")[1]] if "." in n else OTHERS[n] for n in names], float)
    matrix = numpy.array([[phase.counts[name] for name in names] for phase in phases], float)
    measured = numpy.array([phase.microseconds for phase in phases])
    steps = numpy.array([phase.name == "optimizer" for phase in phases], float)

    def errors(logarithms: Any) -> Any:
        values = prior * numpy.exp(logarithms[:-1])
        predicted = matrix @ values + steps * STEP_MICROSECONDS * numpy.exp(logarithms[-1])
        return numpy.concatenate([numpy.log(predicted / measured), PULL * logarithms])

    fitted = least_squares(errors, numpy.zeros(len(names) + 1), loss="huber", f_scale=0.06)
    residuals = errors(fitted.x)[: len(phases)]
    for phase, residual in zip(phases, residuals, strict=True):
        print(f"{phase.training:38} {phase.name:10} {phase.microseconds / 1e3:8.2f} ms {residual:+.1%}")
    print("median", numpy.median(abs(residuals)))
    values = dict(zip(names, prior * numpy.exp(fitted.x[:-1]), strict=True))
    return values | {"optimizer_step": STEP_MICROSECONDS * numpy.exp(fitted.x[-1])}


def fit_loop(trainings: Sequence[Training], values: Mapping[str, float]) -> dict[str, float]:
    """Fit the microseconds of ``LOOP`` to the Trainer's time outside of forward, backward and optimizer.

    The part explained by ``values`` is subtracted first.  Prints the residuals.
    """
    equations, rests, names = [], [], []
    for one in trainings:
        if one.workload.loop != "trainer" or one.workload.mode != "training":
            continue
        if not one.is_tiny and one.gpu["other"] < 0.8 * one.host["other"]:
            continue  # the CPU waited for the GPU
        known = sum(values.get(name, 0) * count for name, count in one.counts["other"].items())
        micro_steps = one.workload.train.gradient_accumulation_steps
        modules = one.operations.module_calls["forward"]
        equations.append([1, micro_steps, modules / micro_steps, modules, one.counts["other"]["bytes"]])
        rests.append(one.host["other"] - known)
        names.append(one.name)
    matrix, measured = numpy.array(equations, float), numpy.array(rests)
    loop, _ = nnls(matrix / measured[:, None], numpy.ones(len(measured)))
    for name, took, guess in zip(names, measured, matrix @ loop, strict=True):
        print(f"{name:38} between    {took / 1e3:8.2f} ms {numpy.log(guess / took):+.1%}")
    found = dict(zip(LOOP, loop, strict=True))
    print(found)
    return found


def written(values: Mapping[str, float], loop: Mapping[str, float], source: str) -> str:
    """Return the costs as YAML."""
    result: dict[str, Any] = {
        place: {kind: float(round(values[f"{place}.{kind}"], 2)) for kind in KINDS} for place in PRIOR
    }
    result |= {name: float(round(values[name], 3)) for name in (*OTHERS, "optimizer_step")}
    result |= {name: float(round(value, 4)) for name, value in loop.items()}
    return str(yaml.safe_dump({"source": source, "microseconds": result}, sort_keys=False))


def main() -> int:
    """Fit the costs and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("points", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--source", default="measured")
    options = parser.parse_args()
    trainings = read(options.points)
    values = fit_operations([phase for one in trainings for phase in one.phases()])
    options.out.write_text(written(values, fit_loop(trainings, values), options.source))
    return 0


if __name__ == "__main__":
    sys.exit(main())
