"""How long a step takes, and why, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Bound = Literal["arithmetic", "memory bandwidth", "host"]


@dataclass(frozen=True, slots=True)
class Time:
    """One optimizer step (in inference, one forward), in seconds.

    ``interval_seconds``: holds in 9 of 10 cases like those that the clock was held against.  ``bound_by``: ``host``
    where issuing the work takes longer than doing it; else what most of the GPU's time goes into.  ``gpu_seconds``:
    kernels at work; ``host_seconds``: the host at work; ``phases``: the GPU's seconds by phase.

    ``flop``: by PyTorch's formulas, recomputation included.  Utilisation: the time that the model's FLOP (without
    recomputation) would take at a rate, over the step's: at the data sheet's peak of each precision (MFU), and at the
    rate that large matrix products are known to attain.  ``None`` where nothing has a formula, the latter also where
    nobody published what a precision attains.
    """

    step_seconds: float
    interval_seconds: tuple[float, float]
    samples_per_second: float
    tokens_per_second: float | None
    bound_by: Bound
    gpu_seconds: float
    host_seconds: float
    phases: dict[str, float]
    flop: int
    flop_per_second: float
    model_flop_utilisation: float | None
    attainable_utilisation: float | None
    launches: int
    priced_by: str
    host: str
    general_rule_only: tuple[str, ...]
