"""Sample the power, clock and temperature of a GPU on a thread of its own, through NVML.

NVML's functions release Python's lock while the driver answers, so that a reading delays the training's thread only for
the Python around it.  The thread reads every ``PERIOD`` seconds, and less often where a reading takes longer than
``SHARE`` of that.  The energy counter is read once in ``COUNTER_PERIOD`` seconds, and at both ends: on an H200 it takes
2.5 ms to read, where every other figure takes 2 us (lab/timing/records/h200-monitors.jsonl).

Energy and slowdowns of a run, from the readings of its GPU and the times of its steps.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any, get_args

from trainatomy.lookup import on_line
from trainatomy.results.measurement import ClockReason, PowerLimits, PowerSample, PowerUse, Slowdown

if TYPE_CHECKING:
    from trainatomy.measurement.device.nvml import NvmlDevice


PERIOD = 0.05
COUNTER_PERIOD = 1.0
SHARE = 0.01
"""Share of the time that readings may take."""
MOST_READINGS = 600
"""Readings kept: beyond, every second one is dropped, and the thread reads half as often."""


@dataclass(frozen=True, slots=True)
class PowerReading:
    """One reading.

    ``at``: ``time.perf_counter()``; ``joules``: the GPU's counter since the driver was loaded, if it was read.
    """

    at: float
    watts: float | None
    joules: float | None
    clock_mhz: int | None
    celsius: int | None
    reasons: tuple[ClockReason, ...]


def read_power(device: NvmlDevice, *, counted: bool = True) -> PowerReading:
    """Read the GPU now, with its energy counter if ``counted``.

    What it does not report, as a MIG instance does not, is ``None``.
    """
    nvml, handle = device.binding, device.handle
    milliwatts = device.ask("GetPowerUsage")
    millijoules = device.ask("GetTotalEnergyConsumption") if counted else None
    clock = device.ask("GetClockInfo", getattr(nvml, "NVML_CLOCK_SM", 1))
    return PowerReading(
        at=time.perf_counter(),
        watts=None if milliwatts is None else milliwatts / 1000,
        joules=None if millijoules is None else millijoules / 1000,
        clock_mhz=None if clock is None else int(clock),
        celsius=_temperature(device),
        reasons=clock_reasons(device) if handle is not None else (),
    )


def read_limits(device: NvmlDevice) -> PowerLimits:
    """Read the GPU's limits of power, clock and temperature."""
    nvml = device.binding
    limit = device.ask("GetEnforcedPowerLimit")
    default = device.ask("GetPowerManagementDefaultLimit")
    clock = device.ask("GetMaxClockInfo", getattr(nvml, "NVML_CLOCK_SM", 1))
    slowdown = getattr(nvml, "NVML_TEMPERATURE_THRESHOLD_SLOWDOWN", 1)
    celsius = device.ask("GetTemperatureThreshold", slowdown)
    return PowerLimits(
        watts=None if limit is None else limit / 1000,
        default_watts=None if default is None else default / 1000,
        clock_mhz=None if clock is None else int(clock),
        celsius=None if celsius is None else int(celsius),
    )


def clock_reasons(device: NvmlDevice) -> tuple[ClockReason, ...]:
    """Return why the clock is below its maximum: bit ``n`` of NVML's mask is the ``n``-th of ``ClockReason``."""
    mask = device.ask("GetCurrentClocksEventReasons")
    if mask is None:  # the name before driver 535
        mask = device.ask("GetCurrentClocksThrottleReasons") or 0
    return tuple(reason for bit, reason in enumerate(get_args(ClockReason)) if int(mask) >> bit & 1)


def _temperature(device: NvmlDevice) -> int | None:
    found = device.ask("GetTemperature", getattr(device.binding, "NVML_TEMPERATURE_GPU", 0))
    return None if found is None else int(found)


class PowerSampler:
    """Reader of a GPU on a thread from ``start`` to ``stop``.

    Attributes:
        readings: What was read, in order.
        limits: The GPU's limits.
        period_seconds: Time from one reading to the next.
        reading_seconds: Mean time that a reading took.
    """

    def __init__(self, device: NvmlDevice, period: float = PERIOD, most: int = MOST_READINGS) -> None:
        self._device, self._most = device, most
        self.period_seconds = period
        self.readings: list[PowerReading] = []
        self.limits = PowerLimits()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainatomy-power", daemon=True)
        self._spent, self._count, self._counter_read = 0.0, 0, 0.0

    @property
    def reading_seconds(self) -> float:
        """Mean time that a reading took."""
        return self._spent / self._count if self._count else 0.0

    def start(self) -> None:
        """Take the first reading and start the thread."""
        self.limits = read_limits(self._device)
        self._read()
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and take the last reading."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
            self._read()

    def _run(self) -> None:
        while not self._stopped.wait(max(self.period_seconds, self.reading_seconds / SHARE)):
            self._read(counted=time.perf_counter() - self._counter_read >= COUNTER_PERIOD)
            if len(self.readings) > self._most:
                del self.readings[1::2]
                self.period_seconds *= 2

    def _read(self, *, counted: bool = True) -> None:
        began = time.perf_counter()
        self._counter_read = began if counted else self._counter_read
        self.readings.append(read_power(self._device, counted=counted))
        self._spent += time.perf_counter() - began
        self._count += 1


def sampler_of(device: NvmlDevice | None, make: Callable[[NvmlDevice], PowerSampler] = PowerSampler) -> Any:
    """Return a sampler of the GPU; ``None`` where NVML reports no power of it (no driver, a MIG instance)."""
    if device is None:
        return None
    reading = read_power(device)
    return None if reading.watts is None and reading.clock_mhz is None else make(device)


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
