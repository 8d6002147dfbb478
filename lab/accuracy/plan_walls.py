"""Plan runs at the memory limit: ``python lab/accuracy/plan_walls.py [--out walls-plan.json]``.  Needs no GPU.

For each row and size of ``walls.yaml``: the largest batch that is predicted to fit a GPU with that much memory, and the
predictions for it and for the next two.  ``walls.py`` then runs all of them on a GPU.

The simulated GPU is an H200 with less memory.  Its context takes as much as on an H200, which leaves the allocator
``capacity_bytes``; the measurement grants it that.

A plan that was run stays as it was.  ``--again`` writes what the current code predicts for the same runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import grid
import outcomes
import yaml
from grid import HERE, Row

from trainatomy import api
from trainatomy.workload.schema import Workload

PLAN = HERE / "records" / "walls-plan.json"
AGAIN = HERE / "records" / "walls-again.json"
BASE = "h200"
BEYOND = 2
"""Number of batches beyond the largest that fits."""
PATIENCE = 3
"""Guesses before the search only halves."""
STEPS, SCALED_STEPS = 4, 8
"""Optimizer steps, the same on both sides; with fp16 the first may be skipped while the loss scale settles."""
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned run.

    Attributes:
        above: Samples beyond the largest batch that is predicted to fit (0: that batch).
        predicted: fits, verdict, allocated, reserved, num_alloc_retries, convolutions without workspace and, where it
            does
            not fit, bytes requested and held when it fails.
    """

    row: str
    size_gib: int
    batch: int
    above: int
    workload: Mapping[str, Any]
    capacity_bytes: int
    predicted: Mapping[str, Any]
    held_out: bool

    @property
    def name(self) -> str:
        """Unique name that can be a file name."""
        return f"{self.row}-{self.size_gib}gib-{self.batch}"


FIELDS = frozenset(each.name for each in fields(Planned))


@dataclass
class Search:
    """Search for the memory limits of one row; earlier predictions guide it.

    Peaks hardly depend on the GPU, and are close to affine in the batch.
    """

    row: Row
    torch: str
    known: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    peaks: dict[int, int] = field(default_factory=dict)

    def plan(self, size_gib: int) -> list[Planned]:
        """Return the largest batch that fits and the next ones; raises ``ValueError`` where no sample fits."""
        low, high, tries = 0, 0, 0
        while high - low != 1:
            batch = self._next(size_gib, low, high, tries)
            tries += 1
            if self.predict(size_gib, batch)["fits"]:
                low = batch
            else:
                high = batch
            if high == 1:
                raise ValueError(f"{self.row.name}: one sample does not fit {size_gib} GiB")
        return [self._planned(size_gib, low, above) for above in range(BEYOND + 1)]

    def _next(self, size_gib: int, low: int, high: int, tries: int) -> int:
        """Return the batch to try next: guessed from known peaks, by halving once guesses take too long."""
        guess = self._guess(size_gib)
        if not high:
            return guess if guess > low else low + 1 + low // 32
        if tries >= PATIENCE:
            return (low + high) // 2
        return min(max(guess, low + 1), high - 1)

    def _guess(self, size_gib: int) -> int:
        """Return where the line through the two nearest peaks, one on each side if possible, meets the GPU's memory."""
        target = size_gib * GIB
        below = sorted((batch for batch in self.peaks if self.peaks[batch] <= target), key=lambda one: -self.peaks[one])
        above = sorted((batch for batch in self.peaks if self.peaks[batch] > target), key=lambda one: self.peaks[one])
        known = [*below[:1], *above[:1], *below[1:], *above[1:]][:2]
        if len(known) < 2:
            return 4 * known[0] if below else max(1, known[0] // 4) if known else 2
        one, other = sorted(known)
        slope = (self.peaks[other] - self.peaks[one]) / (other - one)
        return max(1, int(one + (target - self.peaks[one]) / slope)) if slope > 0 else other

    def predict(self, size_gib: int, batch: int) -> dict[str, Any]:
        """Return ``Planned.predicted`` for a batch on a GPU of that size."""
        if (size_gib, batch) not in self.known:
            workload = Workload.from_mapping(self._mapping(batch) | self._simulated(size_gib))
            prediction = api.predict(workload)
            memory, failure = prediction.memory, prediction.out_of_memory
            self.peaks[batch] = memory.device_bytes
            self.known[size_gib, batch] = {
                "fits": prediction.fits,
                "verdict": prediction.verdict,
                "allocated": memory.peak_allocated_bytes,
                "reserved": memory.peak_reserved_bytes,
                "context": memory.components.context,
                "num_alloc_retries": memory.num_alloc_retries,
                "without_workspace": prediction.without_workspace,
                "out_of_memory": asdict(failure) if failure else None,
            }
        return self.known[size_gib, batch]

    def _simulated(self, size_gib: int) -> dict[str, Any]:
        return {"gpu": {"base": BASE, "memory_bytes": size_gib * GIB}, "software": {"torch": self.torch}}

    def _mapping(self, batch: int) -> dict[str, Any]:
        mapping = deepcopy(self.row.workload().to_mapping())
        train = mapping.setdefault("train", {})
        train["per_device_train_batch_size"] = batch
        return mapping | {"steps": SCALED_STEPS if train.get("fp16") else STEPS}

    def _planned(self, size_gib: int, fitting: int, above: int) -> Planned:
        batch = fitting + above
        predicted = self.predict(size_gib, batch)
        capacity = size_gib * GIB - predicted["context"]
        workload = deepcopy(dict(self.row.mapping)) | {"steps": self._mapping(batch)["steps"]}
        workload["train"] = {**workload.get("train", {}), "per_device_train_batch_size": batch}
        return Planned(self.row.name, size_gib, batch, above, workload, capacity, predicted, self.row.held_out)


def search(name: str, sizes: list[int], torch: str) -> list[Planned]:
    """Return all planned runs of one row."""
    found = Search(row_of(name), torch)
    return [planned for size in sizes for planned in found.plan(size)]


def row_of(name: str) -> Row:
    """Return the row of the grid with that name."""
    return next(row for row in grid.rows() if row.name == name)


def predict_again(planned: Planned, torch: str) -> tuple[str, dict[str, Any]]:
    """Return the name of a planned run and the current prediction for it."""
    return planned.name, Search(row_of(planned.row), torch).predict(planned.size_gib, planned.batch)


def read(path: Path = PLAN) -> list[Planned]:
    """Read a plan."""
    return [Planned(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))["runs"]]


