"""Power, clock and heat of a GPU while a training ran on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ClockReason = Literal[
    "idle",
    "clock setting",
    "power cap",
    "hardware slowdown",
    "sync boost",
    "thermal",
    "hardware thermal",
    "power brake",
    "display clock setting",
]
"""Why the driver lowers the clock, as NVML's bits of clock event reasons say it, in the order of the bits."""


@dataclass(frozen=True, slots=True)
class PowerSample:
    """A reading of the GPU; ``None``: the driver does not report it.

    Attributes:
        seconds: Time since the first timed step began.
        watts: Power draw.
        clock_mhz: Clock of the multiprocessors.
        celsius: Temperature.
        reasons: Why the clock was below its maximum.
    """

    seconds: float
    watts: float | None
    clock_mhz: int | None
    celsius: int | None
    reasons: tuple[ClockReason, ...] = ()


@dataclass(frozen=True, slots=True)
class Slowdown:
    """A stretch of the run in which the driver lowered the clock.

    Attributes:
        reason: Why.
        first_step: First step in it, from 0.
        last_step: Last step in it.
        time_share: Its share of the timed seconds.
        clock_loss: Mean clock in it below the maximum, as a share of the maximum; ``None``: not known.
    """

    reason: ClockReason
    first_step: int
    last_step: int
    time_share: float
    clock_loss: float | None


@dataclass(frozen=True, slots=True)
class PowerLimits:
    """Limits of the GPU; ``None``: the driver does not report it."""

    watts: float | None = None
    default_watts: float | None = None
    clock_mhz: int | None = None
    celsius: int | None = None


@dataclass(frozen=True, slots=True)
class PowerUse:
    """Power of the whole GPU during the timed steps, sampled by a thread.

    Attributes:
        seconds: Duration of the timed steps.
        joules: Energy in them; ``None``: the run was too short, or the driver reports none.
        counted: The energy is that of the GPU's counter; otherwise it is the integral of the sampled power.
        joules_per_sample: Energy of one training sample.
        joules_per_token: Energy of one token; ``None`` if samples are not text.
        limits: The GPU's limits.
        slowdowns: Where the driver lowered the clock.
        samples: The readings; of a long run every second, fourth … one.
        reading_seconds: Mean time that the thread took for a reading.
        period_seconds: Time from one reading to the next.
    """

    seconds: float
    joules: float | None
    counted: bool
    joules_per_sample: float | None
    joules_per_token: float | None
    limits: PowerLimits
    slowdowns: tuple[Slowdown, ...]
    samples: tuple[PowerSample, ...]
    reading_seconds: float
    period_seconds: float
