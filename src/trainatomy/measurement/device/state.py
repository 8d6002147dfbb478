"""Read a GPU's power, clocks, temperature, memory errors and modes through NVML.

Each function reads one value of ``results.machine`` and can be called as often as wanted; a figure that the GPU, the
driver or the container does not report is ``None``.  Nothing here initialises CUDA or changes a setting.

Read a GPU's links through NVML: PCIe, NVLink, the way to other GPUs and to the host's processors.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import byref
from typing import TYPE_CHECKING, Any

from trainatomy.measurement.device.power import read_limits, read_power
from trainatomy.results.machine import Clocks, GPUPair, MemoryHealth, NVLinks, PCIe, Power, Temperature

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


_ANCESTORS = {10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""Connections as ``nvidia-smi topo -m`` writes them, by NVML's nvmlGpuTopologyLevel_t."""

_ERRORS = {"replay": (0,), "recovery": (1,), "crc": (2, 3)}
"""Kinds of errors, by NVML's nvmlNvLinkErrorCounter_t."""

_GENERATIONS = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5}
"""NVLink's generation by NVML's number (nvml.h, NVML_NVLINK_VERSION_*: 1.0, 2.0, 2.2, 3.0, 3.1, 4.0, 5.0)."""

_FABRIC = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}
_LINKS = 18
"""NVML_NVLINK_MAX_LINKS: more than any GPU up to Blackwell has."""

_SWITCH = 2
_READ, _WRITE = 0, 1
_WORD = 64


def pcie(gpu: NvmlDevice) -> PCIe:
    """Return the PCIe link now, and what it can do."""
    return PCIe(
        generation=gpu.ask("GetCurrPcieLinkGeneration"),
        max_generation=gpu.ask("GetMaxPcieLinkGeneration"),
        gpu_generation=gpu.ask("GetGpuMaxPcieLinkGeneration"),
        width=gpu.ask("GetCurrPcieLinkWidth"),
        max_width=gpu.ask("GetMaxPcieLinkWidth"),
        replays=gpu.ask("GetPcieReplayCounter"),
    )


def nvlinks(gpu: NvmlDevice) -> NVLinks:
    """Return the NVLink links with their errors; none for a GPU that has none."""
    states = {link: gpu.ask("GetNvLinkState", link) for link in range(_LINKS)}
    active = tuple(link for link, state in states.items() if state == 1)
    errors = {kind: _errors(gpu, active, counters) for kind, counters in _ERRORS.items()}
    return NVLinks(
        active=active,
        inactive=tuple(link for link, state in states.items() if state == 0),
        generation=_GENERATIONS.get(gpu.ask("GetNvLinkVersion", active[0])) if active else None,
        errors={kind: count for kind, count in errors.items() if count is not None},
        fabric=_fabric(gpu),
    )


def _errors(gpu: NvmlDevice, links: tuple[int, ...], counters: tuple[int, ...]) -> int | None:
    counts = [gpu.ask("GetNvLinkErrorCounter", link, counter) for link in links for counter in counters]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _fabric(gpu: NvmlDevice) -> str | None:
    """Return the state of the GPU in the fabric of NVSwitch."""
    kind = getattr(gpu.binding, "c_nvmlGpuFabricInfo_v2_t", None)
    if kind is None:
        return None
    info = kind()
    return None if gpu.ask("GetGpuFabricInfoV", byref(info)) is None else _FABRIC.get(int(info.state))


def pairs(gpus: tuple[NvmlDevice, ...]) -> Iterator[GPUPair]:
    """Yield the connection of each two GPUs, numbered as in nvidia-smi."""
    to_switches = [_to_switches(gpu) for gpu in gpus]
    for first, gpu in enumerate(gpus):
        for second in range(first + 1, len(gpus)):
            other = gpus[second]
            links = min(to_switches[first], to_switches[second]) or _direct_links(gpu, other)
            level = gpu.ask("GetTopologyCommonAncestor", other.handle)
            connection = f"NV{links}" if links else _ANCESTORS.get(level)
            yield GPUPair(first, second, connection, _peer_access(gpu, other))


def _to_switches(gpu: NvmlDevice) -> int:
    """Return how many active links lead to a switch, and so to every other GPU that does the same."""
    links = (link for link in range(_LINKS) if gpu.ask("GetNvLinkState", link) == 1)
    return sum(gpu.ask("GetNvLinkRemoteDeviceType", link) == _SWITCH for link in links)


def _direct_links(gpu: NvmlDevice, other: NvmlDevice) -> int:
    """Return how many active links lead from one GPU to the other."""
    address = _address(other.ask("GetPciInfo"))
    if address is None:
        return 0
    links = (link for link in range(_LINKS) if gpu.ask("GetNvLinkState", link) == 1)
    return sum(_address(gpu.ask("GetNvLinkRemotePciInfo", link)) == address for link in links)


def _address(info: Any) -> tuple[int, int, int] | None:
    return None if info is None else (info.domain, info.bus, info.device)


def _peer_access(gpu: NvmlDevice, other: NvmlDevice) -> bool | None:
    states = [
        one.ask("GetP2PStatus", two.handle, what)
        for one, two in ((gpu, other), (other, gpu))
        for what in (_READ, _WRITE)
    ]
    return None if None in states else not any(states)


def near_cpus(gpu: NvmlDevice, cpus: int) -> tuple[int, ...] | None:
    """Return the numbers of the processors on the GPU's NUMA node, of the host's ``cpus``."""
    words = gpu.ask("GetCpuAffinity", -(-cpus // _WORD))
    if words is None:
        return None
    return tuple(number for number in range(cpus) if words[number // _WORD] >> (number % _WORD) & 1)
