"""Add calls that were measured inside trainings to a calibration.

``python benchmarks/timing/training_points.py CALIBRATION FILE.jsonl... [--fit-only]`` takes what ``training_calls.py``
measured, or ``network_convolutions.py``.  Nearly all calls of a training say what another has said, so only these
become points:

- calls that take at least a share of their step (``LEAST_SHARE``), those that differ in an index alone taken together;
- of these, calls that differ from each earlier point of their family in size or in efficiency (``NEAR``, ``ALIKE``),
  and from what all earlier ones together say of them (``EXPECTED``);
- no addition by an index whose places occur so often that its time depends on how often each does (``MOST_AGAIN``);
- no matrix product of a kind that has no points: the sizes of its parent family say more than few of its own;
- matrix products and convolutions that contradict the points around them, unless another training confirms them, and
  those that a library's fall-back ran become local points: cuDNN and cuBLAS run another kernel for few shapes.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from math import log, sqrt
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE))

import drawn_kernels  # noqa: E402
import trainings  # noqa: E402

from trainatomy.catalog.calibrations import Calibration, Point, load  # noqa: E402
from trainatomy.catalog.calls import from_text, has_host_memory, to_text  # noqa: E402
from trainatomy.measurement.calibration.calibrate import write  # noqa: E402
from trainatomy.operators.cost.kernel import Chip  # noqa: E402
from trainatomy.timing.cost_model import cost_model_of, kernel_cost  # noqa: E402
from trainatomy.timing.efficiency import PRODUCTS, EfficiencyPoint, FamilyPoints, price_point  # noqa: E402

LEAST_SHARE = 0.005
"""Least share of a step's time that a call takes."""
NEAR, ALIKE = 0.25, 0.07
"""Distance in doublings of size, and difference of log efficiencies, below which a call says nothing new."""
EXPECTED, FEWEST = 0.05, 3
"""Difference of log efficiencies below which the points of a family, if it has so many, say what a call says."""
SURPRISING, CONFIRMED, AROUND = 0.5, 0.25, 1.5
"""A log ratio to today's price that asks for another call, how near that must be in log efficiency, and in size."""
MOST_AGAIN = 100
"""Indices for each place of a tensor from which on the time of adding values by them depends on their values."""
CHOOSING = ("apart", "convolution", "grouped", "matmul")
"""Beginnings of families whose library chooses among kernels."""
_LOCAL = {"local": True}
"""What an entry says of a point that counts for sizes near its own only (``catalog.calibrations.Point``)."""
_PLACE = re.compile(r";(index|start|end)=-?\d+")


class Measured(NamedTuple):
    """A call of a training as a point: the training, the entry of the calibration, and what it says of its family."""

    training: str
    entry: dict[str, Any]
    point: Point
    family: str
    says: EfficiencyPoint


def main() -> int:
    """Add the calls of files to a calibration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--fit-only", action="store_true", help="leave out the trainings that are held out")
    options = parser.parse_args()
    calibration = load(options.calibration)
    lines = [_as_of_training(line) for path in options.files for line in trainings.lines(path)]
    if options.fit_only:
        lines = [line for line in lines if line.get("split") != drawn_kernels.HELD_OUT]
    found = new_points(calibration, lines)
    content = dict(calibration.content)
    kernels = content["sections"]["kernels"]
    kernels["points"] += [one.entry for one in found]
    environment: dict[str, Any] = next((line["environment"] for line in lines if "environment" in line), {})
    kernels["added"] = [*kernels.get("added", []), {"points": len(found), "environment": environment}]
    write(content, options.calibration)
    print(f"{len(found)} points of {len(lines)} calls added")
    return 0


def _as_of_training(line: dict[str, Any]) -> dict[str, Any]:
    """Return a call that was measured by itself as the only one of a training, at its time in a step."""
    if "call" not in line or "training" in line:
        return line
    us = round(sqrt(line["us"] * line.get("cold_us", line["us"])), 2)  # as ``point_microseconds`` has it
    return line | {"training": line["call"], "runs": 1, "us": us}


def new_points(calibration: Calibration, lines: list[dict[str, Any]]) -> list[Measured]:
    """Return the calls that say something new, in the order of the lines."""
    chip = cost_model_of(calibration.known_gpu).chip
    known = defaultdict(list)
    for point in calibration.points:
        if (priced := price_point(0, point, chip)) is not None:
            known[priced.family].append(priced.point)
    measured = _measured(calibration, chip, _large_calls(lines))
    surprising = _surprising(calibration, measured, known)
    found = []
    for place, one in enumerate(measured):
        if place in surprising:
            one = one._replace(entry=one.entry | _LOCAL, says=one.says._replace(local=True))
        is_of_new_kind = one.family.startswith(PRODUCTS) and not known[one.family]
        points = known[one.family]
        if is_of_new_kind or any(_is_like(one.says, other) for other in points) or _is_expected(one.says, points):
            continue
        points.append(one.says)
        found.append(one)
    return found


def _large_calls(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of calls of a sufficient share of their step, one of those that differ in an index alone."""
    steps: dict[str, float] = defaultdict(float)
    shares: dict[tuple[str, str], float] = defaultdict(float)
    own = [line for line in lines if "call" in line and not has_host_memory(line["call"])]
    for line in own:
        seconds = line["us"] * line["runs"]
        steps[line["training"]] += seconds
        shares[line["training"], _PLACE.sub("", line["call"])] += seconds
    found, seen = [], set()
    for line in own:
        training, kind = line["training"], _PLACE.sub("", line["call"])
        is_composed = "bitsandbytes::" in line["call"] and line["kernels"] > 1  # a simulation records its parts
        if shares[training, kind] < LEAST_SHARE * steps[training] or "_cudnn_rnn" in line["call"] or is_composed:
            continue
        if kind == line["call"] or (kind, line.get("tf32")) not in seen:
            found.append(line)
        seen.add((kind, line.get("tf32")))
    return found


