"""Read a GPU's power, clocks, temperature, memory errors and modes through NVML.

Each function reads one value of ``results.machine`` and can be called as often as wanted; a figure that the GPU, the
driver or the container does not report is ``None``.  Nothing here initialises CUDA or changes a setting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainatomy.measurement.device.power import read_limits, read_power
from trainatomy.results.machine import Clocks, MemoryHealth, Power, Temperature

if TYPE_CHECKING:
    from trainatomy.measurement.device.nvml import NvmlDevice

_SM, _MEMORY = 1, 2
_SHUTDOWN, _SLOWDOWN, _HIGHEST = 0, 1, 3
_CORRECTED, _UNCORRECTED, _SINCE_LOAD = 0, 1, 0
_COMPUTE_MODES = {0: "default", 1: "exclusive process", 2: "prohibited", 3: "exclusive process"}


def power(gpu: NvmlDevice) -> Power:
    """Return draw, limits and clock reasons now."""
    reading, limits = read_power(gpu), read_limits(gpu)
    return Power(reading.watts, limits.watts, limits.default_watts, reading.reasons, reading.joules)


def clocks(gpu: NvmlDevice) -> Clocks:
    """Return the clocks now and their maximum."""
    return Clocks(
        sm=gpu.ask("GetClockInfo", _SM),
        sm_max=gpu.ask("GetMaxClockInfo", _SM),
        memory=gpu.ask("GetClockInfo", _MEMORY),
        memory_max=gpu.ask("GetMaxClockInfo", _MEMORY),
    )


def temperature(gpu: NvmlDevice) -> Temperature:
    """Return the temperature now and its limits."""
    return Temperature(
        now=gpu.ask("GetTemperature", 0),
        highest=gpu.ask("GetTemperatureThreshold", _HIGHEST),
        slowdown=gpu.ask("GetTemperatureThreshold", _SLOWDOWN),
        shutdown=gpu.ask("GetTemperatureThreshold", _SHUTDOWN),
    )


def memory_health(gpu: NvmlDevice) -> MemoryHealth:
    """Return errors of the memory, and what was done about them."""
    mode = gpu.ask("GetEccMode")
    rows = gpu.ask("GetRemappedRows")  # corrected, uncorrected, pending, failed
    pages = [gpu.ask("GetRetiredPages", cause) for cause in (0, 1)]
    known = [len(found) for found in pages if found is not None]
    waiting = gpu.ask("GetRetiredPagesPendingStatus")
    pending = [bool(each) for each in (waiting, rows[2] if rows else None) if each is not None]
    return MemoryHealth(
        ecc=bool(mode[0]) if mode else None,
        ecc_pending=bool(mode[1]) if mode else None,
        corrected=gpu.ask("GetTotalEccErrors", _CORRECTED, _SINCE_LOAD),
        uncorrected=gpu.ask("GetTotalEccErrors", _UNCORRECTED, _SINCE_LOAD),
        retired_pages=sum(known) if known else None,
        remapped_rows=rows[1] if rows else None,
        repair_pending=any(pending) if pending else None,
        repair_failed=bool(rows[3]) if rows else None,
    )


def compute_mode(gpu: NvmlDevice) -> str | None:
    """Return which processes may use the GPU."""
    return _COMPUTE_MODES.get(gpu.ask("GetComputeMode"))


def is_on(gpu: NvmlDevice, name: str) -> bool | None:
    """Return whether a mode (``PersistenceMode``, ``MigMode``) is on."""
    found = gpu.ask(f"Get{name}")
    if isinstance(found, list | tuple):  # now and after the next reset
        found = found[0]
    return None if found is None else bool(found)


def utilisation(gpu: NvmlDevice) -> float | None:
    """Return the share of the last sample period in which a kernel ran."""
    found = gpu.ask("GetUtilizationRates")
    return None if found is None else found.gpu / 100
