"""Limits of the published errors (``limits.yaml``): by set and figure, as shares of the measured value.

``make accuracy`` fails where the median or the worst error of a set exceeds its limit.  Where errors shrank or a change
is intended, ``report.py --accept`` rewrites the file; the commit message says why.
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
"""Decimals; figures are rounded up."""
HEAD = """\
# The errors that predictions may have: by set of rows and figure, median and worst, as shares of what was measured.
# `report.py --accept` writes this file from errors.json; `make accuracy` and the tests fail beyond it.
"""

REFUSED = "not predicted"
"""Key under which the rows of a set that cannot be predicted are counted (``rows``)."""

Limits = Mapping[str, Mapping[str, Mapping[str, float]]]


def of(run: Run) -> dict[str, dict[str, dict[str, float]]]:
    """Return the median and worst error of each set and figure, rounded up, and the number of refused rows."""
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
    """Read the accepted limits."""
    found: Limits = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def write(run: Run, path: Path = LIMITS) -> None:
    """Write the errors of a run as the new limits."""
    path.write_text(HEAD + yaml.safe_dump(of(run), sort_keys=False), encoding="utf-8")


def violations(run: Run, limits: Limits) -> list[str]:
    """Return a line for each row that cannot be predicted and each figure beyond its limit or without one."""
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
