"""GPU time of a step and what bounds the step: PyTorch's profiler compared with the prediction.

A profiled step gives the duration of its kernels; a GPU that is never idle also spends the gaps between them. If both
together fill the step, it is GPU-bound; if the GPU is idle for much of it, it is CPU-bound.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from grid import HERE
from outcomes import Run
from tables import percentile, table

from trainatomy.catalog.calibrations import shipped
from trainatomy.timing.cost_model import gap_seconds

RECORDS = HERE.parent / "timing" / "records" / "h200-kernels.jsonl"
"""A line per profiled step: ``row``, ``tiny``, ``kernels``, ``kernel_seconds``, ``step_seconds`` (without profiler)."""
MOSTLY, HARDLY = 0.85, 0.70
"""Shares of the step in which the GPU is busy: GPU-bound from the first on, CPU-bound up to the second."""
NOTE = """\
Kernels of one step and the gaps between them, measured with PyTorch's profiler, compared with `Time.gpu_seconds`. The
share of the step that they fill shows what bounded the step, compared with `Time.bound_by`."""


@dataclass(frozen=True, slots=True)
class Busy:
    """Seconds of GPU time of a row, measured and predicted, its step time, and its predicted bound."""

    name: str
    measured: float
    predicted: float
    step: float
    bound_by: str

    @property
    def error(self) -> float:
        """Relative error, positive if the prediction is too long."""
        return self.predicted / self.measured - 1

    @property
    def share(self) -> float:
        """Share of the step in which the GPU was busy."""
        return self.measured / self.step


def busy(run: Run, path: Path = RECORDS) -> list[Busy]:
    """Return the rows of a run that were profiled."""
    gap = gap_seconds(shipped()["h200"])
    known = {
        one["row"]: one
        for text in path.read_text(encoding="utf-8").splitlines()
        if not (one := json.loads(text))["tiny"]
    }
    found = []
    for one in run.outcomes:
        if one.set == "tuning" and one.step is not None and (line := known.get(one.name)):
            worked = line["kernel_seconds"] + line["kernels"] * gap
            found.append(Busy(one.name, worked, one.step.gpu_seconds, line["step_seconds"], one.step.bound_by))
    return found


def section(run: Run) -> list[str]:
    """Return the section of the page about GPU time, or nothing if no row was profiled."""
    found = busy(run)
    if not found:
        return []
    sizes = [abs(one.error) for one in found]
    summary = (
        f"GPU time of {len(found)} tuning rows: median error {100 * median(sizes):.1f} %, 90th percentile "
        f"{100 * percentile(sizes, 0.9):.1f} %, worst {100 * max(sizes):.1f} %."
    )
    return ["### GPU time, and what bounds a step", "", NOTE, "", summary, "", *_bounds(found), ""]


def _bounds(found: Sequence[Busy]) -> list[str]:
    """Tabulate predicted bounds by the share of the step in which the GPU was busy."""
    kinds = {
        f"up to {HARDLY:.0%}": [one for one in found if one.share <= HARDLY],
        "between": [one for one in found if HARDLY < one.share < MOSTLY],
        f"{MOSTLY:.0%} and more": [one for one in found if one.share >= MOSTLY],
    }
    rows = []
    for title, members in kinds.items():
        hosts = sum(one.bound_by == "host" for one in members)
        rows.append((title, len(members), hosts, len(members) - hosts))
    return table(("GPU busy", "rows", "predicted CPU-bound", "predicted GPU-bound"), rows)