def _measured(calibration: Calibration, chip: Chip, lines: list[dict[str, Any]]) -> list[Measured]:
    """Return the points of calls that the calibration lacks; those that a library's fall-back ran are local."""
    known = {(drawn_kernels.without_step(point.text), point.tf32) for point in calibration.points}
    found = []
    for line in lines:
        line = line | {"call": to_text(drawn_kernels.with_plans(from_text(line["call"]), calibration.known_gpu))}
        tf32 = line.get("tf32", False)
        family = drawn_kernels.family_of(line, chip)
        key = (drawn_kernels.without_step(line["call"]), tf32)
        if family is None or family.startswith("transfer") or key in known:
            continue
        if family == "table.accumulated" and _repetitions(line["call"]) > MOST_AGAIN:
            continue
        known.add(key)
        entry = {"call": line["call"], "us": line["us"], "kernels": round(line["kernels"])}
        entry |= {"tf32": True} if tf32 else {}
        entry |= _LOCAL if drawn_kernels.fell_back(line, chip) else {}
        point = Point(entry["call"], entry["us"], None, entry["kernels"], tf32, "local" in entry)
        if (priced := price_point(0, point, chip)) is not None:
            found.append(Measured(line["training"], entry, point, priced.family, priced.point))
    return found


def _repetitions(text: str) -> float:
    """Return how many indices of an addition by an index there are for each place of its tensor."""
    table, indices = from_text(text).inputs[:2]
    return indices.elements / max(table.shape[0], 1)


def _surprising(
    calibration: Calibration, measured: list[Measured], known: dict[str, list[EfficiencyPoint]]
) -> set[int]:
    """Return the places of products and convolutions that contradict the points around them, if none confirms them."""
    models = {tf32: cost_model_of(calibration.known_gpu, tf32=True if tf32 else None) for tf32 in (False, True)}
    by_family = defaultdict(list)
    for one in measured:
        by_family[one.family].append(one)

    def is_confirmed(one: Measured) -> bool:
        return any(
            other.training != one.training
            and not other.says.local
            and abs(other.says.log_efficiency - one.says.log_efficiency) < CONFIRMED
            and _distance(other.says, one.says) < AROUND
            for other in by_family[one.family]
        )

    found = set()
    for place, one in enumerate(measured):
        if not one.family.startswith(CHOOSING) or one.says.local:
            continue
        price = kernel_cost(one.point.call, models[one.point.tf32]).seconds
        is_far = not any(_distance(other, one.says) < AROUND for other in known[one.family] if not other.local)
        if abs(log(one.point.hot * 1e-6 / price)) >= SURPRISING and not is_far and not is_confirmed(one):
            found.add(place)
    return found


def _is_like(one: EfficiencyPoint, other: EfficiencyPoint) -> bool:
    same_kernels = one.kernels == other.kernels and one.local == other.local
    return same_kernels and abs(one.log_efficiency - other.log_efficiency) < ALIKE and _distance(one, other) < NEAR


def _is_expected(one: EfficiencyPoint, points: list[EfficiencyPoint]) -> bool:
    if one.local or len(points) < FEWEST:
        return False
    return abs(FamilyPoints(points).interpolate(one.features, one.plans) - one.log_efficiency) < EXPECTED


def _distance(one: EfficiencyPoint, other: EfficiencyPoint) -> float:
    return float(sum((a - b) ** 2 for a, b in zip(one.features, other.features, strict=False)) ** 0.5)


if __name__ == "__main__":
    sys.exit(main())
