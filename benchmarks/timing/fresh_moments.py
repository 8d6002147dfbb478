"""Measure fused AdamW and Adam on tables of which no row, few rows or all rows have had a gradient.

``python benchmarks/timing/fresh_moments.py --out FILE.jsonl`` writes a line for each size and state on this machine's
GPU: the call, the state and the microseconds of its kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from trainatomy.catalog.calls import to_text
from trainatomy.measurement.profiler.calls import CallRecorder, profiled

TABLES = ((300, 64), (3000, 128), (30000, 128), (30000, 300), (120000, 64), (500000, 64), (1000000, 64))
STATES = ("random", "zeros", "gradients alone", "no gradients", "few rows", "tiny squares")
SETTINGS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
RUNS, FEW = 3, 0.02
"""Runs of a state, after one that warms up; share of the rows that have had a gradient, where these are few."""


def state(name: str, rows: int, width: int) -> list[torch.Tensor]:
    """Return weight, gradient and both moments in a state."""
    weight, gradient, mean = (torch.randn(rows, width, device="cuda") for _ in range(3))
    square = torch.rand(rows, width, device="cuda") * 1e-3
    if name in ("zeros", "no gradients", "tiny squares"):
        gradient.zero_()
    if name in ("zeros", "gradients alone"):
        mean.zero_()
        square.zero_()
    if name == "few rows":
        untouched = torch.rand(rows, device="cuda") > FEW
        for tensor in (gradient, mean, square):
            tensor[untouched] = 0
    if name == "tiny squares":
        square.fill_(1e-40)
        mean.fill_(1e-22)
    return [weight, gradient, mean, square]


def measure() -> list[dict[str, Any]]:
    """Return a line for each table, optimizer and state."""
    recorder, events, step = CallRecorder(), list[dict[str, Any]](), torch.ones((), device="cuda")
    with profiled(events):
        for rows, width in TABLES:
            for name in STATES:
                tensors = state(name, rows, width)
                for optimizer in (torch._fused_adamw_, torch._fused_adam_):
                    for run in range(RUNS + 1):
                        parts = [[tensor.clone()] for tensor in tensors]
                        call = partial(optimizer, *parts, [], [step], **SETTINGS, amsgrad=False, maximize=False)
                        recorder.label = name
                        if run:
                            with recorder:
                                call()
                        else:
                            call()
    texts = {number: to_text(call) for call, number in recorder.calls.items()}
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for sample in recorder.samples(events):
        if "_fused_" in texts[sample.call]:
            found[texts[sample.call], sample.label].append(sample.microseconds)
    return [{"adam": text, "variant": label, "us": median(us), "all": us} for (text, label), us in found.items()]


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.write_text("".join(json.dumps(line) + "\n" for line in measure()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
