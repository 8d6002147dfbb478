"""What the published errors may not exceed: ``limits.yaml``, by set and figure, shares of what was measured; a step's
time is a figure for each occasion on which it was measured.

``make accuracy`` fails where the median or the worst error of a set has grown beyond it.  Where errors shrink, or a
change is meant, ``report.py --accept`` writes the file anew; the message of that commit says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import yaml
from grid import HERE
from outcomes import SETS, Run
from tables import percent

LIMITS = HERE / "limits.yaml"
DIGITS = 6
"""Behind the point; figures are rounded up."""
HEAD = """\
# The errors that predictions may have: by set of rows and figure, median and worst, as shares of what was measured.
# `report.py --accept` writes this file from errors.json; `make accuracy` and the tests fail beyond it.
"""

REFUSED = "not predicted"
"""The figure, as it were, that counts the rows of a set which cannot be predicted: ``rows``."""

Limits = Mapping[str, Mapping[str, Mapping[str, float]]]


def of(run: Run) -> dict[str, dict[str, dict[str, float]]]:
    """The median and the worst error of each set and figure, rounded up; how many rows were refused, if any."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for kind in SETS:
        sizes: dict[str, list[float]] = {}
        for one in run.outcomes:
            if one.set == kind:
                for figure, error in one.errors().items():
                    if error is not None:
                        sizes.setdefault(figure, []).append(abs(error))
        for figure, known in sizes.items():
            found.setdefault(kind, {})[figure] = {"median": _up(median(known)), "worst": _up(max(known))}
        if refused := [one for one in run.outcomes if one.set == kind and not one.predicted]:
            found.setdefault(kind, {})[REFUSED] = {"rows": len(refused)}
    return found


def read(path: Path = LIMITS) -> Limits:
    """What was accepted."""
    found: Limits = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def write(run: Run, path: Path = LIMITS) -> None:
    """Accept the errors of a run."""
    path.write_text(HEAD + yaml.safe_dump(of(run), sort_keys=False), encoding="utf-8")


def violations(run: Run, limits: Limits) -> list[str]:
    """A line for each row that cannot be predicted, and for each figure beyond its limit or without one."""
    found = [
        f"{one.name} ({one.set}): not predicted: {one.problem}"
        for one in run.outcomes
        if not one.predicted and REFUSED not in limits.get(one.set, {})
    ]
    for kind, figures in of(run).items():
        for figure, values in figures.items():
            for name, value in values.items():
                limit = limits.get(kind, {}).get(figure, {}).get(name)
                if figure == REFUSED:
                    if limit is not None and value > limit:
                        found.append(f"{kind}: {value:.0f} rows cannot be predicted, and not {limit:.0f}")
                elif limit is None:
                    found.append(f"{kind}, {figure}: no limit for the {name} error")
                elif value > limit:
                    found.append(f"{kind}, {figure}: the {name} error is {percent(value)}, beyond {percent(limit)}")
    return found


def _up(share: float) -> float:
    return math.ceil(round(share * 10**DIGITS, 6)) / 10**DIGITS
