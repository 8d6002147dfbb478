"""Compare measured step times with predictions: ``python benchmarks/timing/intervals.py [RECORDS] [--each]``.

``--hosts`` compares the steps of ``records/trainings-*.jsonl.gz`` with stored predictions for a host of each pace, and
prints the upper end of ``hosts``, which visit after visit of a machine is also taken from the others.  Otherwise
RECORDS are step times measured on a GPU in several measurement sessions.  Each is predicted again with the shipped
data only.  Every session counts the same, however many trainings it has, because other work on a shared host makes
sessions differ more than trainings within one.  Copy the printed intervals to ``catalog/intervals.yaml`` by hand, with
their source.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "accuracy"))

import grid
import training_errors
import trainings
from host_phases import tiny

import trainatomy
from trainatomy.catalog.files import read_yaml
from trainatomy.measurement.device.host_probe import PROBE
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RECORDS = Path(__file__).parent / "records" / "h200-steps.jsonl"
SHARE = 0.9
GPUS = ("h200", "h100-sxm")


def predicted(row: str, small: bool) -> Any:
    """Predict the time of a row of the grid on an H200, with the PyTorch version that measured it."""
    mapping = next(one for one in grid.rows() if one.name == row).workload().to_mapping()
    mapping = {**(tiny(mapping) if small else mapping), "gpu": "h200", "software": {"torch": "2.11"}}
    return trainatomy.predict(Workload.from_mapping(mapping)).time


def interval(ratios: Sequence[float], weights: Sequence[float], share: float = SHARE) -> tuple[float, float]:
    """Return the narrowest interval with at most half of 1 - ``share`` of the weight beyond either end."""
    ends = numpy.quantile(ratios, [(1 - share) / 2, (1 + share) / 2], method="inverted_cdf", weights=weights)
    return float(ends[0]), float(ends[1])


def steps() -> Iterator[dict[str, Any]]:
    """Yield the timed steps of trainings: the visit of a machine, and what was measured and predicted."""
    for gpu_id in GPUS:
        predicted = {line["name"]: line for line in trainings.lines(trainings.predictions_of(gpu_id))}
        for number, visit in enumerate(training_errors.visits(trainings.lines(trainings.records_of(gpu_id)))):
            for line in visit:
                ours, pace = predicted.get(line["name"]), line.get("host_pace")
                if "step_seconds" in line and ours is not None and pace and pace["probe"] == PROBE:
                    bound = "host" if ours["bound_by"] == "host" else "gpu"
                    about = {"gpu": gpu_id, "visit": f"{gpu_id} {number}", "bound": bound}
                    yield {**about, "step": line["step_seconds"], "line": ours}


def upper_end(found: Sequence[dict[str, Any]], pace: float) -> float:
    """Return how many times as long as on a host of a pace one in 20 steps takes; each visit counts the same."""
    count = Counter(one["visit"] for one in found)
    ratios = [one["step"] / training_errors.at_pace(one["line"], pace) for one in found]
    return interval(ratios, [1 / count[one["visit"]] for one in found])[1]


def hosts(paces: Sequence[float]) -> None:
    """Print the upper end for hosts of several paces, and the share of steps that lie within the shipped intervals."""
    found, known = list(steps()), read_yaml("intervals.yaml")
    visits = sorted({one["visit"] for one in found})
    for pace in paces:
        others = {visit: upper_end([one for one in found if one["visit"] != visit], pace) for visit in visits}
        held = [one["step"] <= training_errors.at_pace(one["line"], pace) * others[one["visit"]] for one in found]
        print(
            f"pace {pace}: {upper_end(found, pace):.3f} from {len(found)} steps of {len(visits)} visits; "
            f"{sum(held) / len(held):.0%} of those of visits that were left out are within"
        )
    for gpu_id in GPUS:
        for bound in ("host", "gpu"):
            low, high = known["calibrated"][bound]
            chosen = [one for one in found if (one["gpu"], one["bound"]) == (gpu_id, bound)]
            ends = [
                (one["line"]["step_seconds"] * high, training_errors.at_pace(one["line"], known["hosts"]["pace"]))
                for one in chosen
            ]
            ratios = [one["step"] / one["line"]["step_seconds"] for one in chosen]
            factors = sum(low <= ratio <= high for ratio in ratios) / len(chosen)
            within = sum(
                low <= ratio and one["step"] <= max(alone, slow * known["hosts"]["beyond"])
                for one, ratio, (alone, slow) in zip(chosen, ratios, ends, strict=True)
            )
            print(f"{gpu_id} {bound}: {len(chosen)} steps, {within / len(chosen):.0%} within, by factors {factors:.0%}")


def main() -> int:
    """Print the intervals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path, nargs="?", default=RECORDS)
    parser.add_argument("--each", action="store_true", help="print every training")
    parser.add_argument("--hosts", action="store_true", help="print the upper end beside slow hosts")
    options = parser.parse_args()
    if options.hosts:
        hosts((2.0, 2.2, 2.4, 2.6))
        return 0
    known: dict[tuple[str, bool], Any] = {}
    found: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for line in options.records.read_text().splitlines():
        point = json.loads(line)
        key = (point["row"], point["tiny"])
        time = known.setdefault(key, None) or predicted(*key)
        known[key] = time
        ratio = point["step_seconds"] / time.step_seconds
        found["host" if time.bound_by == "host" else "gpu"].append((point["occasion"], ratio))
        if options.each:
            print(f"{point['occasion']}  {point['row']}{' (tiny)' * point['tiny']}: {ratio:.3f}, {time.bound_by}")
    for bound, points in found.items():
        count = Counter(occasion for occasion, _ in points)
        low, high = interval([ratio for _, ratio in points], [1 / count[occasion] for occasion, _ in points])
        print(f"{bound}: [{low:.2f}, {high:.2f}] from {len(points)} trainings of {len(count)} sessions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
