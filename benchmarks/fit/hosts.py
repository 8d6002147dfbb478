"""Replay the records with rules of choice that allow for a slower host: ``python benchmarks/fit/hosts.py``.

The shipped calibration describes a quiet CPU; a step that the CPU bounds takes 0.85 to 1.75 times as long on the hosts
that were measured (``catalog/intervals.yaml``).  A rule chooses from the predicted points of the grids that leave the
headroom, and its choice is compared with the fastest of them as measured.  Nothing is executed.

- ``fastest``: the shortest predicted step, which is what the search uses.
- ``typical host``: the shortest step on a host in the middle of the interval.
- ``both ends``: the shortest geometric mean of the steps on the fastest and on the slowest host of the interval.
- ``least regret``: the smallest loss against the best point for the same host, on the worst host of the interval.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fit_cases import GIB

from trainatomy.catalog.files import read_yaml

RECORDS = Path(__file__).parent / "records"
SLOW = 0.97
"""Choices below this share of the fastest point are listed."""
Point = Mapping[str, Any]
Rule = Callable[[Sequence[Point]], Point]


def seconds(point: Point, pace: float) -> float:
    """Return the predicted step on a host that takes ``pace`` times as long, with the overlap of the prediction."""
    longer = max(point["gpu_seconds"], point["host_seconds"])
    found: float = point["step_seconds"] * max(point["gpu_seconds"], point["host_seconds"] * pace) / longer
    return found


def rules() -> dict[str, Rule]:
    """Return the rules by name."""
    low, high = read_yaml("intervals.yaml")["calibrated"]["host"]
    middle = math.sqrt(low * high)

    def least_regret(points: Sequence[Point]) -> Point:
        best = {pace: min(seconds(point, pace) for point in points) for pace in (low, middle, high)}
        return min(points, key=lambda point: max(seconds(point, pace) / best[pace] for pace in best))

    return {
        "fastest": lambda points: min(points, key=lambda point: seconds(point, 1.0)),
        "typical host": lambda points: min(points, key=lambda point: seconds(point, middle)),
        "both ends": lambda points: min(points, key=lambda point: seconds(point, low) * seconds(point, high)),
        "least regret": least_regret,
    }


def measured(name: str) -> dict[tuple[str, str], float]:
    """Return the samples/s of the points of the grids in a file of records."""
    lines = map(json.loads, (RECORDS / name).read_text(encoding="utf-8").splitlines())
    grid = (line for line in lines if line["kind"] == "grid" and line.get("samples_per_second"))
    return {(line["case"], line["label"]): line["samples_per_second"] for line in grid}


def shares(
    plan: Mapping[str, Any], speeds: Mapping[tuple[str, str], float], rule: Rule
) -> Iterator[tuple[str, int, str, float]]:
    """Yield training, GiB, choice, and its measured share of the fastest point, for every training and limit."""
    for case in sorted({point["case"] for point in plan["points"]}):
        known = [point for point in plan["points"] if point["case"] == case and (case, point["label"]) in speeds]
        for gib in sorted(map(int, known[0]["limits"])):
            fitting = [point for point in known if point["device_bytes"] <= (1 - plan["headroom"]) * gib * GIB]
            if fitting:
                chosen = rule(fitting)["label"]
                fastest = max(speeds[case, point["label"]] for point in fitting)
                yield case, gib, chosen, speeds[case, chosen] / fastest


def main() -> None:
    """Print a summary of each rule, and its slow choices."""
    first = measured("h200.jsonl")
    sessions = {"first session": first, "contenders measured again": {**first, **measured("h200-again.jsonl")}}
    for file in ("plan.json", "plan-calibrated.json"):
        plan = json.loads((RECORDS / file).read_text(encoding="utf-8"))
        for session, speeds in sessions.items():
            print(f"\n{file}, {session}")
            for name, rule in rules().items():
                found = list(shares(plan, speeds, rule))
                slow = [f"{case} {gib}: {label} {share:.1%}" for case, gib, label, share in found if share < SLOW]
                mean, worst = statistics.mean(each[-1] for each in found), min(each[-1] for each in found)
                print(f"  {name:13} mean {mean:.1%}, worst {worst:.1%}, {len(slow)} of {len(found)} below {SLOW:.0%}")
                print("".join(f"      {line}\n" for line in slow), end="")


if __name__ == "__main__":
    main()
