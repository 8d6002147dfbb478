"""Power, heat, memory, modes and processes of GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from trainatomy.doctor.checks.finding import finding
from trainatomy.results.diagnosis import Finding
from trainatomy.results.machine import GPUState, MachineState
from trainatomy.results.power import ClockReason

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
