"""Compare predicted step times with published ones, on GPUs without a calibration.

``published.yaml`` describes what ran and how long it took.  Half of the rows, drawn by a hash of their names, may be
used to find errors of the timing model (tuning); the others are held out, and nothing may be changed because of what
single held-out rows show.  From the repository's root::

    python lab/timing/published.py              predict, print the table, write published.json
    python lab/timing/published.py --intervals  print the intervals for catalog/intervals.yaml, from tuning rows
    python lab/timing/published.py --tuning     only the tuning rows
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pickle
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, log, sqrt
from pathlib import Path
from statistics import NormalDist, median
from typing import TYPE_CHECKING, Any

import yaml

from trainatomy.catalog.files import read_yaml
from trainatomy.catalog.gpus import find_gpu
from trainatomy.catalog.machines import reference_host
from trainatomy.catalog.published import notebook as published_notebook
from trainatomy.timing.cost_model import cost_model_of, kernel_cost
from trainatomy.timing.host_costs import PARTS, cpu_costs
from trainatomy.timing.intervals import convolution_share, interval_basis
from trainatomy.timing.launch import launch_seconds, loop_seconds
from trainatomy.timing.step import bound_by
from trainatomy.timing.timeline import LaunchCosts, replay_step
from trainatomy.workload.builtin import notebook
from trainatomy.workload.factory import resolve
from trainatomy.workload.overlay import overlay
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from trainatomy.results.operations import Operations

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "published.json"
SEED = "trainatomy published times, first draw"
HELD_OUT_SHARE = 0.5
BASES = ("gpu", "convolutions", "host")
COVERAGE = 0.9
"""Share of cases that an interval should cover."""


@dataclass(frozen=True, slots=True)
class Row:
    """A published time: ``seconds`` of an optimizer step; ``without``: phases that were not timed."""

    name: str
    group: str
    gpu: str
    workload: Workload
    seconds: float
    without: tuple[str, ...] = ()

    @property
    def held_out(self) -> bool:
        """True if the row is held out from tuning."""
        return is_held_out(self.name)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row and its predicted step time; ``basis``: the key of its interval in catalog/intervals.yaml."""

    name: str
    group: str
    gpu: str
    held_out: bool
    published_seconds: float
    predicted_seconds: float
    interval_seconds: tuple[float, float]
    bound_by: str
    basis: str
    host_seconds: float
    gpu_seconds: float

    @property
    def error(self) -> float:
        """Predicted over published step time, minus 1."""
        return self.predicted_seconds / self.published_seconds - 1

    @property
    def inside(self) -> bool:
        """True if the interval contains the published time."""
        low, high = self.interval_seconds
        return low <= self.published_seconds <= high