def plan(options: argparse.Namespace) -> None:
    """Search for the limits and write the plan."""
    asked = yaml.safe_load(options.walls.read_text(encoding="utf-8"))["rows"]
    names = options.rows.split(",") if options.rows else list(asked)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(search, name, asked[name], options.torch) for name in names]
        planned = []
        for future in as_completed(futures):
            planned += future.result()
            fits = [
                f"{one.size_gib} GiB: {one.batch}" for one in planned if one.row == planned[-1].row and not one.above
            ]
            print(f"{planned[-1].row}: largest batch by card: {', '.join(fits)}", file=sys.stderr, flush=True)
    planned.sort(key=lambda one: (names.index(one.row), one.size_gib, one.batch))
    content = {"predicted_with": outcomes.software(), "for_torch": options.torch, "base": BASE}
    lines = ",\n".join(json.dumps(asdict(one)) for one in planned)
    options.out.write_text(json.dumps(content)[:-1] + ', "runs": [\n' + lines + "\n]}\n", encoding="utf-8")


def again(options: argparse.Namespace) -> None:
    """Predict the runs of ``records/walls-*.jsonl`` with the current code."""
    lines = [
        line for path in sorted(AGAIN.parent.glob("walls-*.jsonl")) for line in path.read_text("utf-8").splitlines()
    ]
    runs = [Planned(**{name: value for name, value in json.loads(line).items() if name in FIELDS}) for line in lines]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(predict_again, planned, options.torch) for planned in runs]
        predicted = [json.dumps(name) + ": " + json.dumps(found) for name, found in (each.result() for each in futures)]
    content = {"predicted_with": outcomes.software(), "for_torch": options.torch, "base": BASE}
    text = json.dumps(content)[:-1] + ', "runs": {\n' + ",\n".join(predicted) + "\n}}\n"
    AGAIN.write_text(text, encoding="utf-8")


def main() -> int:
    """Predict and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PLAN)
    parser.add_argument("--walls", type=Path, default=HERE / "walls.yaml", help="the rows and sizes")
    parser.add_argument("--torch", default="2.11.0", help="the version that will be measured (default: 2.11.0)")
    parser.add_argument("--rows", help="only these, separated by commas")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--again", action="store_true", help=f"predict the measured runs into {AGAIN.name}")
    options = parser.parse_args()
    again(options) if options.again else plan(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
