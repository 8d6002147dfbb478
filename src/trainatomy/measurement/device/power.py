"""Sample the power, clock and temperature of a GPU on a thread of its own, through NVML.

NVML's functions release Python's lock while the driver answers, so that a reading delays the training's thread only for
the Python around it.  The thread reads every ``PERIOD`` seconds, and less often where a reading takes longer than
``SHARE`` of that.  The energy counter is read once in ``COUNTER_PERIOD`` seconds, and at both ends: on an H200 it takes
2.5 ms to read, where every other figure takes 2 us (lab/timing/records/h200-monitors.jsonl).
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from trainatomy.results.power import ClockReason, PowerLimits

if TYPE_CHECKING:
    from collections.abc import Callable

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
