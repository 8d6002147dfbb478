"""Processors, memory and limits of the host."""

from __future__ import annotations

from collections.abc import Iterator

from trainatomy.doctor.checks.finding import finding
from trainatomy.results.diagnosis import Finding
from trainatomy.results.machine import Host, MachineState

BUSY_SHARE = 0.5
SHORT_SHARE = 0.1
THROTTLED_SHARE = 0.01
SMALL_SHM_BYTES = 64 * 1024**2
"""Docker's default size of /dev/shm."""

_SCALING_DRIVERS = ("intel_pstate", "amd-pstate-epp")
"""Drivers (in their active mode) that raise the clocks under load with the governor powersave too."""


def check_host(machine: MachineState) -> Iterator[Finding]:
    """Yield what is wrong with the host."""
    host = machine.host
    yield from _processors(machine)
    yield from _memory(host)
    yield from _shared_memory(host)
    if host.infiniband and host.memlock_bytes is not None and host.memlock_bytes >= 0:
        yield finding("memlock_small", limit_bytes=host.memlock_bytes, devices=", ".join(host.infiniband))
    if host.governor and host.governor[0] == "powersave" and host.governor[1] not in _SCALING_DRIVERS:
        yield finding("powersave", driver=host.governor[1])


def usable_cpus(host: Host) -> float | None:
    """Return how many processors this process can use: its affinity and the quota of its control group."""
    known = [count for count in (host.usable_cpus and len(host.usable_cpus), host.cpu_quota) if count]
    return min(known) if known else host.cpus


def _processors(machine: MachineState) -> Iterator[Finding]:
    host = machine.host
    usable = usable_cpus(host)
    busy = None if host.busy_cpus is None else host.busy_cpus - ((machine.watched and machine.watched.pid_cpus) or 0)
    if usable and busy is not None and host.cpus and busy > BUSY_SHARE * host.cpus:
        names = ", ".join(f"{each.name} ({each.pid})" for each in host.busiest)
        yield finding("host_busy", busy=round(busy, 1), cpus=host.cpus, names=names or None)
    if host.throttled_share and host.throttled_share >= THROTTLED_SHARE:
        yield finding("cpu_throttled", share=host.throttled_share, quota=host.cpu_quota)
    elif host.cpu_quota and host.usable_cpus and host.cpu_quota < len(host.usable_cpus):
        yield finding("cpu_quota", quota=host.cpu_quota, cpus=len(host.usable_cpus))


def _memory(host: Host) -> Iterator[Finding]:
    limit, used = host.memory_limit_bytes, host.memory_used_bytes
    if limit and host.memory_bytes and limit < host.memory_bytes and used is not None:
        free, total, where = limit - used, limit, "control group"
    elif host.memory_bytes and host.available_bytes is not None:
        free, total, where = host.available_bytes, host.memory_bytes, "machine"
    else:
        return
    if free < SHORT_SHARE * total:
        yield finding("memory_short", free_bytes=max(0, free), total_bytes=total, where=where)
    if host.swapped_pages:
        yield finding("swapping", pages=host.swapped_pages, used_bytes=host.swap_used_bytes)


def _shared_memory(host: Host) -> Iterator[Finding]:
    if host.shm_bytes is None:
        return
    if host.shm_bytes <= SMALL_SHM_BYTES:
        yield finding("shm_small", size_bytes=host.shm_bytes)
    elif host.shm_free_bytes is not None and host.shm_free_bytes < SHORT_SHARE * host.shm_bytes:
        yield finding("shm_full", free_bytes=host.shm_free_bytes, size_bytes=host.shm_bytes)
