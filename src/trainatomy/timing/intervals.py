"""The interval of a predicted step: the ends between which 9 of 10 measured steps lie (``intervals.yaml``).

How far kernels and launches are off is a factor of the step's time.  How slow the CPU is is not: a slower one makes
only those steps longer that wait for it, which a replay at its pace tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, cast

from trainatomy.catalog.files import read_yaml
from trainatomy.results.operations import Operations
from trainatomy.results.time import Bound, PacedStep
from trainatomy.timing.cost_model import KernelCost


def slow_pace() -> float:
    """Return the pace of the slowest of hosts that count, beside the one that is assumed where none is known."""
    return float(_known()["hosts"]["pace"])


def interval_seconds(
    seconds: float,
    slow_host: PacedStep | None,
    bound: Bound,
    name: str,
    convolving: float = 0.0,
) -> tuple[float, float]:
    """Return both ends of the interval.

    Args:
        seconds: The predicted step.
        slow_host: The same on a host of ``slow_pace``; None where the host is known.
        bound: What bounds the step.
        name: What the GPU's times rest on (``interval_name``).
        convolving: Share of convolutions in the time of the GPU's kernels.
    """
    known = _known()
    low, high = known[name][interval_basis(bound, name, convolving)]
    longest = seconds * high
    if slow_host is not None:
        longest = max(longest, slow_host.step_seconds * known["hosts"]["beyond"])
    return seconds * low, longest


def interval_name(*, calibrated: bool, unmeasured: bool) -> str:
    """Return the name of a GPU's intervals.

    Args:
        calibrated: Whether a calibration measured it, with the software that is assumed.
        unmeasured: Whether no time of a GPU of its maker was compared.
    """
    return "calibrated" if calibrated else "unmeasured" if unmeasured else "uncalibrated"


def interval_basis(bound: Bound, name: str, convolving: float) -> str:
    """Return the key of a step's interval, below its name: what bounds it, and on some GPUs what its kernels do."""
    if bound == "host":
        return "host"
    return "convolutions" if convolving >= _known()[name].get("convolving", inf) else "gpu"


def convolution_share(operations: Operations, kernels: Sequence[KernelCost]) -> float:
    """Return the share of convolutions in the time of a step's kernels."""
    busy = [(one.call, kernels[one.call].seconds * one.repeats) for one in operations.operations]
    convolving = sum(seconds for call, seconds in busy if "convolution" in operations.calls[call].name)
    return convolving / (sum(seconds for _, seconds in busy) or 1.0)


def _known() -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", read_yaml("intervals.yaml"))
