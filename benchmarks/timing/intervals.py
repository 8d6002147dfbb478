"""Compare measured step times with predictions: ``python benchmarks/timing/intervals.py [RECORDS] [--each]``.

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
from probe import tiny

import trainatomy
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

RECORDS = Path(__file__).parent / "records" / "h200-steps.jsonl"
SHARE = 0.9


def predicted(row: str, small: bool) -> Any:
    """Predict the time of a row of the grid on an H200, with the PyTorch version that measured it."""
    mapping = next(one for one in grid.rows() if one.name == row).workload().to_mapping()
    mapping = {**(tiny(mapping) if small else mapping), "gpu": "h200", "software": {"torch": "2.11"}}
    return trainatomy.predict(Workload.from_mapping(mapping)).time


def interval(ratios: Sequence[float], weights: Sequence[float], share: float = SHARE) -> tuple[float, float]:
    """Return the narrowest interval with at most half of 1 - ``share`` of the weight beyond either end."""
    ends = numpy.quantile(ratios, [(1 - share) / 2, (1 + share) / 2], method="inverted_cdf", weights=weights)
    return float(ends[0]), float(ends[1])


def main() -> int:
    """Print the intervals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path, nargs="?", default=RECORDS)
    parser.add_argument("--each", action="store_true", help="print every training")
    options = parser.parse_args()
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
