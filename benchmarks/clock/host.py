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
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy
import yaml
from scipy.optimize import least_squares, nnls

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "accuracy"))

import grid
from probe import WARM, tiny

from trainatomy.clock.issue import KINDS, batch_bytes, checkpointed_regions, kind_of, listed, place_of
from trainatomy.workload.schema import Workload

PRIOR = {
    place: dict(zip(KINDS, values, strict=True))
    for place, values in {
        "graph": (2.5, 11, 13, 16, 26, 45, 70, 33, 28, 30, 40, 3),
        "backward": (5, 12, 15, 17, 24, 75, 100, 35, 16, 40, 40, 3),
        "plain": (2, 9, 11, 13, 20, 35, 50, 25, 20, 25, 40, 3),
    }.items()
}
"""Microseconds; medians of the durations of these operations in the traces of profiled steps, rounded, and a little
for the engine's or Python's part."""
OTHERS = {"list_item": 0.6, "module_call": 5.0, "checkpoint": 300.0}
PHASES = {"forward": "forward", "forward end": "backward", "optimizer": "optimizer"}
PULL = 0.15


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
        found[phase][f"{place_of(operation, graph=graph)}.{kind}"] += operation.repeats
        if kind == "list" or call.name == "aten::stack":
            found[phase]["list_item"] += listed(call) * operation.repeats
        found[phase]["bytes"] += batch_bytes(call) * operation.repeats
    for phase, calls in operations.module_calls.items():
        found["backward" if phase == "recompute" else phase]["module_call"] += calls
    regions = checkpointed_regions(operations)
    found["forward"]["checkpoint"] += regions
    found["backward"]["checkpoint"] += regions
    return found


def simulated(name: str, small: bool) -> tuple[Workload, Any]:
    from trainatomy.world.simulate import simulate

    row = next(row for row in grid.rows() if row.name == name)
    mapping = row.workload().to_mapping()
    mapping = {**(tiny(mapping) if small else mapping), "gpu": "h200", "software": {"torch": "2.11"}}
    workload = Workload.from_mapping(mapping)
    return workload, simulate(workload, workload.card()).operations


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("points", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--source", default="measured")
    options = parser.parse_args()
    names = [f"{place}.{kind}" for place in PRIOR for kind in KINDS] + list(OTHERS)
    prior = numpy.array([PRIOR[n.split(".")[0]][n.split(".")[1]] if "." in n else OTHERS[n] for n in names], float)
    rows, equations, others = [], [], []
    for line in options.points.read_text().splitlines():
        point = json.loads(line)
        workload, operations = simulated(point["row"], point["name"].endswith("-tiny"))
        host, gpu = host_microseconds(point["stamps"])
        found = counts(operations)
        for phase in PHASES.values():
            waited = gpu[phase] > 1.1 * host[phase] and not point["name"].endswith("-tiny")
            if host[phase] > 200 and not waited and not (host["backward"] < 200):
                rows.append((point["name"], phase, host[phase]))
                equations.append([found[phase][name] for name in names])
        others.append((point, workload, operations, host, gpu, found))
    matrix, measured = numpy.array(equations, float), numpy.array([row[2] for row in rows])
    # the optimizer's step of a loop costs something besides its operations
    steps = numpy.array([row[1] == "optimizer" for row in rows], float)

    def errors(logarithms: Any) -> Any:
        values = prior * numpy.exp(logarithms[:-1])
        told = matrix @ values + steps * 300 * numpy.exp(logarithms[-1])
        return numpy.concatenate([numpy.log(told / measured), PULL * logarithms])

    fitted = least_squares(errors, numpy.zeros(len(names) + 1), loss="huber", f_scale=0.06)
    values = dict(zip(names, prior * numpy.exp(fitted.x[:-1]), strict=True))
    values["optimizer_step"] = 300 * numpy.exp(fitted.x[-1])
    residuals = errors(fitted.x)[: len(rows)]
    for (name, phase, took), residual in zip(rows, residuals, strict=True):
        print(f"{name:38} {phase:10} {took / 1e3:8.2f} ms {residual:+.1%}")
    print("median", numpy.median(abs(residuals)))
    equations, rests, told = [], [], []
    for point, workload, operations, host, gpu, found in others:
        if workload.loop != "trainer" or workload.mode != "training":
            continue
        if not point["name"].endswith("-tiny") and gpu["other"] < 0.8 * host["other"]:
            continue  # the host waited for the GPU
        known = sum(values.get(name, 0) * count for name, count in found["other"].items())
        micro_steps = workload.train.gradient_accumulation_steps
        modules = operations.module_calls["forward"]
        equations.append([1, micro_steps, modules / micro_steps, modules, found["other"]["bytes"]])
        rests.append(host["other"] - known)
        told.append(point["name"])
    matrix, measured = numpy.array(equations, float), numpy.array(rests)
    loop, _ = nnls(matrix / measured[:, None], numpy.ones(len(measured)))
    for name, took, guess in zip(told, measured, matrix @ loop, strict=True):
        print(f"{name:38} between    {took / 1e3:8.2f} ms {numpy.log(guess / took):+.1%}")
    names_of_loop = ("step", "micro_step", "module_step", "module_micro_step", "batch_byte")
    print(dict(zip(names_of_loop, loop, strict=True)))
    result = {place: {kind: float(round(values[f"{place}.{kind}"], 2)) for kind in KINDS} for place in PRIOR} | {
        name: float(round(values[name], 3)) for name in (*OTHERS, "optimizer_step")
    }
    result |= {name: float(round(value, 4)) for name, value in zip(names_of_loop, loop, strict=True)}
    options.out.write_text(yaml.safe_dump({"source": options.source, "microseconds": result}, sort_keys=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
