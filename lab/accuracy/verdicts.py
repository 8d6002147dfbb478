"""Verdicts at the memory limit: predictions made beforehand and what happened, for GPUs of 8 to 80 GB."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcomes import RECORDS
from plan_walls import AGAIN, FIELDS, Planned
from tables import percent, table

NOTE = """\
For each training and GPU size, the largest batch predicted to fit was run, and the next two batch sizes. Smaller GPUs
were emulated by limiting PyTorch's allocator to the memory that such a GPU leaves after the context
(`torch.cuda.set_per_process_memory_fraction`); the allocator treats that limit like a full GPU. All predictions were
made before the runs ([walls-plan.json](../accuracy/records/walls-plan.json), and for three of the training
runs, those with convolutions,
[walls-plan-convolutions.json](../accuracy/records/walls-plan-convolutions.json))."""
SINCE = """\
Predicted again after these runs ([walls-again.json](../accuracy/records/walls-again.json)): """
CONVOLUTIONS = """\
Two rules changed in between: a convolution that finds no memory for its workspace uses another algorithm, as in
PyTorch's source (the first runs led to this rule, so they do not test it), and the rules for the workspaces."""


@dataclass(frozen=True, slots=True)
class Wall:
    """A planned run and its result: status, peaks in bytes, retries.

    ``again`` is a prediction made after the run, like ``Planned.predicted``, or None.
    """

    planned: Planned
    measured: Mapping[str, Any]
    again: Mapping[str, Any] | None = None

    @property
    def is_right(self) -> bool:
        """Return whether the run completed if, and only if, it was predicted to fit."""
        return bool((self.measured["status"] == "completed") == self.planned.predicted["fits"])

    @property
    def is_right_again(self) -> bool:
        """Return whether the later prediction is right."""
        completed: bool = self.measured["status"] == "completed"
        return self.again is not None and completed == bool(self.again["fits"])

    @property
    def both_completed(self) -> bool:
        """Return whether it was predicted to fit and completed."""
        return bool(self.planned.predicted["fits"]) and self.measured["status"] == "completed"

    @property
    def same_retries(self) -> bool:
        """Return whether the allocator emptied its cache as often as predicted."""
        return bool(self.measured["num_alloc_retries"] == self.planned.predicted["num_alloc_retries"])

    @property
    def same_reserved(self) -> bool:
        """Return whether the peak of reserved memory was predicted to the byte."""
        return bool(self.measured["peak_reserved_bytes"] == self.planned.predicted["reserved"])


def read(folder: Path = RECORDS) -> list[Wall]:
    """Read all runs at the memory limit."""
    path = folder / AGAIN.name
    again = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else {}
    found = []
    for path in sorted(folder.glob("walls-*.jsonl")):
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            measured = line.pop("measured")
            found.append(Wall(Planned(**{name: line[name] for name in FIELDS}), measured, again.get(line["name"])))
    return found


def by_size(walls: Sequence[Wall]) -> list[str]:
    """Tabulate verdicts, exact reserved memory and retries by GPU size, then describe later predictions."""
    sizes: dict[int, list[Wall]] = defaultdict(list)
    for wall in walls:
        sizes[wall.planned.size_gib].append(wall)
    rows = []
    for size in sorted(sizes):
        chosen = sizes[size]
        ran = [wall for wall in chosen if wall.both_completed]
        rows.append(
            (
                f"{size} GiB",
                len({wall.planned.row for wall in chosen}),
                len(chosen),
                sum(wall.measured["status"] == "out of memory" for wall in chosen),
                sum(wall.is_right for wall in chosen),
                sum(not wall.is_right and wall.planned.predicted["fits"] for wall in chosen),
                sum(not wall.is_right and not wall.planned.predicted["fits"] for wall in chosen),
                f"{sum(wall.same_reserved for wall in ran)} of {len(ran)}",
                f"{sum(wall.same_retries for wall in ran)} of {len(ran)}",
            )
        )
    heads = ("GPU", "training runs", "runs", "out of memory", "verdict right", "wrong: ran out", "wrong: fitted")
    return [*table((*heads, "reserved exact", "retries as predicted"), rows), *since(walls)]


def sentence(walls: Sequence[Wall]) -> str:
    """Summarise the runs in one sentence."""
    right = sum(wall.is_right for wall in walls)
    failed = sum(wall.measured["status"] == "out of memory" for wall in walls)
    sizes = sorted({wall.planned.size_gib for wall in walls})
    cards = ", ".join(map(str, sizes[:-1])) + f" and {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])
    return (
        f"Runs at the memory limit of GPUs with {cards} GiB: {len(walls)} runs at the largest batch that is predicted "
        f"to fit and just above it. {failed} of them ran out of memory; the verdict was right in {right}."
    )


def since(walls: Sequence[Wall]) -> list[str]:
    """Describe later predictions of the same runs, if there are any."""
    later = [wall for wall in walls if wall.again is not None]
    if not later:
        return []
    changed = [wall for wall in later if wall.again and wall.again["fits"] != wall.planned.predicted["fits"]]
    names = ", ".join(
        f"{wall.planned.row}, batch {wall.planned.batch}, {wall.planned.size_gib} GiB" for wall in changed
    )
    right = sum(wall.is_right_again for wall in later)
    text = f"{SINCE}right in {right} of {len(later)}."
    by_convolutions = any(wall.again and wall.again["without_workspace"] for wall in changed)
    text += f" Verdicts that changed: {names}." if changed else ""
    return ["", text + (f" {CONVOLUTIONS}" if by_convolutions else "")]


def details(walls: Sequence[Wall]) -> list[str]:
    """Tabulate every run: predicted headroom, result, retries."""
    rows = []
    for wall in walls:
        planned, measured = wall.planned, wall.measured
        room = planned.capacity_bytes - planned.predicted["reserved"]
        rows.append(
            (
                planned.row,
                f"{planned.size_gib} GiB",
                planned.batch,
                planned.predicted["verdict"],
                percent(room / planned.capacity_bytes, signed=True),
                measured["status"] + ("" if wall.is_right else " **(wrong)**"),
                f"{measured['num_alloc_retries']} ({planned.predicted['num_alloc_retries']})",
                _again(wall),
            )
        )
    heads = ("training", "GPU", "batch", "predicted", "headroom", "measured", "retries (predicted)", "predicted again")
    return table(heads, rows, 2)


def _again(wall: Wall) -> str:
    """Return verdict and retries of a later prediction if they differ from the first."""
    before, after = wall.planned.predicted, wall.again
    if after is None or all(after[key] == before[key] for key in ("fits", "num_alloc_retries")):
        return ""
    return f"{after['verdict']}, {after['num_alloc_retries']} retries"
