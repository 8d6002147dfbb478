"""Predict and measure what padding gains: ``python lab/timing/padding.py [--measure] [--out FILE]``.

Each case of ``padding.yaml`` is one training before and after a size is padded.  For both, the step time and the GPU
time are predicted, and with ``--measure`` also measured on this machine's GPU, all in this process, which takes about a
minute on an H200.  Times are per sample, so that batch sizes may differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from trainatomy.training.observer import Observer
from trainatomy.workload.schema import Workload

HERE = Path(__file__).resolve().parent
WARM, TIMED = 3, 6


class Cost(NamedTuple):
    """Seconds of a step per sample: elapsed time, and GPU kernels."""

    step: float
    gpu: float


class Case(NamedTuple):
    """A training before and after padding."""

    name: str
    why: str
    before: Workload
    after: Workload


def cases(gpu: str, path: Path = HERE / "padding.yaml") -> Iterator[Case]:
    """Yield the cases of the file, on a GPU."""
    for name, entry in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        both = (_merged(entry["of"], entry[side]) for side in ("before", "after"))
        yield Case(name, entry["why"], *(Workload.from_mapping({**one, "gpu": gpu, "name": name}) for one in both))


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    merged = deepcopy(dict(one))
    for key, value in other.items():
        merged[key] = _merged(merged.get(key, {}), value) if isinstance(value, Mapping) else value
    return merged


def predicted(workload: Workload) -> Cost:
    """Predict the cost of a training."""
    from trainatomy.api import predict

    found = predict(workload).time
    assert found is not None
    return Cost(found.step_seconds / workload.batch_size, found.gpu_seconds / workload.batch_size)


class Timed(Observer):
    """Times undisturbed steps, then profiles one for its kernels."""

    def __init__(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self.profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True)
        self.at: list[float] = []

    def step_begin(self, step: int) -> None:
        import torch

        if step in (WARM, WARM + TIMED):
            torch.cuda.synchronize()
            self.at.append(time.perf_counter())
        if step == WARM + TIMED:
            self.profiler.start()

    def step_end(self, step: int) -> None:
        import torch

        if step == WARM + TIMED:
            torch.cuda.synchronize()
            self.profiler.stop()


def measured(workload: Workload) -> Cost:
    """Measure the cost of a training on this machine's GPU, and free its memory."""
    import torch

    from trainatomy.measurement.profile import tree
    from trainatomy.training import model as models
    from trainatomy.training import run as steps

    torch.manual_seed(0)
    timed = Timed()
    steps.run(workload, models.build_model(workload), device="cuda", steps=WARM + TIMED + 1, observer=timed)
    seconds = (timed.at[1] - timed.at[0]) / TIMED
    kernels = sum(root.total_seconds for root in tree(timed.profiler.events() or ()))
    torch.cuda.empty_cache()
    return Cost(seconds / workload.batch_size, kernels / workload.batch_size)


def compared(case: Case, by: Callable[[Workload], Cost]) -> dict[str, Any]:
    """Return both costs, and the shares of the step time and of the GPU time saved."""
    before, after = by(case.before), by(case.after)
    return {
        "before": before._asdict(),
        "after": after._asdict(),
        "saves": {name: 1 - getattr(after, name) / getattr(before, name) for name in Cost._fields if before.gpu},
    }


def environment() -> dict[str, str]:
    """Return the GPU, the torch version and the date of a measurement."""
    import torch

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }


def main() -> int:
    """Predict and measure the cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true", help="also measure on this machine's GPU")
    parser.add_argument("--gpu", default="h200", help="GPU to predict for")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    known = list(cases(options.gpu))
    # All predictions come first: simulations must run before CUDA is initialised in this process.
    found: dict[str, dict[str, Any]] = {
        case.name: {"why": case.why, "predicted": compared(case, predicted)} for case in known
    }
    for case in known if options.measure else []:
        found[case.name]["measured"] = compared(case, measured)
    for name, row in found.items():
        said = [
            f"{basis} {row[basis]['saves'].get('gpu', 0.0):+.1%}" for basis in ("predicted", "measured") if basis in row
        ]
        print(f"{name:24} of the GPU's time saved: {', '.join(said)}  ({row['why']})")
    if options.out is not None:
        content = {"environment": environment() if options.measure else {}, "cases": found}
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