def is_held_out(name: str) -> bool:
    """Return whether a row is held out: a fraction drawn from seed and name is below ``HELD_OUT_SHARE``."""
    digest = hashlib.sha256(f"{SEED}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < HELD_OUT_SHARE


def rows(path: Path = HERE / "published.yaml") -> list[Row]:
    """Return all published times, in the order of the file."""
    groups = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    return [row for name, group in groups.items() for row in _rows(name, group)]


def _rows(name: str, group: Mapping[str, Any]) -> Iterator[Row]:
    without = tuple(group.get("without", ()))
    if group["rows"] == "notebook":
        for workload, ran in zip(notebook("2022"), published_notebook().rows, strict=True):
            seconds = _step_seconds(workload, ran.samples_per_second)
            yield Row(f"{name}: {ran.name}", name, group["gpu"], workload, seconds)
        return
    for entry in group["rows"]:
        mapping = overlay(overlay(group["workload"], entry["set"]), {"gpu": group["gpu"]})
        for section in ("model", "data"):
            if "factory" in mapping.get(section, {}):
                mapping[section]["factory"] = resolve(mapping[section]["factory"], HERE)
        workload = Workload.from_mapping(mapping)
        seconds = entry.get("seconds") or _step_seconds(workload, entry["samples_per_second"])
        yield Row(f"{name}: {entry['name']}", name, group["gpu"], workload, seconds, without)


def _step_seconds(workload: Workload, samples_per_second: float) -> float:
    from trainatomy.training.shape import samples_per_step

    return samples_per_step(workload) / samples_per_second


def operations_of(row: Row, cache: Path | None = None) -> Operations:
    """Return the operations of a row's step, cached as files in ``cache``."""
    key = hashlib.sha256(json.dumps(row.workload.to_mapping(), sort_keys=True).encode()).hexdigest()[:16]
    kept = cache / f"{key}.pickle" if cache else None
    if kept is not None and kept.exists():
        found: Operations = pickle.loads(kept.read_bytes())
        return found
    from trainatomy.simulator.simulate import simulate

    found = simulate(row.workload, row.workload.resolve_gpu()).operations
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(pickle.dumps(found))
    return found


def predict(row: Row, operations: Operations) -> Outcome:
    """Predict the time of a row as ``predict_step_time`` does, without the phases that were not timed."""
    workload, known = row.workload, reference_host()
    loop = "inference" if workload.mode == "inference" else workload.loop
    costs = cpu_costs(known.microseconds, dict.fromkeys(PARTS, known.quiet))
    launches = list(launch_seconds(operations, costs, loop))
    timed = [index for index, one in enumerate(operations.operations) if one.phase not in row.without]
    kept = replace(operations, operations=[operations.operations[index] for index in timed])
    cost_model = cost_model_of(find_gpu(row.gpu), tf32=bool(workload.train.tf32))
    kernels = [kernel_cost(call, cost_model) for call in operations.calls]
    busy = [(cost_model.busy_seconds(kernel), kernel.launches) for kernel in kernels]
    timeline = replay_step(
        kept, busy, LaunchCosts([launches[index] for index in timed], costs, loop_seconds(kept, costs, loop))
    )
    bound = bound_by(kept, kernels, timeline)
    basis = interval_basis(bound, "uncalibrated", convolution_share(kept, kernels))
    low, high = read_yaml("intervals.yaml")["uncalibrated"][basis]
    interval = (timeline.seconds * low, timeline.seconds * high)
    return Outcome(
        row.name, row.group, row.gpu, row.held_out, row.seconds, timeline.seconds, interval, bound, basis,
        timeline.cpu_seconds, timeline.gpu_seconds,
    )  # fmt: skip


def interval(outcomes: Sequence[Outcome], coverage: float = COVERAGE) -> tuple[float, float]:
    """Return the factors from a prediction to the ends of an interval that covers a new case with this probability.

    This is Student's prediction interval of log(published / predicted) for one more case of a normal distribution,
    widened to include all cases seen.  Each group counts as one case, because rows of one source share machine and
    software.

    Raises:
        ValueError: If all outcomes are of one group.
    """
    count = Counter(one.group for one in outcomes)
    if len(count) < 2:
        raise ValueError(f"one group ({', '.join(count)}) is not enough for an interval")
    logs = [(log(one.published_seconds / one.predicted_seconds), 1 / count[one.group]) for one in outcomes]
    groups = len(count)
    mean = sum(value * weight for value, weight in logs) / groups
    variance = sum(weight * (value - mean) ** 2 for value, weight in logs) / (groups - 1)
    reach = _student((1 + coverage) / 2, groups - 1) * sqrt(variance * (1 + 1 / groups))
    values = [value for value, _ in logs]
    return exp(min(mean - reach, *values)), exp(max(mean + reach, *values))


def _student(share: float, freedom: int) -> float:
    """Return a quantile of Student's t by its expansion about the normal one (Abramowitz and Stegun, 26.7.5)."""
    z = NormalDist().inv_cdf(share)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def summary(outcomes: Iterable[Outcome]) -> str:
    """Return the median and worst error, and how many intervals contain the published time."""
    every = list(outcomes)
    errors = [abs(one.error) for one in every]
    if not errors:
        return "none"
    inside = sum(one.inside for one in every)
    worst = sorted(errors)[-1]
    return f"{len(errors)}: median {median(errors):.0%}, worst {worst:.0%}, {inside} of {len(errors)} in the interval"


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield lines of published and predicted times: each row, then summaries by group and by half."""
    for one in outcomes:
        low, high = (f"{1e3 * seconds:.1f}" for seconds in one.interval_seconds)
        yield (
            f"{one.name:62} {'held out' if one.held_out else 'tuning  '} {1e3 * one.published_seconds:8.1f} ms "
            f"predicted {1e3 * one.predicted_seconds:8.1f} ({low} to {high}{'' if one.inside else ', OUTSIDE'}) "
            f"{one.error:+.0%}, bound by {one.bound_by}"
        )
    for group in dict.fromkeys(one.group for one in outcomes):
        yield f"{group:30} {summary(one for one in outcomes if one.group == group)}"
    for basis in BASES:
        for held_out in (False, True):
            half = [one for one in outcomes if one.held_out == held_out and one.basis == basis]
            yield f"{'held out' if held_out else 'tuning':8} {basis:5} {summary(half)}"
    for held_out in (False, True):
        half = [one for one in outcomes if one.held_out == held_out]
        yield f"{'held out' if held_out else 'tuning':8} all   {summary(half)}"


def read_results(path: Path = RESULTS) -> list[Outcome]:
    """Read the outcomes that were last written."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return [Outcome(**{**one, "interval_seconds": tuple(one["interval_seconds"])}) for one in content["outcomes"]]


def _written(one: Outcome) -> dict[str, Any]:
    """Return the outcome as in the file: seconds with six digits."""
    fields = asdict(one)
    fields["interval_seconds"] = [float(f"{bound:.6g}") for bound in one.interval_seconds]
    return {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in fields.items()}


def main() -> int:
    """Predict the rows, print the table and write the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tuning", action="store_true", help="predict only the tuning half; write nothing")
    parser.add_argument("--intervals", action="store_true", help="print the tuning half's intervals; write nothing")
    parser.add_argument("--cache", type=Path, help="folder in which to cache the operations of each row")
    options = parser.parse_args()
    sys.path.insert(0, str(HERE))  # the workloads' optimizers are there
    wanted = [row for row in rows() if not (row.held_out and (options.tuning or options.intervals))]
    outcomes = [predict(row, operations_of(row, options.cache)) for row in wanted]
    if options.intervals:
        for basis in BASES:
            of_kind = [one for one in outcomes if one.basis == basis]
            low, high = interval(of_kind)
            groups = len({one.group for one in of_kind})
            print(f"{basis}: [{low:.2f}, {high:.2f}] from {len(of_kind)} rows of {groups} groups")
        return 0
    print("\n".join(table(outcomes)))
    if not options.tuning:
        lines = ",\n ".join(json.dumps(_written(one)) for one in outcomes)
        RESULTS.write_text(f'{{"outcomes": [\n {lines}\n]}}\n', encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
