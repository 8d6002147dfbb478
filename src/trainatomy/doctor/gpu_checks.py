"""Checks of GPUs, of their links, and of a training that was watched.

Making a finding of a check's facts.

Power, heat, memory, modes and processes of GPUs.

PCIe, NVLink, and the ways between GPUs and to the host.

A training that was watched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainatomy.catalog.machines import findings
from trainatomy.results.machine import Finding, GPUPair, GPUState, MachineState, Watched, WatchedGPU
from trainatomy.results.measurement import ClockReason


def finding(name: str, *gpus: int, **values: str | int | float | None) -> Finding:
    """Return a finding with the severity and costs of the catalogue; values that are unknown are left out."""
    entry = findings()[name]
    known = {key: value for key, value in values.items() if value is not None}
    return Finding(name, entry.severity, gpus, known, entry.costs)


HOT = 84
"""Degrees from which on throttling is to be expected where the GPU names no limit (Hugging Face's guide: 84 to 90)."""

_THERMAL: tuple[ClockReason, ...] = ("thermal", "hardware thermal")
_POWER_TOLERANCE = 0.99
"""Limits that differ by rounding are equal."""


def check_gpus(machine: MachineState) -> Iterator[Finding]:
    """Yield what is wrong with each GPU."""
    for gpu in machine.gpus:
        yield from _power(gpu)
        yield from _slowdowns(gpu, active_reasons(machine, gpu))
        yield from _heat(machine, gpu)
        yield from _memory(gpu)
        yield from _modes(gpu)
        yield from _processes(machine, gpu)


def active_reasons(machine: MachineState, gpu: GPUState) -> set[ClockReason]:
    """Return what holds the clocks down: now, under the doctor's load, or while a training was watched."""
    found = set(gpu.power.reasons)
    if gpu.copies:
        found |= set(gpu.copies.power.reasons)
    for one in machine.watched.gpus if machine.watched else ():
        if one.index == gpu.index:
            found |= {name for name, share in one.reasons.items() if share > 0}
    return found


def _power(gpu: GPUState) -> Iterator[Finding]:
    limit, default = gpu.power.limit_watts, gpu.power.default_watts
    if limit and default and limit < _POWER_TOLERANCE * default:
        yield finding("power_limit", gpu.index, limit_watts=limit, default_watts=default, share=limit / default)


def _slowdowns(gpu: GPUState, reasons: set[ClockReason]) -> Iterator[Finding]:
    clocks = gpu.copies.clocks if gpu.copies else gpu.clocks
    if "power brake" in reasons:
        yield finding("power_brake", gpu.index, clock=clocks.sm, most=clocks.sm_max)
    if thermal := [name for name in _THERMAL if name in reasons]:
        yield finding("thermal_slowdown", gpu.index, reasons=", ".join(thermal), celsius=gpu.temperature.now)
    if "hardware slowdown" in reasons and "power brake" not in reasons and not thermal:
        yield finding("hardware_slowdown", gpu.index, clock=clocks.sm, most=clocks.sm_max)
    if "clock setting" in reasons:
        yield finding("clocks_limited", gpu.index, clock=clocks.sm, most=clocks.sm_max)


def _heat(machine: MachineState, gpu: GPUState) -> Iterator[Finding]:
    limit = gpu.temperature.highest or HOT
    watched = [one.hottest for one in (machine.watched.gpus if machine.watched else ()) if one.index == gpu.index]
    now = max((each for each in (gpu.temperature.now, *watched) if each is not None), default=0)
    if now >= limit:
        yield finding("hot", gpu.index, celsius=now, limit=limit)


def _memory(gpu: GPUState) -> Iterator[Finding]:
    memory = gpu.memory
    if memory.uncorrected:
        yield finding("memory_errors", gpu.index, errors=memory.uncorrected)
    if memory.repair_failed:
        yield finding("repair_failed", gpu.index)
    elif memory.repair_pending:
        yield finding("repair_pending", gpu.index)
    elif repaired := (memory.remapped_rows or 0) + (memory.retired_pages or 0):
        yield finding("repaired", gpu.index, repaired=repaired)
    if memory.ecc is not None and memory.ecc_pending is not None and memory.ecc != memory.ecc_pending:
        yield finding("ecc_pending", gpu.index, now="on" if memory.ecc else "off")


def _modes(gpu: GPUState) -> Iterator[Finding]:
    if gpu.persistence is False:
        yield finding("persistence_off", gpu.index)
    if gpu.compute_mode == "prohibited":
        yield finding("compute_prohibited", gpu.index)
    if gpu.compute_mode == "exclusive process":
        yield finding("compute_exclusive", gpu.index)
    if gpu.mig:
        yield finding("mig", gpu.index)


def _processes(machine: MachineState, gpu: GPUState) -> Iterator[Finding]:
    """Yield other processes on the GPU; the watched training is expected there."""
    if machine.watched is not None or not gpu.processes:
        return
    names = ", ".join(f"{each.name or 'process'} ({each.pid})" for each in gpu.processes[:3])
    held = sum(each.bytes or 0 for each in gpu.processes)
    yield finding("gpu_in_use", gpu.index, count=len(gpu.processes), names=names, held_bytes=held or None)


LANE_BYTES_PER_SECOND = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Payload of one PCIe lane each way, by generation (PCI-SIG; less the coding of each generation)."""

SLOW_SHARE = 0.5
"""Copies below this share of the link's rate are called slow; pinned ones reach 0.8 to 0.9 of it on idle machines."""

_HOST_COPIES = ("pinned_to_device", "device_to_pinned")


def check_links(machine: MachineState) -> Iterator[Finding]:
    """Yield what is wrong with links."""
    for gpu in machine.gpus:
        yield from _nvlink(gpu)
        yield from _pcie(gpu)
        yield from _copies(gpu)
    yield from _pairs(machine.pairs)
    yield from _slow_pairs(machine)
    yield from _far_processors(machine)


def _nvlink(gpu: GPUState) -> Iterator[Finding]:
    links = gpu.nvlinks
    if links.active and links.inactive:
        down = ", ".join(map(str, links.inactive))
        yield finding(
            "nvlink_down", gpu.index, down=down, active=len(links.active), all=len(links.active + links.inactive)
        )
    if sum(links.errors.get(kind, 0) for kind in ("replay", "recovery")):  # healthy links count CRC errors too
        yield finding("nvlink_errors", gpu.index, **links.errors)
    if links.fabric in ("not started", "in progress"):
        yield finding("fabric_not_ready", gpu.index, state=links.fabric)


def _pcie(gpu: GPUState) -> Iterator[Finding]:
    loaded = gpu.copies.pcie if gpu.copies else None
    width = loaded.width if loaded and loaded.width else gpu.pcie.width
    if width and gpu.pcie.max_width and width < gpu.pcie.max_width:
        yield finding("pcie_narrow", gpu.index, width=width, most=gpu.pcie.max_width)
    most = gpu.pcie.max_generation
    if loaded and loaded.generation and most and loaded.generation < most:
        yield finding("pcie_slow", gpu.index, generation=loaded.generation, most=most)
    if most and gpu.pcie.gpu_generation and most < gpu.pcie.gpu_generation:
        yield finding("pcie_slot", gpu.index, slot=most, gpu=gpu.pcie.gpu_generation)
    if gpu.copies and gpu.copies.replays:
        yield finding("pcie_replays", gpu.index, replays=gpu.copies.replays)


def _copies(gpu: GPUState) -> Iterator[Finding]:
    """Yield copies that are slower than the link that they took."""
    if gpu.copies is None:
        return
    expected = link_rate(gpu.copies.pcie.generation, gpu.copies.pcie.width)
    found = [gpu.copies.rates[way] for way in _HOST_COPIES if way in gpu.copies.rates]
    if expected and found and min(found) < SLOW_SHARE * expected:
        yield finding("slow_copies", gpu.index, rate=min(found), expected_rate=expected)


def link_rate(generation: int | None, width: int | None) -> float | None:
    """Return bytes per second each way of a PCIe link."""
    lane = LANE_BYTES_PER_SECOND.get(generation or 0)
    return lane * width if lane and width else None


def _pairs(pairs: tuple[GPUPair, ...]) -> Iterator[Finding]:
    without = [pair for pair in pairs if pair.peer_access is False]
    if without:
        yield finding("no_peer_access", *_members(without), pairs=_named(without))
    far = [pair for pair in pairs if pair.connection in ("SYS", "NODE")]
    if far:
        yield finding("far_gpus", *_members(far), pairs=_named(far), connection=_connections(far))
    near = [pair for pair in pairs if pair.connection in ("PHB", "PXB", "PIX")]
    if near:
        yield finding("pcie_only", *_members(near), pairs=_named(near), connection=_connections(near))


def _slow_pairs(machine: MachineState) -> Iterator[Finding]:
    """Yield pairs with NVLink that copy at less than half of what their links have together."""
    gpus = {gpu.index: gpu for gpu in machine.gpus}
    for pair in machine.pairs:
        links = re.fullmatch(r"NV(\d+)", pair.connection or "")
        gpu = gpus.get(pair.first)
        if links is None or gpu is None or pair.copy_rate is None:
            continue
        expected = int(links[1]) * _nvlink_rate(gpu)
        if pair.copy_rate < SLOW_SHARE * expected:
            shown = {"rate": pair.copy_rate, "expected_rate": expected}
            yield finding("slow_pair", *_members([pair]), pairs=_named([pair]), connection=pair.connection, **shown)


def _nvlink_rate(gpu: GPUState) -> float:
    """Return bytes per second each way of one NVLink, as the data sheets give it."""
    if gpu.capability == (8, 6):
        return 14e9
    return 50e9 if (gpu.nvlinks.generation or 0) >= 5 else 25e9


def _members(pairs: list[GPUPair]) -> tuple[int, ...]:
    return tuple(sorted({index for pair in pairs for index in (pair.first, pair.second)}))


def _named(pairs: list[GPUPair]) -> str:
    return ", ".join(f"{pair.first}-{pair.second}" for pair in pairs)


def _connections(pairs: list[GPUPair]) -> str:
    return ", ".join(sorted({pair.connection or "" for pair in pairs}))


def _far_processors(machine: MachineState) -> Iterator[Finding]:
    """Yield GPUs whose NUMA node has none of the processors that this process may use."""
    usable = machine.host.usable_cpus
    for gpu in machine.gpus:
        if usable and gpu.near_cpus and not set(usable) & set(gpu.near_cpus):
            yield finding("far_processors", gpu.index, near=ranges(gpu.near_cpus), usable=ranges(usable))


def ranges(numbers: tuple[int, ...]) -> str:
    """Write numbers as taskset does: ``0-3,8``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


LOW_UTILISATION = 0.8
CAPPED_SHARE = 0.1
SLOWED = 0.95
"""Clocks above this share of the maximum lose nothing that matters: short bursts reach the cap at 250 of 700 W too."""


def check_training(machine: MachineState) -> Iterator[Finding]:
    """Yield what is wrong with the training that was watched."""
    watched = machine.watched
    if watched is None:
        return
    if watched.pid is not None and not any(gpu.pid_bytes for gpu in watched.gpus):
        yield finding("pid_not_found", pid=watched.pid)
    highest = {gpu.index: gpu.clocks.sm_max for gpu in machine.gpus}
    for gpu in _its_gpus(watched):
        if gpu.utilisation is not None and gpu.utilisation < LOW_UTILISATION:
            yield finding(
                "gpu_waits", gpu.index, utilisation=gpu.utilisation, cpus=watched.pid_cpus, seconds=watched.seconds
            )
        share, most = gpu.reasons.get("power cap", 0), highest.get(gpu.index)
        if share >= CAPPED_SHARE and (not most or not gpu.sm_clock or gpu.sm_clock <= SLOWED * most):
            yield finding("power_capped", gpu.index, share=share, watts=gpu.watts, clock=gpu.sm_clock, most=most)


def _its_gpus(watched: Watched) -> list[WatchedGPU]:
    """Return the GPUs that the training uses: all with memory of its process, or those in use where NVML hides it."""
    if own := [gpu for gpu in watched.gpus if gpu.pid_bytes]:
        return own
    return [gpu for gpu in watched.gpus if gpu.utilisation]
