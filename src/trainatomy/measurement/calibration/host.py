"""Compare this machine's CPU with the reference CPU, by the CPU time of small trainings.

The reference's times are predicted (``expected``), this machine's are measured (``phases``), each in a process of its
own.  A factor is the time of this CPU as a multiple of the reference's, by part of a step (``timing.launch.PARTS``).
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


def host_section(expected: JsonProcess, report: Callable[[str], None]) -> dict[str, Any]:
    """Return ``reference``, ``factors`` by part, and the ``trainings`` behind them.

    Each training has its microseconds by phase, measured and expected.

    Raises:
        RuntimeError: One of the two processes failed.
    """
    reference: list[dict[str, float]] = expected.get(TIME_LIMIT)
    began = time.monotonic()
    with JsonProcess("phases") as process:
        measured: list[dict[str, float]] = process.get(TIME_LIMIT)
    report(f"host: {len(measured)} trainings, {time.monotonic() - began:.1f} s")
    rows = [
        {"name": workload.name, "us": one, "expected_us": other}
        for workload, one, other in zip(trainings(), measured, reference, strict=True)
    ]
    return {"reference": reference_host().id, "factors": factors(measured, reference), "trainings": rows}


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
