"""Energy and slowdowns of a run, from the readings of its GPU and the times of its steps."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from trainatomy.lookup import on_line
from trainatomy.results.power import ClockReason, PowerSample, PowerUse, Slowdown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainatomy.measurement.device.power import PowerReading, PowerSampler
    from trainatomy.results.power import PowerLimits

IGNORED: frozenset[ClockReason] = frozenset({"idle"})
"""Reasons that slow nothing down: an idle GPU has nothing to do."""
FEWEST_READINGS = 3
"""Readings within the timed steps below which energy is not computed: the counter moves in steps of its own."""
MERGED_READINGS = 2
"""Readings without a reason that do not end a stretch."""


def power_use(
    sampler: PowerSampler, began: float, ends: Sequence[float], first_step: int, samples: float, tokens: float | None
) -> PowerUse | None:
    """Return the power of a run; ``None`` where it has no timed step or no reading.

    Args:
        sampler: The stopped sampler.
        began: ``time.perf_counter()`` when the first timed step began.
        ends: End of each timed step in seconds since then.
        first_step: Number of the first timed step.
        samples: Samples of a step.
        tokens: Tokens of a step; ``None`` if samples are not text.
    """
    readings = list(sampler.readings)  # the thread may still add to them
    if not ends or not readings:
        return None
    duration = ends[-1]
    joules, counted = _joules(readings, began, began + duration)
    step_joules = None if joules is None else joules / len(ends)
    return PowerUse(
        seconds=duration,
        joules=joules,
        counted=counted,
        joules_per_sample=None if step_joules is None or not samples else step_joules / samples,
        joules_per_token=None if step_joules is None or not tokens else step_joules / tokens,
        limits=sampler.limits,
        slowdowns=slowdowns(readings, began, ends, first_step, sampler.limits),
        samples=tuple(_sample(reading, began) for reading in readings),
        reading_seconds=sampler.reading_seconds,
        period_seconds=sampler.period_seconds,
    )


def _sample(reading: PowerReading, began: float) -> PowerSample:
    return PowerSample(round(reading.at - began, 4), reading.watts, reading.clock_mhz, reading.celsius, reading.reasons)


def _joules(readings: Sequence[PowerReading], begin: float, end: float) -> tuple[float | None, bool]:
    """Return the energy between two instants, and whether it is the counter's; between readings it is interpolated."""
    if sum(begin <= reading.at <= end for reading in readings) < FEWEST_READINGS:
        return None, False
    counted = [(reading.at, reading.joules) for reading in readings if reading.joules is not None]
    if len(counted) > 1 and counted[0][0] <= begin:
        return on_line(counted, end, before=True, after=True) - on_line(counted, begin, before=True, after=True), True
    drawn = [(reading.at, reading.watts) for reading in readings if reading.watts is not None]
    if len(drawn) < FEWEST_READINGS:
        return None, False
    total, summed = 0.0, [(drawn[0][0], 0.0)]
    for (before, low), (after, high) in pairwise(drawn):
        total += (after - before) * (low + high) / 2
        summed.append((after, total))
    return on_line(summed, end, before=True, after=True) - on_line(summed, begin, before=True, after=True), False


def slowdowns(
    readings: Sequence[PowerReading], began: float, ends: Sequence[float], first_step: int, limits: PowerLimits
) -> tuple[Slowdown, ...]:
    """Return the stretches of the timed steps in which the driver lowered the clock, by reason, in order."""
    inside = [reading for reading in readings if 0 <= reading.at - began <= ends[-1]]
    found = []
    for reason in dict.fromkeys(reason for reading in inside for reason in reading.reasons if reason not in IGNORED):
        for first, last in _stretches([reason in reading.reasons for reading in inside]):
            stretch = inside[first : last + 1]
            steps = [min(bisect_left(ends, one.at - began), len(ends) - 1) for one in (stretch[0], stretch[-1])]
            clocks = [one.clock_mhz for one in stretch if one.clock_mhz is not None and reason in one.reasons]
            loss = max(1 - fmean(clocks) / limits.clock_mhz, 0.0) if clocks and limits.clock_mhz else None
            share = len(stretch) / len(inside)
            found.append(Slowdown(reason, first_step + steps[0], first_step + steps[1], share, loss))
    return tuple(sorted(found, key=lambda one: one.first_step))


def _stretches(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """Return first and last place of each run of true flags; short gaps do not end a run."""
    found: list[tuple[int, int]] = []
    for place, flag in enumerate(flags):
        if not flag:
            continue
        if found and place - found[-1][1] <= MERGED_READINGS + 1:
            found[-1] = (found[-1][0], place)
        else:
            found.append((place, place))
    return found
