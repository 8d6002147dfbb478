"""PCIe, NVLink, and the ways between GPUs and to the host."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainatomy.doctor.checks.finding import finding
from trainatomy.results.diagnosis import Finding
from trainatomy.results.machine import GPUPair, GPUState, MachineState

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
