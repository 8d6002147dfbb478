"""What is measured: runs in order of importance, made from the plan that ``regret.py --predict`` wrote."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fit_cases import GIB, RECORDS, Cases

PLAN = RECORDS / "plan.json"
NEAR = 0.12
"""Relative distance of the predicted device memory from a limit within which a setting runs under that limit."""
CONTENDER = 0.75
"""Share of the best predicted throughput under some limit from which on a setting is measured early, and more steps."""
TOO_LARGE = 1 + NEAR
"""Settings that are predicted to need more than this times the largest limit are not measured."""
LONG_ACCUMULATION = 16
"""Micro-steps of a step from which on one step is warm-up enough and its time an average."""
START_SECONDS = 5.0
"""Estimated seconds in which a process starts and makes its model."""
PREDICTED_SHARE = 0.75
"""Predicted over measured step time that estimates assume: hosts are slower than the reference at times."""

Kind = Literal["grid", "chosen", "verdict", "automatic"]
Plan = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """A run.

    Attributes:
        kind: A point of the grid without a limit; the chosen settings, a point near the limit, or
            auto_find_batch_size, each under a limit.
        label: Short form of the settings.
        capacity_bytes: What the limit leaves PyTorch's allocator.
        steps: Warm-up steps, timed ones at least, timed ones at most.
        estimate: Predicted seconds of the run.
    """

    kind: Kind
    case: str
    label: str
    workload: Mapping[str, Any]
    limit_gib: int | None
    capacity_bytes: int | None
    steps: tuple[int, int, int]
    estimate: float

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells a task from others."""
        return self.kind, self.case, self.limit_gib, self.label


@dataclass(frozen=True, slots=True)
class Group:
    """Tasks of one process: ``alone`` on the GPU, or beside others with ``bytes`` of it."""

    tasks: tuple[Task, ...]
    alone: bool
    bytes: int

    @property
    def estimate(self) -> float:
        """Predicted seconds."""
        return START_SECONDS + sum(task.estimate for task in self.tasks)

    @property
    def name(self) -> str:
        """A name for its log."""
        first = self.tasks[0]
        label = "".join(letter if letter.isalnum() else "-" for letter in first.label)
        return f"{first.kind}-{first.case}-{first.limit_gib}-{label}"


def read_plan(path: Path = PLAN) -> Plan:
    """Read the plan."""
    plan: Plan = json.loads(path.read_text(encoding="utf-8"))
    return plan


def groups(plan: Plan, cases: Cases, done: Iterable[tuple[Any, ...]] = ()) -> list[Group]:
    """Return what is left to measure, the most important first.

    Settings that may be the best under some limit, without a limit; what the search chose, under each limit; the
    Trainer's auto_find_batch_size; settings near a limit, several at a time; the rest of the grid.
    """
    known = set(done)
    early, late = _grid(plan, cases)
    chosen, automatic, near = _chosen(plan), _automatic(plan, cases), _near(plan)
    return [
        *_by_process(early, known),
        *(_single(task) for task in chosen if task.key not in known),
        *(_single(task) for task in automatic if task.key not in known),
        *(_single(task, alone=False) for task in near if task.key not in known),
        *_by_process(late, known),
    ]


def _single(task: Task, *, alone: bool = True) -> Group:
    return Group((task,), alone, (task.limit_gib or 0) * GIB)


def _by_process(tasks: list[Task], known: set[tuple[Any, ...]]) -> list[Group]:
    """Group the settings of a case that differ only in batch and accumulation: their model stays the same."""
    found: dict[tuple[str, bool], list[Task]] = {}
    for task in tasks:
        if task.key not in known:
            found.setdefault((task.case, task.workload["train"]["gradient_checkpointing"]), []).append(task)
    return [Group(tuple(sorted(group, key=lambda task: task.estimate)), True, 0) for group in found.values()]


def _grid(plan: Plan, cases: Cases) -> tuple[list[Task], list[Task]]:
    """Return the points of the grid: those that may be the best under some limit, and the others."""
    early: list[Task] = []
    late: list[Task] = []
    most = max(cases.limits_gib) * GIB * TOO_LARGE
    for point in plan["points"]:
        if point["device_bytes"] > most:
            continue
        best = _is_contender(point, [one for one in plan["points"] if one["case"] == point["case"]])
        task = _task("grid", point, None, timed=2 if best or point["accumulation"] < LONG_ACCUMULATION else 1)
        (early if best else late).append(task)
    return early, late


def _is_contender(point: Mapping[str, Any], points: list[Mapping[str, Any]]) -> bool:
    """Return whether a point's predicted throughput comes near the best under a limit that it fits, or nearly fits."""
    for limit in point["limits"]:
        fitting = [one["samples_per_second"] for one in points if one["limits"][limit]["fits"]]
        near = point["device_bytes"] < (1 + NEAR) * int(limit) * GIB
        if near and point["samples_per_second"] >= CONTENDER * max(fitting, default=0):
            return True
    return False


def _chosen(plan: Plan) -> list[Task]:
    """Return the chosen settings; those that a smaller GPU was given already are not run again."""
    found: dict[tuple[str, str], Task] = {}
    for choice in sorted(plan["choices"], key=lambda one: int(one["limit_gib"])):
        if choice["workload"] is not None:
            found.setdefault((choice["case"], choice["label"]), _task("chosen", choice, choice["limit_gib"], timed=3))
    return list(found.values())


def _near(plan: Plan) -> list[Task]:
    """Return the points whose memory is near a limit, or that fit only because the allocator frees its cache."""
    chosen = {(task.case, task.limit_gib, task.label) for task in _chosen(plan)}
    found = []
    for point in plan["points"]:
        for limit, predicted in point["limits"].items():
            gib = int(limit)
            ratio = point["device_bytes"] / (gib * GIB)
            tested = abs(ratio - 1) < NEAR or (predicted["fits"] and ratio > 1)
            if tested and (point["case"], gib, point["label"]) not in chosen:
                found.append(_task("verdict", point, gib, timed=1, most=1))
    return sorted(found, key=lambda task: -(task.limit_gib or 0))


def _automatic(plan: Plan, cases: Cases) -> list[Task]:
    """Return the runs of auto_find_batch_size: from the whole effective batch on, without accumulation."""
    found = []
    for case in cases.cases:
        for limit in case.automatic:
            point = next(
                one for one in plan["points"] if one["case"] == case.name and one["accumulation"] == 1
                and not one["checkpointing"]
            )  # fmt: skip
            found.append(_task("automatic", point, limit, timed=3))
    return found


def _task(kind: Kind, entry: Mapping[str, Any], limit: int | None, *, timed: int, most: int = 10) -> Task:
    """Return the task of a point or of a choice."""
    train = entry["workload"]["train"]
    warm_up = 1 if train.get("gradient_accumulation_steps", 1) >= LONG_ACCUMULATION else 2
    seconds = entry["step_seconds"] / PREDICTED_SHARE
    estimate = seconds * (warm_up + timed) + 1.0 + (20.0 if kind == "automatic" else 0.0)
    capacity = entry["limits"][str(limit)]["capacity_bytes"] if limit and "limits" in entry else None
    return Task(
        kind,
        entry["case"],
        entry["label"],
        entry["workload"],
        limit,
        entry.get("capacity_bytes", capacity),
        (warm_up, timed, max(most, timed)),
        estimate,
    )
