"""How fast this machine's host issues operations, beside the reference host: by small trainings on both.

The reference's part is predicted (``expected``), in a process of its own; this machine's is measured.  A factor says
how many times as long this host takes in a part of a step (``clock.issue.PARTS``).  Other work on a shared machine
makes a host slower for seconds or minutes, so the trainings run in rounds, and every step counts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter, defaultdict
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, Any

from trainatomy.facts.cards import cards
from trainatomy.facts.hosts import reference_host
from trainatomy.gpu.calibration.expected import trainings
from trainatomy.training.observer import Silent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainatomy.workload.schema import Workload

WARM_UP, TIMED, ROUNDS = 3, 12, 2
FP16_WARM_UP = 8
"""A gradient scale that starts too high skips its first steps."""
PART_OF = {"forward": "graph", "backward": "backward", "optimizer": "plain", "other": "loop"}
"""The part of the host's costs that shows in a phase."""
LEAST = 100.0
"""Microseconds; a phase that is expected to take less says nothing."""
EXPECTED_TIME_LIMIT = 120.0


class HostPhases(Silent):
    """Microseconds of the host in each phase of each step; recomputation is backward's."""

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


def host_section(gpu: str, say: Callable[[str], None]) -> dict[str, Any]:
    """``reference``, ``factors`` by part, and the ``trainings`` they rest on, with microseconds by phase, measured and
    expected. ``gpu``: the name that the driver gives the card.  Raises ``RuntimeError`` where the reference's part
    could not be predicted."""
    began = time.monotonic()
    expected = _expected(_card_id(gpu))
    say(f"host, expected: {time.monotonic() - began:.1f} s")
    began = time.monotonic()
    measured = [_phases_of(steps) for steps in run_trainings(trainings())]
    say(f"host, measured: {len(measured)} trainings, {time.monotonic() - began:.1f} s")
    rows = [
        {"name": workload.name, "us": one, "expected_us": other}
        for workload, one, other in zip(trainings(), measured, expected, strict=True)
    ]
    return {"reference": reference_host().id, "factors": factors(measured, expected), "trainings": rows}


def factors(measured: Sequence[Mapping[str, float]], expected: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """How many times as long as the reference this host takes, by part: the geometric mean over trainings."""
    ratios = defaultdict(list)
    for one, other in zip(measured, expected, strict=True):
        for phase, part in PART_OF.items():
            if other.get(phase, 0) >= LEAST and one.get(phase, 0) > 0:
                ratios[part].append(one[phase] / other[phase])
    return {part: round(geometric_mean(values), 3) for part, values in ratios.items()}


def run_trainings(workloads: Sequence[Workload], device: str = "cuda") -> list[list[Counter[str]]]:
    """The timed steps of each workload, of all rounds."""
    from trainatomy.training.model import build_model
    from trainatomy.training.run import run

    found: list[list[Counter[str]]] = [[] for _ in workloads]
    for _ in range(ROUNDS):
        for index, workload in enumerate(workloads):
            warm_up = FP16_WARM_UP if workload.train.fp16 else WARM_UP
            phases = HostPhases()
            run(workload, build_model(workload), device=device, steps=warm_up + TIMED, observer=phases)
            found[index] += phases.steps[warm_up:]
    return found


def _phases_of(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {phase: round(median(step.get(phase, 0.0) for step in steps), 1) for phase in PART_OF}


def _card_id(gpu: str) -> str:
    """The card of this name, or any: which one it is changes which kernels run, hardly how many."""
    return next((card.id for card in cards() if card.device_name == gpu), cards()[0].id)


def _expected(card_id: str) -> list[dict[str, float]]:
    command = [sys.executable, "-m", "trainatomy.gpu.calibration.expected", card_id]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=EXPECTED_TIME_LIMIT, check=False)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the reference's part took more than {EXPECTED_TIME_LIMIT:.0f} s to predict") from error
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"the reference's part could not be predicted: {last}")
    found: list[dict[str, float]] = json.loads(ended.stdout.splitlines()[-1])
    return found
