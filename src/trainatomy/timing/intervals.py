"""The interval in which 9 of 10 measured steps lie, from the predicted one and that on a slow host.

How far kernels and launches are off is a factor of the step's time.  How slow the CPU is is not: a slower one makes
only those steps longer that wait for it, which a replay at its pace tells.  The figures are data
(``catalog/intervals.yaml``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from trainatomy.catalog.files import read_yaml
from trainatomy.results.time import Bound, PacedStep


def slow_pace() -> float:
    """Return the pace of the slowest of hosts that count, beside the one that is assumed where none is known."""
    return float(_known()["hosts"]["pace"])


def interval_seconds(
    seconds: float, slow_host: PacedStep | None, bound: Bound, *, calibrated: bool
) -> tuple[float, float]:
    """Return both ends of the interval.

    Args:
        seconds: The predicted step.
        slow_host: The same on a host of ``slow_pace``; None where the host is known.
        bound: What bounds the step.
        calibrated: Whether a calibration measured the GPU, with the software that is assumed.
    """
    known = _known()
    low, high = known["calibrated" if calibrated else "uncalibrated"]["host" if bound == "host" else "gpu"]
    longest = seconds * high
    if slow_host is not None:
        longest = max(longest, slow_host.step_seconds * known["hosts"]["beyond"])
    return seconds * low, longest


def _known() -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", read_yaml("intervals.yaml"))
