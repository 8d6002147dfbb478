"""Measured times beside predicted ones, for docs/time.md."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from concepts.page import table
from trainatomy.catalog.calibrations import shipped
from trainatomy.catalog.gpus import find_gpu
from trainatomy.timing.cost_model import cost_model_from, kernel_cost
from trainatomy.timing.efficiency import point_microseconds

LAB = Path(__file__).resolve().parents[2] / "lab" / "timing"
LEAST_MICROSECONDS = 10.0
"""Minimum duration of an operation to compare: shorter ones are mostly launch overhead."""
SMALL = 0.05
"""Savings that the table leaves out, as a share."""
FROM, TO = "h200", "h100-sxm"


class Extrapolation(NamedTuple):
    """Errors of kernel times when one GPU's calibration is extrapolated to another: median and 90th percentile."""

    operations: int
    median: float
    percentile_90: float


@cache
def record(name: str) -> dict[str, Any]:
    """Read a file of ``lab/timing/records``."""
    found: dict[str, Any] = json.loads((LAB / "records" / f"{name}.json").read_text(encoding="utf-8"))
    return found


@cache
def padding_table() -> str:
    """Tabulate how much GPU time padding saves, predicted and measured."""
    sys.path.insert(0, str(LAB))
    import padding

    known = record("h200-padding")["cases"]
    rows = []
    for case in padding.cases("h200"):
        measured = known[case.name]["measured"]["saves"]["gpu"]
        if abs(measured) < SMALL:
            continue
        saved = padding.compared(case, padding.predicted)["saves"]["gpu"]
        rows.append((case.why, f"{100 * saved:+.1f} %", f"{100 * measured:+.1f} %"))
    return table(("before padding", "predicted", "measured"), rows, 1)


def extrapolation() -> Extrapolation:
    """Compare one GPU's calibration, extrapolated to another GPU, with what was measured there."""
    there = find_gpu(TO)
    cost_models = {tf32: cost_model_from(there, shipped()[FROM], tf32=tf32) for tf32 in (False, True)}
    off = sorted(
        abs(kernel_cost(point.call, cost_models[point.tf32]).seconds / (point_microseconds(point) * 1e-6) - 1)
        for point in shipped()[TO].points
        if point.hot > LEAST_MICROSECONDS
    )
    return Extrapolation(len(off), median(off), off[int(0.9 * len(off))])
