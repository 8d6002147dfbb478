"""How fast this machine's host issues operations, beside the reference host: by small trainings on both.

The reference's part is predicted (``expected``), this machine's is measured (``phases``), each in a process of its own.
A factor says how many times as long this host takes in a part of a step (``clock.issue.PARTS``).
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
"""The part of the host's costs that shows in a phase."""
LEAST = 100.0
"""Microseconds; a phase that is expected to take less says nothing."""
LARGE_BATCH = 1000.0
"""Microseconds that the reference needs for a batch; what takes less cannot be told from the loop's own work."""
TIME_LIMIT = 120.0
"""Seconds for each of both processes."""
MODULES = "trainatomy.measurement.calibration"


class Answer:
    """A module that runs in a process of its own from now on, and its line of JSON."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{MODULES}.{module}", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        if self._process.stdout is not None and not self._process.stdout.closed:
            self._process.communicate()

    def get(self, time_limit: float) -> Any:
        """Wait for it; raises ``RuntimeError`` where it failed or took longer than ``time_limit`` seconds from now."""
        try:
            said, log = self._process.communicate(timeout=time_limit)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"`{self._module}` did not end within {time_limit:.0f} s") from None
        if self._process.returncode:
            last = (log.strip().splitlines() or ["it said nothing"])[-1]
            raise RuntimeError(f"`{self._module}` failed: {last}")
        return json.loads(said.splitlines()[-1])


def expected_for(gpu: str) -> Answer:
    """Begin to predict the reference's part. ``gpu``: the name that the driver gives the card; which one it is changes
    which kernels run, hardly how many."""
    known = next((card.id for card in gpus() if card.device_name == gpu), gpus()[0].id)
    return Answer("expected", known)


def host_section(expected: Answer, say: Callable[[str], None]) -> dict[str, Any]:
    """``reference``, ``factors`` by part, and the ``trainings`` they rest on, with microseconds by phase, measured and
    expected. Raises ``RuntimeError`` where one of both is not known."""
    reference: list[dict[str, float]] = expected.get(TIME_LIMIT)
    began = time.monotonic()
    with Answer("phases") as here:
        measured: list[dict[str, float]] = here.get(TIME_LIMIT)
    say(f"host: {len(measured)} trainings, {time.monotonic() - began:.1f} s")
    rows = [
        {"name": workload.name, "us": one, "expected_us": other}
        for workload, one, other in zip(trainings(), measured, reference, strict=True)
    ]
    return {"reference": reference_host().id, "factors": factors(measured, reference), "trainings": rows}


def factors(measured: Sequence[Mapping[str, float]], expected: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """How many times as long as the reference this host takes, by part: the geometric mean over trainings.  What large
    batches add shows between steps, beside what the loop takes there."""
    ratios = defaultdict(list)
    large = []
    for one, other in zip(measured, expected, strict=True):
        if other.get("batch", 0) >= LARGE_BATCH:
            large.append((one, other))
            continue
        for phase, part in PART_OF.items():
            if other.get(phase, 0) >= LEAST and one.get(phase, 0) > 0:
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
