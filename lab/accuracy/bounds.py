"""Errors of the GPU's own time and of whole steps apart, by what bounds the step.

The GPU's time depends on the cost model alone.  A whole step that the CPU bounds also depends on how fast that CPU was
while the step was measured; rows whose measurement recorded the host's pace are compared at that pace too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

import busy
from outcomes import SETS, Run
from tables import percentile, table

if TYPE_CHECKING:
    from step_tables import Timed

NOTE = """\
The GPU's own time is that of its kernels in one profiled step. Whole steps are those of the fastest session of each
row where there are several. *At the recorded pace*: the measurement recorded how fast the CPU was meanwhile, and the
prediction is for a CPU of that pace."""
HEADS = ("rows", "median", "p90", "worst")


def section(run: Run, found: Mapping[tuple[str, str], Sequence[Timed]]) -> list[str]:
    """Return the section of the page, from the rows of each set and session (``step_tables.timed``)."""
    first: dict[str, Sequence[Timed]] = {}
    for (kind, _), members in found.items():
        first.setdefault(kind, members)
    rows = []
    for kind, title in SETS.items():
        profiled = [one.error for one in busy.busy(run)] if kind == "tuning" else []
        rows += [(title, what, *_cells(errors)) for what, errors in _by_what(first.get(kind, ()), profiled) if errors]
    return ["### The GPU's own time, and whole steps", "", NOTE, "", *table(("", "", *HEADS), rows, 2), ""]


def _by_what(members: Sequence[Timed], profiled: Sequence[float]) -> list[tuple[str, Sequence[float]]]:
    """Return the relative errors by what is compared."""
    hosts = [one for one in members if one.step.bound_by == "host"]
    others = [one.error for one in members if one.step.bound_by != "host"]
    paced = [error for one in hosts if (error := one.step.error_at_pace()) is not None]
    return [
        ("the GPU's own time", profiled),
        ("GPU-bound steps", others),
        ("CPU-bound steps", [one.error for one in hosts]),
        ("CPU-bound steps, at the recorded pace", paced),
    ]


def _cells(errors: Sequence[float]) -> list[str]:
    sizes = [abs(error) for error in errors]
    return [str(len(sizes)), *(f"{100 * size:.1f} %" for size in (median(sizes), percentile(sizes, 0.9), max(sizes)))]
