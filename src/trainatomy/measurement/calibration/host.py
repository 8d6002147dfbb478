"""Compare this machine's CPU with the reference CPU, by the CPU time of small trainings.

The reference's times are predicted (``expected``), this machine's are measured (``phases``), each in a process of its
own.  A factor is the time of this CPU as a multiple of the reference's, by part of a step
(``timing.host_costs.PARTS``).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import defaultdict
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from trainatomy.catalog.gpus import gpus
from trainatomy.catalog.hosts import reference_host
from trainatomy.measurement.calibration.expected import trainings
from trainatomy.measurement.calibration.quiet import reason_of, wait_until_quiet

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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
