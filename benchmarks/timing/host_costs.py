"""Fit the CPU costs of launching operations (``catalog/hosts.yaml``) to the phases of trainings that the host bounds.

python benchmarks/timing/host_costs.py MEASURED [--half]   # written by host_phases.py; the counts are in records

Each phase is one equation: what it launches, times the cost of each, is its CPU time.  Of the trainings of earlier,
what the costs of then say takes the place of a measurement; their optimizer and the rest of the step, which those
costs divide differently, are one equation.  The fit minimises relative errors, weighted by the root of a phase's share
of the step (Huber loss), and stays near today's costs, because the counts of different kinds are correlated.  Times
are those of a quiet host, by the probe of the pace.  With ``--half``, every other row is used and the others check.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy
from scipy.optimize import least_squares

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "accuracy"))

import grid  # noqa: E402
import trainings  # noqa: E402
from host_phases import COUNTS, PHASES, ROWS  # noqa: E402

from trainatomy.catalog.hosts import reference_host  # noqa: E402
from trainatomy.measurement.device.host_probe import PROBE  # noqa: E402
from trainatomy.timing.launch import ACCUMULATION, KINDS  # noqa: E402

HOST = reference_host()
LOOPS = ("trainer", "pytorch")
BY_LOOP = ("optimizer_step", "step", "module_micro_step")
FREE = ("recurrent_layer.graph", "recurrent_layer.backward", "inner_kernel", "list_item")
NAMES = (
    *(f"{context}.{kind}" for context in ("graph", "backward", "plain") for kind in KINDS),
    f"backward.{ACCUMULATION}",
    *FREE,
    "module_call",
    *(f"{cost}.{loop}" for cost in BY_LOOP for loop in LOOPS),
)
WEIGHT, PULL, FREE_PULL = 10.0, 1.46, 0.66
"""Of an equation; of a cost's logarithm towards today's; of costs that were never fitted, or that a loop decides."""


class Phase(NamedTuple):
    """An equation: how often each of ``NAMES`` occurs, microseconds, and its share of the step."""

    training: str
    name: str
    counts: Any
    us: float
    share: float
    earlier: bool


def today() -> Any:
    """Return today's costs, in the order of ``NAMES``."""
    costs = HOST.microseconds
    known = (costs[name.split(".")[0]] for name in NAMES)
    values = (
        cost[name.split(".")[1]] if isinstance(cost, Mapping) else cost for cost, name in zip(known, NAMES, strict=True)
    )
    return numpy.array([max(value, 0.05) for value in values])


def measured(path: Path) -> dict[str, dict[str, float]]:
    """Return the microseconds of each training's phases at a quiet host: medians of its runs."""
    runs: dict[str, list[dict[str, float]]] = defaultdict(list)
    for line in trainings.lines(path):
        if "us" in line:
            slowdown = line["probe_us"] * 1e-6 / HOST.probe_seconds[PROBE]
            pace = slowdown ** HOST.pace_exponents[PROBE] / (1 - (line["waited"] or 0.0))
            runs[line["name"]].append({phase: us / pace for phase, us in line["us"].items()})
    return {name: {phase: median(run[phase] for run in found) for phase in PHASES} for name, found in runs.items()}


def phases(path: Path) -> list[Phase]:
    """Return the equations of the measured trainings, and of those of earlier."""
    real, found = measured(path), []
    for line in map(json.loads, gzip.decompress(COUNTS.read_bytes()).decode().splitlines()):
        us = line["us"] if line["earlier"] else real.get(line["name"])
        if us is None or line["loop"] not in LOOPS or not line["us"]["optimizer"]:
            continue
        rows = {phase: _row(line, phase) for phase in PHASES}
        regions = {phase: line["counts"].get(phase, {}).get("checkpoint", 0) for phase in PHASES}
        times = {
            phase: us[phase] - regions[phase] * HOST.microseconds["checkpoint"].get(phase, 0.0) for phase in PHASES
        }
        if line["earlier"]:
            rows["other"], times["other"] = rows["other"] + rows.pop("optimizer"), times["other"] + times["optimizer"]
        whole = sum(us.values())
        found += [
            Phase(line["name"], phase, row, times[phase], times[phase] / whole, line["earlier"])
            for phase, row in rows.items()
        ]
    return found


def _row(line: Mapping[str, Any], phase: str) -> Any:
    """Return how often each of ``NAMES`` occurs in a phase."""
    found = dict(line["counts"].get(phase, {}))
    loop = line["loop"]
    modules = line["counts"]["forward"].get("module_call", 0)
    if phase == "optimizer":
        found[f"optimizer_step.{loop}"] = 1
    elif phase == "other":
        found[f"step.{loop}"] = 1
        found[f"module_micro_step.{loop}"] = modules if loop == "trainer" else 0
    return numpy.array([found.get(name, 0) for name in NAMES], float)


def fit(equations: Sequence[Phase]) -> Any:
    """Return the costs, in the order of ``NAMES``."""
    costs = today()
    matrix = numpy.array([one.counts for one in equations])
    times = numpy.array([one.us for one in equations])
    weights = WEIGHT * numpy.sqrt([one.share for one in equations])
    free = [name in FREE or name.endswith(".recurrent") or name.startswith(BY_LOOP) for name in NAMES]
    pull = numpy.where(free, FREE_PULL, PULL)

    def errors(logarithms: Any) -> Any:
        predicted = matrix @ (costs * numpy.exp(logarithms))
        return numpy.concatenate([weights * numpy.log(predicted / times), pull * logarithms])

    return costs * numpy.exp(least_squares(errors, numpy.zeros(len(NAMES)), loss="huber").x)


def report(title: str, costs: Any, equations: Sequence[Phase]) -> None:
    """Print the errors of phases and of whole steps."""
    by_phase: dict[str, list[float]] = defaultdict(list)
    whole: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for one in equations:
        predicted = float(one.counts @ costs)
        by_phase[one.name].append(predicted / one.us - 1)
        whole[one.training][0] += predicted
        whole[one.training][1] += one.us
    by_phase["whole"] = [predicted / real - 1 for predicted, real in whole.values()]
    print(title)
    for name, errors in by_phase.items():
        most = max(errors, key=abs)
        print(
            f"  {name:10} {len(errors):3} mean {median(errors):+6.1%} off {median(map(abs, errors)):6.1%} {most:+7.1%}"
        )


def main() -> int:
    """Fit the costs, print the errors before and after, and the costs that change."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--half", action="store_true", help="fit every other row, and check the others")
    options = parser.parse_args()
    every = phases(options.measured)
    order = [row.name for row in grid.rows(ROWS)]
    new, earlier = [one for one in every if not one.earlier], [one for one in every if one.earlier]
    used = [one for one in new if not options.half or order.index(one.training) % 2 == 0]
    checked = [one for one in new if order.index(one.training) % 2] if options.half else new
    costs = fit([*used, *earlier])
    report("today's costs", today(), checked)
    report("fitted costs", costs, checked)
    report("fitted costs, trainings of earlier", costs, earlier)
    for name, before, after in zip(NAMES, today(), costs, strict=True):
        print(f"{name:32} {before:9.2f} {after:9.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
