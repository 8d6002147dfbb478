"""Compare this machine's CPU with the reference CPU, by the CPU time of small trainings.

The reference's times are predicted (``expected``), this machine's are measured (``phases``), each in a process of its
own.  A factor is the time of this CPU as a multiple of the reference's, by part of a step
(``timing.host_costs.PARTS``).

Time the phases of small trainings on this machine's CPU.

Runs as ``python -m trainatomy.measurement.calibration.host``, a process of its own, as a training is: CUPTI, which a
profiler attaches and leaves attached, may slow down every later launch of its process.

Prints a line of JSON: ``trainings``, microseconds by phase of each; ``probe_us``, the time of the probe of the host's
pace for which they hold, by the probe's name; and the ``load`` of the machine meanwhile.  Other work on a shared
machine slows the CPU for milliseconds or minutes at a time, and never speeds it up.  So the probe runs after each step,
each round is taken at the pace of the quickest probes, and the median of the rounds counts; the trainings take turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import geometric_mean, median
from typing import Any

from trainatomy.catalog.gpus import gpus
from trainatomy.catalog.machines import reference_host
from trainatomy.measurement.calibration.expected import trainings
from trainatomy.measurement.calibration.quiet import reason_of, wait_until_quiet
from trainatomy.measurement.device.host import PROBE, LoadMeter, ThreadMeter, launching_threads, probe_seconds
from trainatomy.processes import end_with_parent
from trainatomy.results.measurement import HostPace
from trainatomy.training.model import build_model
from trainatomy.training.observer import Observer
from trainatomy.training.run import run
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


class PhaseTimer(Observer):
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


PART_OF = {"forward": "graph", "backward": "backward", "optimizer": "plain", "other": "loop"}
"""The part of the CPU costs that each phase measures."""
MIN_MICROSECONDS = 100.0
"""Phases that are expected to take less are ignored."""
LARGE_BATCH = 1000.0
"""Microseconds of the reference for a batch; less cannot be distinguished from the loop's own work."""
TIME_LIMIT = 120.0
"""Seconds for each of the two processes."""
ATTEMPTS = 3
"""Measurements of a machine that does not become quiet."""
QUIET_SECONDS = 20.0
"""Seconds to wait for a quiet moment before the first of them."""
_PACKAGE = "trainatomy.measurement.calibration"


class JsonProcess:
    """A module of this package that runs in a process of its own and prints a line of JSON."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{_PACKAGE}.{module}", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> JsonProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        if self._process.stdout is not None and not self._process.stdout.closed:
            self._process.communicate()

    def get(self, time_limit: float) -> Any:
        """Wait for the process and return its JSON.

        Raises:
            RuntimeError: It failed, or did not end within ``time_limit`` seconds from now.
        """
        try:
            output, log = self._process.communicate(timeout=time_limit)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"`{self._module}` did not end within {time_limit:.0f} s") from None
        if self._process.returncode:
            last = (log.strip().splitlines() or ["it printed nothing"])[-1]
            raise RuntimeError(f"`{self._module}` failed: {last}")
        return json.loads(output.splitlines()[-1])


def expected_for(gpu: str) -> JsonProcess:
    """Start to predict the reference's times.

    ``gpu``: the driver's name of the GPU, which changes which kernels run, but hardly how many.
    """
    known = next((each.id for each in gpus() if each.device_name == gpu), gpus()[0].id)
    return JsonProcess("expected", known)


def measure_phases(report: Callable[[str], None]) -> dict[str, Any]:
    """Time the trainings once the machine is quiet; again where it was not meanwhile; return the least of them.

    Besides what ``phases`` prints, ``busy`` says why the machine was not quiet in the best attempt (empty: it was),
    and ``attempts`` how often it was measured.

    Raises:
        RuntimeError: The process failed.
    """
    found: dict[str, Any] = {}
    for attempt in range(1, ATTEMPTS + 1):
        wait_until_quiet(QUIET_SECONDS / attempt, report)
        began = time.monotonic()
        with JsonProcess("phases") as process:
            measured: dict[str, Any] = process.get(TIME_LIMIT)
        busy = reason_of(measured)
        report(f"host: {len(measured['trainings'])} trainings, {time.monotonic() - began:.1f} s{busy and f'; {busy}'}")
        found = least(found, measured | {"busy": busy}) | {"attempts": attempt}
        if not busy:
            break
    return found


def least(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the least of two attempts' times, and what the better one says of the machine.

    The better attempt is the one that was not busy, or else the one with the quicker probe.
    """
    if not one:
        return dict(other)
    better, worse = sorted((one, other), key=lambda each: (bool(each["busy"]), min(each["probe_us"].values())))
    pairs = zip(better["trainings"], worse["trainings"], strict=True)
    rows = [{phase: min(first[phase], second[phase]) for phase in first} for first, second in pairs]
    return {**better, "trainings": rows}


def host_section(measured: Mapping[str, Any], expected: JsonProcess) -> dict[str, Any]:
    """Return ``reference``, ``factors`` by part, the probe's time, how busy the host was, and the ``trainings``.

    Each training has its microseconds by phase, measured and expected.

    Raises:
        RuntimeError: The prediction of the reference's times failed.
    """
    reference: list[dict[str, float]] = expected.get(TIME_LIMIT)
    rows = [
        {"name": workload.name, "us": one, "expected_us": other}
        for workload, one, other in zip(trainings(), measured["trainings"], reference, strict=True)
    ]
    about = {name: value for name, value in measured.items() if name != "trainings"}
    found = factors(measured["trainings"], reference)
    return {"reference": reference_host().id, "factors": found, **about, "trainings": rows}


def factors(measured: Sequence[Mapping[str, float]], expected: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the time of this CPU as a multiple of the reference's, by part: the geometric mean over trainings.

    The time of large batches shows between steps, in addition to the loop's own.
    """
    ratios = defaultdict(list)
    large = []
    for one, other in zip(measured, expected, strict=True):
        if other.get("batch", 0) >= LARGE_BATCH:
            large.append((one, other))
            continue
        for phase, part in PART_OF.items():
            if other.get(phase, 0) >= MIN_MICROSECONDS and one.get(phase, 0) > 0:
                ratios[part].append(one[phase] / other[phase])
    found = {part: geometric_mean(values) for part, values in ratios.items()}
    added = [
        (one["other"] - found.get("loop", 1.0) * other["other"]) / other["batch"]
        for one, other in large
        if one["other"] > found.get("loop", 1.0) * other["other"]
    ]
    if added:
        found["batch"] = geometric_mean(added)
    return {part: round(value, 3) for part, value in found.items()}
