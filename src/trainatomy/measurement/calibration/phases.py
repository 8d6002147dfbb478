"""Time the phases of small trainings on this machine's CPU.

Runs as ``python -m trainatomy.measurement.calibration.phases``, a process of its own, as a training is: CUPTI, which a
profiler attaches and leaves attached, may slow down every later launch of its process.

Prints a line of JSON: ``trainings``, microseconds by phase of each; ``probe_us``, the time of the probe of the host's
pace for which they hold, by the probe's name; and the ``load`` of the machine meanwhile.  Other work on a shared
machine slows the CPU for milliseconds or minutes at a time, and never speeds it up.  So the probe runs after each step,
each round is taken at the pace of the quickest probes, and the median of the rounds counts; the trainings take turns.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from trainatomy.catalog.hosts import reference_host
from trainatomy.measurement.calibration.expected import trainings
from trainatomy.measurement.device.host_load import LoadMeter
from trainatomy.measurement.device.host_probe import PROBE, launching_threads, probe_seconds
from trainatomy.measurement.device.thread_waits import ThreadMeter
from trainatomy.processes import end_with_parent
from trainatomy.results.host_pace import HostPace
from trainatomy.training.observer import Silent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainatomy.workload.schema import Workload

WARM_UP, TIMED, ROUNDS = 3, 10, 3
FP16_WARM_UP = 8
"""Warm-up steps with a gradient scaler: its scale starts too high, so the first steps are skipped."""
PHASES = ("forward", "backward", "optimizer", "other")


@dataclass(frozen=True, slots=True)
class Round:
    """Microseconds by phase of a training's step, and the pace at which they were measured."""

    microseconds: dict[str, float]
    pace: HostPace

    def at(self, quickest: float) -> dict[str, float]:
        """Return the microseconds on this host while the probe takes this many seconds and no thread waits."""
        pace = self.pace.beside(quickest)
        return {phase: value / pace for phase, value in self.microseconds.items()}


class PhaseTimer(Silent):
    """Observer that takes the CPU microseconds of each phase of each step; recomputation counts as backward.

    ``waits`` counts from the last step of the warm-up.
    """

    def __init__(self, warm_up: int = 1) -> None:
        self.steps: list[Counter[str]] = []
        self.probes: list[float] = []
        self.waits = ThreadMeter(())
        self._warm_up = warm_up
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
        self.probes.append(probe_seconds())
        if len(self.steps) == self._warm_up:
            self.waits = ThreadMeter(launching_threads())
        self._since = time.perf_counter()  # the probe belongs to no phase


def phases_of(
    workloads: Sequence[Workload], device: str = "cuda", probes: list[float] | None = None
) -> list[dict[str, float]]:
    """Return microseconds by phase of each workload: the median over a round's timed steps, then that of the rounds.

    Each round is taken at the pace of the quickest probes.  The times of the probe in the timed steps are added to
    ``probes``.
    """
    found = [] if probes is None else probes
    rounds = [[_round(workload, device, found) for workload in workloads] for _ in range(ROUNDS)]
    quickest = quick(found)
    return [
        {phase: round(median(one.at(quickest)[phase] for one in of_workload), 1) for phase in PHASES}
        for of_workload in zip(*rounds, strict=True)
    ]


def _round(workload: Workload, device: str, probes: list[float]) -> Round:
    from trainatomy.training.model import build_model
    from trainatomy.training.run import run

    warm_up = FP16_WARM_UP if workload.train.fp16 else WARM_UP
    timer = PhaseTimer(warm_up)
    run(workload, build_model(workload), device=device, steps=warm_up + TIMED, observer=timer)
    times, waited = tuple(timer.probes[warm_up:]), timer.waits.read()
    probes += times
    pace = HostPace(PROBE, during_seconds=times, waited_share=waited, exponent=reference_host().pace_exponents[PROBE])
    return Round({phase: median(step.get(phase, 0.0) for step in timer.steps[warm_up:]) for phase in PHASES}, pace)


def quick(probes: Sequence[float]) -> float:
    """Return the quickest of the probe's times but for one in twenty, which may be chance."""
    return sorted(probes)[len(probes) // 20]


def measured(workloads: Sequence[Workload], device: str = "cuda") -> dict[str, Any]:
    """Return what this process prints (see above); ``probe_spread``: the typical probe over the quickest one."""
    meter, probes = LoadMeter(), list[float]()
    found = phases_of(workloads, device, probes)
    quickest = quick(probes)
    return {
        "trainings": found,
        "probe_us": {PROBE: round(quickest * 1e6, 1)},
        "probe_spread": round(median(probes) / quickest, 3),
        "load": asdict(meter.read()),
    }


def main() -> int:
    """Time the trainings and print the result."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not mix with the result
    found = measured(trainings())
    with os.fdopen(answers, "w") as out:
        print(json.dumps(found), file=out)
    return 0


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main())
