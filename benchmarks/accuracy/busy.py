"""Busy time of the GPU in a step, measured with PyTorch's profiler, beside the predicted time and bound.

The profiler gives the time of the kernels; a GPU that is never idle also spends the gaps between them.  Where both
fill the step, the step is GPU-bound; where the GPU is idle for much of it, it is CPU-bound.
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

RECORDS = HERE.parent / "clock" / "records" / "h200-kernels.jsonl"
"""A line per profiled step: ``row``, ``tiny``, ``kernels``, ``kernel_seconds``, ``step_seconds`` (without profiler)."""
MOSTLY, HARDLY = 0.85, 0.70
"""Busy shares of a step: from the first on it is GPU-bound, up to the second CPU-bound."""
NOTE = """\
Kernels of one step, by PyTorch's profiler, and the gaps between them, beside `Time.gpu_seconds`; the share of the step
that they fill says what bounded it, beside `Time.bound_by`."""


@dataclass(frozen=True, slots=True)
class Busy:
    """GPU time of a row in seconds, measured and predicted, its step time, and the predicted bound."""

    name: str
    measured: float
    predicted: float
    step: float
    bound_by: str

    @property
    def error(self) -> float:
        """Relative error; positive where the prediction is too long."""
        return self.predicted / self.measured - 1

    @property
    def share(self) -> float:
        """Share of the step in which the GPU was busy."""
        return self.measured / self.step


def busy(run: Run, path: Path = RECORDS) -> list[Busy]:
    """Return the profiled rows of a run."""
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
    """Return the page's section about GPU time; empty where no row was profiled."""
    found = busy(run)
    if not found:
        return []
    sizes = [abs(one.error) for one in found]
    said = (
        f"The GPU's time of {len(found)} tuning rows is {100 * median(sizes):.1f} % off in the median, "
        f"{100 * percentile(sizes, 0.9):.1f} % or less in nine of ten, {100 * max(sizes):.1f} % at worst."
    )
    return ["### What the GPU did of it, and what bounds a step", "", NOTE, "", said, "", *_bounds(found), ""]


def _bounds(found: Sequence[Busy]) -> list[str]:
    """Tabulate the predicted bound by the share of the step in which the GPU was busy."""
    kinds = {
        f"up to {HARDLY:.0%}": [one for one in found if one.share <= HARDLY],
        "between": [one for one in found if HARDLY < one.share < MOSTLY],
        f"{MOSTLY:.0%} and more": [one for one in found if one.share >= MOSTLY],
    }
    rows = []
    for title, members in kinds.items():
        hosts = sum(one.bound_by == "host" for one in members)
        rows.append((title, len(members), hosts, len(members) - hosts))
    return table(("share of the step in which the GPU worked", "rows", "said: host", "said: GPU"), rows)
