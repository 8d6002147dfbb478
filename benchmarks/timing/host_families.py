"""Time the phases of tiny trainings, one of each family of ``trainings.yaml``, so small that the GPU waits for the CPU.

python benchmarks/timing/host_families.py --out FILE.jsonl [--time-limit 90]   # on a GPU that nothing else uses

Each training has two samples, or eight texts of a recurrent network, of at most 64 tokens.  A seed draws the order of
the families and a training of each, so that the time limit leaves out any of them.  The probe's part on each thread
is read three times after each step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "accuracy"))

import grid  # noqa: E402
import host_drawn  # noqa: E402
import host_pairs  # noqa: E402
import trainings  # noqa: E402

SEED = "families"
SAMPLES, TEXTS, LONGEST, LONGEST_TARGET = 2, 8, 64, 32
UNNAMED = frozenset({"transformers", "random", "recurrent"})
"""Families of ``trainings.yaml`` that are none of models."""
SECONDS, FEWEST_STEPS = 1.3, 2
"""Seconds after which a training ends, and timed steps that it has at least."""


class Watch(host_pairs.Watch):
    """Ends a training when its time is up."""

    def __init__(self, warm_up: int) -> None:
        super().__init__(evaluates=False)
        self._ends, self._least = time.monotonic() + SECONDS, warm_up + FEWEST_STEPS

    def step_begin(self, step: int) -> None:
        from trainatomy.measurement.step.timer import EnoughSteps

        if step >= self._least and time.monotonic() > self._ends:
            raise EnoughSteps
        super().step_begin(step)


def family_of(row: grid.Row) -> str:
    """Return the name of a training's family: the network's, or the model's class."""
    model = row.mapping["model"]
    return row.family if row.family not in UNNAMED else str(model.get("class") or model.get("id") or row.name)


def tiny(row: grid.Row) -> grid.Row:
    """Reduce a training to a few short samples."""
    mapping = deepcopy(dict(row.mapping))
    data = mapping.get("data", {})
    texts = any(name in str(data.get("factory")) for name in ("texts", "sentences"))
    mapping.setdefault("train", {})["per_device_train_batch_size"] = TEXTS if texts else SAMPLES
    for key, longest in (("sequence_length", LONGEST), ("target_length", LONGEST_TARGET)):
        if key in data:
            data[key] = min(data[key], longest)
    return replace(row, mapping=mapping)


def cases() -> Iterator[tuple[str, grid.Row]]:
    """Yield a tiny training of each family."""
    families: dict[str, list[grid.Row]] = {}
    for row in trainings.rows():
        families.setdefault(family_of(row), []).append(row)
    draw = Random(SEED)
    for name in draw.sample(sorted(families), len(families)):
        row = tiny(draw.choice(families[name]))
        yield row.name, row


def measured(row: grid.Row) -> dict[str, Any]:
    """Run a training on the GPU and return its times."""
    import torch

    from trainatomy.measurement.step.timer import EnoughSteps
    from trainatomy.training.model import build_model
    from trainatomy.training.quantization import load_on_device
    from trainatomy.training.run import run

    workload = row.workload(HERE)
    warm_up = host_drawn.FP16_WARM_UP if workload.train.fp16 else host_drawn.WARM_UP
    torch.manual_seed(0)
    if workload.model.quantization:
        model = load_on_device(workload, build_model(workload), "cuda")
    else:
        with torch.device("cuda"):
            model = build_model(workload)
    watch = Watch(warm_up)
    with suppress(EnoughSteps):
        run(workload, model, device="cuda", steps=warm_up + host_drawn.TIMED_STEPS, observer=watch)
    return {"family": family_of(row), "mapping": dict(row.mapping), **host_drawn.times(watch, warm_up)}


if __name__ == "__main__":
    sys.exit(host_drawn.measure_in_fork(__doc__, cases(), measured))
