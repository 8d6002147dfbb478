"""Fit what issuing costs the host: ``python benchmarks/clock/host.py POINTS.jsonl --out hosts.yaml``.

POINTS.jsonl is what ``probe.py`` wrote.  Each phase of each row gives one equation: operations by kind, times their
costs, is what the host took.  Only phases count in which the host did not wait for the GPU.  The fit minimises relative
errors (Huber), pulled towards what the profiler's traces say of each kind, because the counts of kinds go together.
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
"""Microseconds; medians of the durations of these operations in the traces of profiled steps, rounded, and a little
for the engine's or Python's part."""
OTHERS = {"list_item": 0.6, "module_call": 5.0, "checkpoint": 300.0}
PHASES = {"forward": "forward", "forward end": "backward", "optimizer": "optimizer"}
PULL = 0.15
STEP_MICROSECONDS = 300.0
"""What the optimizer's step is taken to cost besides its operations before it is fitted."""
LEAST_MICROSECONDS = 200
"""Shorter phases say more of the stamps than of the host."""
LOOP = ("step", "micro_step", "module_step", "module_micro_step", "batch_byte")
"""What a loop costs besides: `clock.issue.CPUCosts`."""


class Phase(NamedTuple):
    """One equation: what the host took for a phase in which it did not wait, and how often each cost occurs in it."""

    training: str
    name: str
    microseconds: float
    counts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Training:
    """A measured training: microseconds of host and GPU by phase, and the operations of its step."""

    name: str
    workload: Workload
    operations: Any
    host: Mapping[str, float]
    gpu: Mapping[str, float]
    counts: Mapping[str, Counter[str]]

    @property
    def is_tiny(self) -> bool:
        """Whether it has one short sample, so that the GPU is never waited for."""
        return self.name.endswith("-tiny")

    def phases(self) -> list[Phase]:
        """Those in which the host was at work all the time."""
        if self.host["backward"] < LEAST_MICROSECONDS:
            return []
        return [
            Phase(self.name, phase, self.host[phase], self.counts[phase])
            for phase in PHASES.values()
            if self.host[phase] > LEAST_MICROSECONDS and (self.is_tiny or self.gpu[phase] <= 1.1 * self.host[phase])
        ]


def host_microseconds(stamps: list[Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Median over the timed steps of what host and GPU took, by phase."""
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
    """How often each cost occurs, by phase of the stamps."""
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
    """The workload of a row of the grid and the operations of its step."""
    from trainatomy.simulator.simulate import simulate

    row = next(row for row in grid.rows() if row.name == name)
    mapping = row.workload().to_mapping()
    mapping = {**(tiny(mapping) if small else mapping), "gpu": "h200", "software": {"torch": "2.11"}}
    workload = Workload.from_mapping(mapping)
    return workload, simulate(workload, workload.resolve_gpu()).operations


def read(path: Path) -> list[Training]:
    """The trainings of a file of points, executed without a GPU."""
    found = []
    for line in path.read_text().splitlines():
        point = json.loads(line)
        workload, operations = simulated(point["row"], point["name"].endswith("-tiny"))
        host, gpu = host_microseconds(point["stamps"])
        found.append(Training(point["name"], workload, operations, host, gpu, counts(operations)))
    return found


def fit_operations(phases: Sequence[Phase]) -> dict[str, float]:
    """Microseconds of each kind of operation by place, of ``OTHERS`` and of ``optimizer_step``; prints how far each
    phase is met."""
    names = [f"{place}.{kind}" for place in PRIOR for kind in KINDS] + list(OTHERS)
    prior = numpy.array([PRIOR[n.split(".")[0]][n.split(".")[1]] if "." in n else OTHERS[n] for n in names], float)
    matrix = numpy.array([[phase.counts[name] for name in names] for phase in phases], float)
    measured = numpy.array([phase.microseconds for phase in phases])
    steps = numpy.array([phase.name == "optimizer" for phase in phases], float)

    def errors(logarithms: Any) -> Any:
        values = prior * numpy.exp(logarithms[:-1])
        told = matrix @ values + steps * STEP_MICROSECONDS * numpy.exp(logarithms[-1])
        return numpy.concatenate([numpy.log(told / measured), PULL * logarithms])

    fitted = least_squares(errors, numpy.zeros(len(names) + 1), loss="huber", f_scale=0.06)
    residuals = errors(fitted.x)[: len(phases)]
    for phase, residual in zip(phases, residuals, strict=True):
        print(f"{phase.training:38} {phase.name:10} {phase.microseconds / 1e3:8.2f} ms {residual:+.1%}")
    print("median", numpy.median(abs(residuals)))
    values = dict(zip(names, prior * numpy.exp(fitted.x[:-1]), strict=True))
    return values | {"optimizer_step": STEP_MICROSECONDS * numpy.exp(fitted.x[-1])}


def fit_loop(trainings: Sequence[Training], values: Mapping[str, float]) -> dict[str, float]:
    """Microseconds of ``LOOP``, from what the Trainer's steps took besides forward, backward and optimizer, less what
    ``values`` explains of it; prints how far each is met."""
    equations, rests, told = [], [], []
    for one in trainings:
        if one.workload.loop != "trainer" or one.workload.mode != "training":
            continue
        if not one.is_tiny and one.gpu["other"] < 0.8 * one.host["other"]:
            continue  # the host waited for the GPU
        known = sum(values.get(name, 0) * count for name, count in one.counts["other"].items())
        micro_steps = one.workload.train.gradient_accumulation_steps
        modules = one.operations.module_calls["forward"]
        equations.append([1, micro_steps, modules / micro_steps, modules, one.counts["other"]["bytes"]])
        rests.append(one.host["other"] - known)
        told.append(one.name)
    matrix, measured = numpy.array(equations, float), numpy.array(rests)
    loop, _ = nnls(matrix / measured[:, None], numpy.ones(len(measured)))
    for name, took, guess in zip(told, measured, matrix @ loop, strict=True):
        print(f"{name:38} between    {took / 1e3:8.2f} ms {numpy.log(guess / took):+.1%}")
    found = dict(zip(LOOP, loop, strict=True))
    print(found)
    return found


def written(values: Mapping[str, float], loop: Mapping[str, float], source: str) -> str:
    """The costs as YAML."""
    result: dict[str, Any] = {
        place: {kind: float(round(values[f"{place}.{kind}"], 2)) for kind in KINDS} for place in PRIOR
    }
    result |= {name: float(round(values[name], 3)) for name in (*OTHERS, "optimizer_step")}
    result |= {name: float(round(value, 4)) for name, value in loop.items()}
    return str(yaml.safe_dump({"source": source, "microseconds": result}, sort_keys=False))


def main() -> int:
    """Fit and write."""
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
