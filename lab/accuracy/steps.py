"""Measured and predicted step times, by measurement session.

The same training took up to 1.7 times as long on another day on the same kind of machine, because its CPU was slower;
so a measured time belongs to the session in which it was taken (``records/occasions.yaml``), and a training may have
several.  Rows that shared the GPU with others have no time of their own.
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

from trainatomy.results.measurement import HostPace

if TYPE_CHECKING:
    from trainatomy.results.time import Time

RECORDS = HERE / "records"
AGAIN = (RECORDS / "steps-h200.jsonl", HERE.parent / "timing" / "records" / "h200-steps.jsonl")
"""Times of rows in other sessions: ``occasion``, ``row``, ``tiny``, ``step_seconds``, ``gpu``."""
QUICKEST = "quickest"
"""Key of the quickest of a row's sessions.  Other work only ever slows a training, so this is closest to its time on an
otherwise idle machine.
"""
APART = 0.1
"""Relative difference from which two step times count as different."""
MANY = 10
"""Number of rows with several times from which the quickest session gets a line of its own."""
CLOSE = 0.15
"""Error that is small enough for planning."""

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """Predicted time of a row as ``api.predict`` gives it, and measured times by session; seconds.

    ``pace`` is the pace of the host that the row's own measurement recorded, ``paced_seconds`` the prediction at it,
    and ``paced_occasion`` the session of that measurement.
    """

    seconds: float
    interval_seconds: tuple[float, float]
    bound_by: str
    host_seconds: float
    gpu_seconds: float
    measured: Mapping[str, float]
    pace: float | None = None
    paced_seconds: float | None = None
    paced_occasion: str = ""

    def error_at_pace(self) -> float | None:
        """Return the relative error at the recorded pace; ``None`` where none was recorded."""
        measured = self.measured.get(self.paced_occasion)
        return None if self.paced_seconds is None or measured is None else self.paced_seconds / measured - 1

    def error(self, occasion: str) -> float | None:
        """Return the relative error; positive where the prediction is too long."""
        measured = self.measured.get(occasion)
        return None if measured is None else self.seconds / measured - 1

    def holds(self, occasion: str) -> bool:
        """Return whether the measured time lies within the predicted interval."""
        low, high = self.interval_seconds
        return low <= self.measured[occasion] <= high


def step_of(time: Time | None, line: Line) -> Step | None:
    """Combine the predicted time with the line's; ``None`` where it has none."""
    if time is None:
        return None
    pace = None if line.get("host_pace") is None else time.pace_of(_host_pace(line["host_pace"]))
    at_pace = None if pace is None else time.step_seconds_at(pace)
    return Step(
        time.step_seconds,
        time.interval_seconds,
        time.bound_by,
        time.host_seconds,
        time.gpu_seconds,
        measured(line),
        pace,
        at_pace,
        occasion_of(line) if at_pace is not None else "",
    )


def _host_pace(content: Mapping[str, Any]) -> HostPace:
    """Read a pace from its JSON form, whose tuples are lists."""
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in content.items()
    }
    return HostPace(**fields)


def read_step(content: dict[str, Any]) -> Step:
    """Read a step from its JSON form."""
    low, high = content["interval_seconds"]
    return Step(**content | {"interval_seconds": (low, high)})


def measured(line: Line) -> dict[str, float]:
    """Return the seconds of a step by session: the record's own where the row had the GPU to itself, and others."""
    found: dict[str, float] = dict(line.get("steps_again", {}))
    if line["alone"] and line["status"] == "completed" and line["step_seconds"]:
        found[occasion_of(line)] = line["step_seconds"]
    if found and line.get("on_several_occasions"):
        found[QUICKEST] = min(found.values())
    return found


def occasion_of(line: Line) -> str:
    """Return the session of a line: as it says itself, or by its date."""
    return str(line.get("occasion") or line["date"])


def with_other_occasions(
    lines: Iterable[Line], set_of: Callable[[Line], str], paths: Sequence[Path] = AGAIN
) -> list[Line]:
    """Add to the lines the times of their rows in other sessions on the same GPU (``steps_again``).

    A set of which many rows have some is ``on_several_occasions``.  Runs of one sample of 16 tokens (``tiny``) are
    other training runs, and not rows.
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
    """Return ``records/occasions.yaml``: ``title``, ``how`` steps were timed, and what is known of the ``host``."""
    found: dict[str, dict[str, str]] = yaml.safe_load((RECORDS / "occasions.yaml").read_text(encoding="utf-8"))
    return found


def title(occasion: str) -> str:
    """Return the name of a measurement session in tables."""
    if occasion == QUICKEST:
        return "fastest session of each row"
    return occasions().get(occasion, {}).get("title", occasion)


def order(steps: Sequence[Step], occasion: str) -> tuple[int, int]:
    """Count pairs whose measured times differ by more than ``APART``: predicted in the right order, and all."""
    right = pairs = 0
    times = [(step.measured[occasion], step.seconds) for step in steps]
    for (one, predicted_one), (other, predicted_other) in combinations(times, 2):
        if max(one, other) > (1 + APART) * min(one, other):
            pairs += 1
            right += predicted_one != predicted_other and (predicted_one < predicted_other) == (one < other)
    return right, pairs
