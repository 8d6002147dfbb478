"""Predicted verdicts and what happened at the memory limit, for GPUs of 8 to 80 GB."""

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
Each row is a training whose batch was raised until a card of that size is predicted to be full; that batch and the next
two were then run. A card was stood in for by granting PyTorch's allocator what the card leaves after the context, and
not a byte more (`torch.cuda.set_per_process_memory_fraction`): the allocator met its bound as it meets a full card. All
was predicted before ([walls-plan.json](../benchmarks/accuracy/records/walls-plan.json) and, for three trainings with
convolutions, [walls-plan-convolutions.json](../benchmarks/accuracy/records/walls-plan-convolutions.json))."""
SINCE = """\
Predicted again after these runs were seen ([walls-again.json](../benchmarks/accuracy/records/walls-again.json)): """
CONVOLUTIONS = """\
What changed are the rule that a convolution which finds no memory for its workspace takes another plan, as in PyTorch's
sources, for which the first runs made us look, so that they do not test it; and those of the workspaces themselves."""


@dataclass(frozen=True, slots=True)
class Wall:
    """A planned run and its outcome: status, peaks in bytes, retries.

    ``again``: the prediction made after it was measured, as ``Planned.predicted``; None where there is none.
    """

    planned: Planned
    measured: Mapping[str, Any]
    again: Mapping[str, Any] | None = None

    @property
    def is_right(self) -> bool:
        """Return whether it ran exactly where it was predicted to fit."""
        return bool((self.measured["status"] == "completed") == self.planned.predicted["fits"])

    @property
    def is_right_again(self) -> bool:
        """Return whether the later prediction is right."""
        completed: bool = self.measured["status"] == "completed"
        return self.again is not None and completed == bool(self.again["fits"])

    @property
    def both_completed(self) -> bool:
        """Return whether it fits, both predicted and measured."""
        return bool(self.planned.predicted["fits"]) and self.measured["status"] == "completed"

    @property
    def same_retries(self) -> bool:
        """Return whether the allocator returned its cache as often as predicted."""
        return bool(self.measured["num_alloc_retries"] == self.planned.predicted["num_alloc_retries"])

    @property
    def same_reserved(self) -> bool:
        """Return whether the peak of reserved memory is as predicted, to the byte."""
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
    """Tabulate for each size: trainings, runs, right verdicts, then the same for later predictions.

    Of the runs that fit, the table counts those with the predicted retries and reserved memory.
    """
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
    heads = ("card", "trainings", "runs", "out of memory", "verdict right", "wrong: ran out", "wrong: ran")
    return [*table((*heads, "reserved exact", "retries as predicted"), rows), *since(walls)]


def sentence(walls: Sequence[Wall]) -> str:
    """Summarise the verdicts in one sentence."""
    right = sum(wall.is_right for wall in walls)
    failed = sum(wall.measured["status"] == "out of memory" for wall in walls)
    sizes = sorted({wall.planned.size_gib for wall in walls})
    cards = ", ".join(map(str, sizes[:-1])) + f" and {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])
    return (
        f"Run into the wall on purpose, for cards of {cards} GiB: {len(walls)} runs at the largest batch that is "
        f"predicted to fit and just beyond, {failed} of them went out of memory; the verdict was right in {right}."
    )


def since(walls: Sequence[Wall]) -> list[str]:
    """Summarise later predictions of the same runs in a paragraph; empty where there are none."""
    later = [wall for wall in walls if wall.again is not None]
    if not later:
        return []
    changed = [wall for wall in later if wall.again and wall.again["fits"] != wall.planned.predicted["fits"]]
    names = ", ".join(
        f"{wall.planned.row} with {wall.planned.batch} on {wall.planned.size_gib} GiB" for wall in changed
    )
    right = sum(wall.is_right_again for wall in later)
    told = f"{SINCE}right in {right} of {len(later)}."
    by_convolutions = any(wall.again and wall.again["without_workspace"] for wall in changed)
    told += f" Another verdict than before: {names}." if changed else ""
    return ["", told + (f" {CONVOLUTIONS}" if by_convolutions else "")]


def details(walls: Sequence[Wall]) -> list[str]:
    """Tabulate every run: predicted headroom, outcome, retries."""
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
                measured["status"] + ("" if wall.is_right else " **(not as predicted)**"),
                f"{measured['num_alloc_retries']} ({planned.predicted['num_alloc_retries']})",
                _again(wall),
            )
        )
    heads = ("training", "card", "batch", "predicted", "room", "happened", "retries (predicted)", "predicted again")
    return table(heads, rows, 2)


def _again(wall: Wall) -> str:
    """Describe how a later prediction differs: verdict and retries."""
    before, after = wall.planned.predicted, wall.again
    if after is None or all(after[key] == before[key] for key in ("fits", "num_alloc_retries")):
        return ""
    return f"{after['verdict']}, {after['num_alloc_retries']} retries"
