"""Time the phases of small trainings on this machine's CPU.

Runs as ``python -m trainatomy.measurement.calibration.phases``, a process of its own, as a training is: CUPTI, which a
profiler attaches and leaves attached, may slow down every later launch of its process.

Prints a line of JSON: for each training, in order, microseconds by phase.  Other work on a shared machine slows the CPU
for seconds or minutes at a time, so the trainings take turns, and the median of the rounds counts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from statistics import median
from typing import TYPE_CHECKING

from trainatomy.measurement.calibration.expected import trainings
from trainatomy.training.observer import Silent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainatomy.workload.schema import Workload

WARM_UP, TIMED, ROUNDS = 3, 10, 3
FP16_WARM_UP = 8
"""Warm-up steps with a gradient scaler: its scale starts too high, so the first steps are skipped."""
PHASES = ("forward", "backward", "optimizer", "other")


class PhaseTimer(Silent):
    """Observer that takes the CPU microseconds of each phase of each step; recomputation counts as backward."""

    def __init__(self) -> None:
        self.steps: list[Counter[str]] = []
        self._phase = "other"
        self._since = time.perf_counter()
        self._step: Counter[str] = Counter()

    def _enter(self, phase: str) -> None:
        now = time.perf_counter()
        self._step[self._phase] += (now - self._since) * 1e6  # type: ignore[assignment]
        self._phase, self._since = phase, now

    def micro_step_begin(self, micro_step: int) -> None:
        self._enter("forward")

    def forward_end(self) -> None:
        self._enter("backward")

    def micro_step_end(self, micro_step: int) -> None:
        self._enter("other")

    def optimizer_begin(self) -> None:
        self._enter("optimizer")

    def optimizer_end(self) -> None:
        self._enter("other")

    def step_end(self, step: int) -> None:
        self._enter("other")
        self.steps.append(self._step)
        self._step = Counter()


def phases_of(workloads: Sequence[Workload], device: str = "cuda") -> list[dict[str, float]]:
    """Return microseconds by phase of each workload: the median over a round's timed steps, then over the rounds."""
    rounds = [[_round(workload, device) for workload in workloads] for _ in range(ROUNDS)]
    return [
        {phase: round(median(one[phase] for one in found), 1) for phase in PHASES}
        for found in zip(*rounds, strict=True)
    ]


def _round(workload: Workload, device: str) -> dict[str, float]:
    from trainatomy.training.model import build_model
    from trainatomy.training.run import run

    warm_up = FP16_WARM_UP if workload.train.fp16 else WARM_UP
    timer = PhaseTimer()
    run(workload, build_model(workload), device=device, steps=warm_up + TIMED, observer=timer)
    return {phase: median(step.get(phase, 0.0) for step in timer.steps[warm_up:]) for phase in PHASES}


def main() -> int:
    """Time the trainings and print the result."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not mix with the result
    found = phases_of(trainings())
    with os.fdopen(answers, "w") as out:
        print(json.dumps(found), file=out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
