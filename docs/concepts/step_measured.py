"""What GPUs said of the clock, beside what it says: tables of docs/time.md from records and fresh predictions."""

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
from trainatomy.timing.cost_model import cost_model_from, kernel_cost, point_microseconds

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks" / "clock"
LEAST_MICROSECONDS = 10.0
"""Shorter operations are mostly the start of a kernel."""
FROM, TO = "h200", "h100-sxm"


class Carried(NamedTuple):
    """How well one card's calibration tells what another measured: operations, and the error of their times."""

    operations: int
    median: float
    ninth: float


@cache
def record(name: str) -> dict[str, Any]:
    """What ``benchmarks/clock/records`` has of this name."""
    found: dict[str, Any] = json.loads((BENCHMARKS / "records" / f"{name}.json").read_text(encoding="utf-8"))
    return found


def layer_shares() -> tuple[dict[str, float], float]:
    """The encoder layer on a GPU: shares of its time by group, and microseconds of the whole."""
    step = record("h200-encoder-layer")["microseconds"]["step"]
    names = {"contraction": "contractions", "normalisation": "normalisations", "elementwise": "element-wise"}
    return {group: step[name] / step["all"] for group, name in names.items()}, step["all"]


@cache
def padding_table() -> str:
    """What padding saves of the GPU's time, by prediction and as measured."""
    sys.path.insert(0, str(BENCHMARKS))
    import padding

    known = record("h200-padding")["cases"]
    rows = []
    for case in padding.cases("h200"):
        saved = padding.compared(case, padding.predicted)["saves"]["gpu"]
        rows.append((case.why, f"{100 * saved:+.1f} %", f"{100 * known[case.name]['measured']['saves']['gpu']:+.1f} %"))
    return table(("before", "predicted", "measured"), rows, 1)


def carried() -> Carried:
    """The calibration of one card, extrapolated to another, beside that one's own."""
    there = find_gpu(TO)
    cost_models = {tf32: cost_model_from(there, shipped()[FROM], tf32=tf32) for tf32 in (False, True)}
    off = sorted(
        abs(kernel_cost(point.call, cost_models[point.tf32]).seconds / (point_microseconds(point) * 1e-6) - 1)
        for point in shipped()[TO].points
        if point.hot > LEAST_MICROSECONDS
    )
    return Carried(len(off), median(off), off[int(0.9 * len(off))])
