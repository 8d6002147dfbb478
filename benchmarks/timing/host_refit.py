"""Fit all CPU costs of operations at once (``catalog/hosts.yaml``), to what ``host_observations.py`` yields.

python benchmarks/timing/host_refit.py observe --out FILE   # simulates what was measured: an hour
python benchmarks/timing/host_refit.py fit FILE [--folds 6]

The fit multiplies today's costs.  It minimises relative errors (Huber loss) and stays near today's costs, because parts
are correlated.  Each visit of a machine, and each training in it, may be slower or quicker as a whole: the readings of
the host's pace are that uncertain.  ``fit`` prints the errors of families that were left out, then the multipliers.
Predict the trainings again first: ``trainings.py predict --again``.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy

sys.path.insert(0, str(Path(__file__).resolve().parent))

import trainings
from host_observations import everyday, families, is_bound, phases, steps

DEVIATION, VISITS, CASES = 0.09, 0.07, 0.08
"""Standard deviations of logarithms: of an observation of its own, of a visit of a machine, and of a training in it."""
PULL = 20.0
FREE = {"forward_pass": 0.5, "backward_pass": 0.5, "micro_step.trainer": 2.0, "parameter_step.pytorch": 3.0}
FREE |= {"graph.copy": 8.0}
"""Pulls of a cost's logarithm towards today's: of most, and of those that have been fitted for the first time here."""
TURNS, LARGEST_TURN = 40, 0.7
REST = "rest"


def fold_of(family: str, folds: int) -> int:
    """Return the fold of a family of models, which depends on its name alone."""
    return int(hashlib.sha256(family.encode()).hexdigest(), 16) % folds


def fit(observations: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the logarithms of the multipliers of today's costs."""
    names = sorted({key for one in observations for key in one["parts"]} - {REST})
    matrix = numpy.array([[one["parts"].get(key, 0.0) for key in names] for one in observations])
    rest = numpy.array([one["parts"].get(REST, 0.0) for one in observations])
    visits, cases = (
        _groups(observations, key) for key in (lambda one: one["visit"], lambda one: (one["visit"], one["name"]))
    )
    offsets = numpy.hstack([visits, cases])
    times = numpy.log([one["us"] / one["pace"] for one in observations])
    weights = numpy.sqrt([one["share"] for one in observations]) / DEVIATION
    pulls = numpy.array(
        [FREE.get(key, PULL) for key in names] + [VISITS**-2.0] * visits.shape[1] + [CASES**-2.0] * cases.shape[1]
    )
    found = numpy.zeros(len(pulls))
    for _ in range(TURNS):
        costs = matrix * numpy.exp(found[: len(names)])
        whole = costs.sum(1) + rest
        errors = numpy.log(whole) - times + offsets @ found[len(names) :]
        slopes = numpy.hstack([costs / whole[:, None], offsets])
        damped = weights / numpy.sqrt(numpy.maximum(1.0, abs(errors) * weights))
        rows = slopes * damped[:, None]
        turn = numpy.linalg.solve(rows.T @ rows + numpy.diag(pulls), rows.T @ (damped * errors) + pulls * found)
        found -= numpy.clip(turn, -LARGEST_TURN, LARGEST_TURN)
    return {key: float(value) for key, value in zip(names, found[: len(names)], strict=True)}


def _groups(observations: Sequence[Mapping[str, Any]], key: Any) -> Any:
    known = sorted({key(one) for one in observations})
    return numpy.array([[key(one) == group for group in known] for one in observations], float)


def error_of(one: Mapping[str, Any], logarithms: Mapping[str, float]) -> float:
    """Return the relative error of an observation with multiplied costs."""
    whole = sum(value * numpy.exp(logarithms.get(key, 0.0)) for key, value in one["parts"].items())
    return float(one["pace"] * whole / one["us"] - 1)


def report(title: str, observations: Sequence[Mapping[str, Any]], errors: Sequence[float]) -> None:
    """Print the errors by phase and GPU."""
    groups: dict[str, list[float]] = defaultdict(list)
    for one, error in zip(observations, errors, strict=True):
        for gpu in (one["gpu"], "all"):
            groups[f"{one['phase']} {gpu}"].append(error)
    for name, found in sorted(groups.items()):
        off = sorted(map(abs, found))
        print(
            f"{title:8} {name:20} {len(found):4} mean {median(found):+6.1%} off {median(off):5.1%}, "
            f"nine of ten {off[int(0.9 * len(off))]:5.1%}"
        )


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
        found = "".join(json.dumps(one) + "\n" for one in (*phases(), *families(), *everyday(), *steps()))
        options.out.write_bytes(gzip.compress(found.encode(), mtime=0))
        return 0
    every, folds = [one for one in trainings.lines(options.file) if is_bound(one)], options.folds
    report("today", every, [error_of(one, {}) for one in every])
    left_out = [fit([one for one in every if fold_of(one["family"], folds) != n]) for n in range(folds)]
    report("left out", every, [error_of(one, left_out[fold_of(one["family"], folds)]) for one in every])
    for name, value in fit(every).items():
        print(f"{name:40} x {numpy.exp(value):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
