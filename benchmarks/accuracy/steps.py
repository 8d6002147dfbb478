"""How long a step took on a GPU, on which occasion, and what was predicted of it.

The same training took up to 1.7 times as long on another day on the same kind of machine, because its host was slower;
so a measured time goes with the occasion on which it was taken (``records/occasions.yaml``), and a training may have
several.  Rows that shared the card with others have no time of their own: what they took says nothing of the training.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from grid import HERE

if TYPE_CHECKING:
    from trainatomy.results.time import Time

RECORDS = HERE / "records"
AGAIN = (RECORDS / "steps-h200.jsonl", HERE.parent / "clock" / "records" / "h200-steps.jsonl")
"""Times of rows on other occasions than that of their record: ``occasion``, ``row``, ``tiny``, ``step_seconds``,
``gpu``."""
QUICKEST = "quickest"
"""Of the occasions on which a row was timed, the one on which it took least.  Other work on a host slows a training and
never quickens it, so this is nearest to what the training takes where it has its host to itself."""
APART = 0.1
"""Trainings whose steps differ by more than this share are told apart by their times."""
MANY = 10
"""Rows with several times that make a set one of which the quickest is worth a line."""
CLOSE = 0.15
"""An error within which a time serves to plan by."""

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """A row's time as ``api.predict`` gives it, and as measured, by occasion; seconds."""

    seconds: float
    interval_seconds: tuple[float, float]
    bound_by: str
    host_seconds: float
    gpu_seconds: float
    measured: Mapping[str, float]

    def error(self, occasion: str) -> float | None:
        """The relative error, positive where the prediction is too long."""
        measured = self.measured.get(occasion)
        return None if measured is None else self.seconds / measured - 1

    def holds(self, occasion: str) -> bool:
        """Whether the measured time lies within the predicted interval."""
        low, high = self.interval_seconds
        return low <= self.measured[occasion] <= high


def step_of(time: Time | None, line: Line) -> Step | None:
    """The prediction's time beside the line's; ``None`` where it has none."""
    if time is None:
        return None
    return Step(
        time.step_seconds, time.interval_seconds, time.bound_by, time.host_seconds, time.gpu_seconds, measured(line)
    )


def read_step(content: dict[str, Any]) -> Step:
    """A step that was kept as JSON."""
    low, high = content["interval_seconds"]
    return Step(**content | {"interval_seconds": (low, high)})


def measured(line: Line) -> dict[str, float]:
    """Seconds of a step by occasion: the record's own where the row had the card to itself, and those of others."""
    found: dict[str, float] = dict(line.get("steps_again", {}))
    if line["alone"] and line["status"] == "completed" and line["step_seconds"]:
        found[occasion_of(line)] = line["step_seconds"]
    if found and line.get("on_several_occasions"):
        found[QUICKEST] = min(found.values())
    return found


def occasion_of(line: Line) -> str:
    """When and where a line was measured: as it says itself, or by its date."""
    return str(line.get("occasion") or line["date"])


def with_other_occasions(
    lines: Iterable[Line], set_of: Callable[[Line], str], paths: Sequence[Path] = AGAIN
) -> list[Line]:
    """The lines, with the times that their rows took on other occasions on the same card (``steps_again``).  A set of
    which many rows have some is ``on_several_occasions``.

    One sample of 16 tokens (``tiny``) is another training, and no row.
    """
    again: dict[tuple[str, str], dict[str, float]] = {}
    for path in paths:
        for text in path.read_text(encoding="utf-8").splitlines():
            one = json.loads(text)
            if not one["tiny"]:
                again.setdefault((one["row"], one["gpu"]), {})[one["occasion"]] = one["step_seconds"]
    found = [(line, again.get((line["name"], line["gpu"]), {})) for line in lines]
    several = Counter(set_of(line) for line, times in found if len(times) + bool(line["alone"]) > 1)
    return [
        line
        | ({"steps_again": times} if times else {})
        | ({"on_several_occasions": True} if several[set_of(line)] >= MANY else {})
        for line, times in found
    ]


def occasions() -> dict[str, dict[str, str]]:
    """``records/occasions.yaml``: ``title``, ``how`` steps were timed, and what is known of the ``host``."""
    found: dict[str, dict[str, str]] = yaml.safe_load((RECORDS / "occasions.yaml").read_text(encoding="utf-8"))
    return found


def title(occasion: str) -> str:
    """How tables name an occasion."""
    if occasion == QUICKEST:
        return "each on its quickest"
    return occasions().get(occasion, {}).get("title", occasion)


def order(steps: Sequence[Step], occasion: str) -> tuple[int, int]:
    """Of the pairs whose measured times differ by more than ``APART``: how many are predicted in the right order, and
    how many there are."""
    right = pairs = 0
    times = [(step.measured[occasion], step.seconds) for step in steps]
    for (one, predicted_one), (other, predicted_other) in combinations(times, 2):
        if max(one, other) > (1 + APART) * min(one, other):
            pairs += 1
            right += predicted_one != predicted_other and (predicted_one < predicted_other) == (one < other)
    return right, pairs
