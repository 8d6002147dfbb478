"""Checks of the host and of its software.

Processors, memory and limits of the host.

Driver and libraries: whether they fit each other and the GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from trainatomy.catalog.machines import extensions, minimum_driver, variable
from trainatomy.doctor.gpu_checks import finding
from trainatomy.results.machine import Finding, Host, MachineState, Software

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
    if host.oom_kills:
        yield finding("group_killed", count=host.oom_kills)
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


_ARCHITECTURE = re.compile(r"^(?P<kind>sm|compute)_(?P<major>\d+)(?P<minor>\d)(?P<suffix>[af]?)$")
_AMPERE = (8, 0)
_PACKAGES = {"cudnn": "nvidia-cudnn-cu", "nccl": "nvidia-nccl-cu"}
_BUILDS = (((13, 0), "cu130"), ((12, 0), "cu126"))
"""Builds of torch 2.11 by the oldest CUDA of their driver (pytorch.org/get-started/locally)."""

_MISMATCH = "version mismatch"


def check_software(machine: MachineState) -> Iterator[Finding]:
    """Yield what is wrong with the software."""
    software = machine.software
    yield from _driver(machine)
    if machine.gpus:
        yield from _torch(software)
        yield from _kernels(machine)
        yield from _settings(machine)
        yield from _fallbacks(software)
    yield from _extensions(software)
    yield from _versions(software)
    yield from _environment(software)


def _driver(machine: MachineState) -> Iterator[Finding]:
    software = machine.software
    if software.driver is not None or not software.driver_error:
        return
    if _MISMATCH in software.driver_error.lower():
        yield finding("driver_mismatch", error=software.driver_error)
    elif machine.host.nvidia_devices and "nvidia-ml-py" in software.driver_error:
        yield finding("binding_missing")
    elif machine.host.nvidia_devices:
        yield finding("driver_missing", devices=machine.host.nvidia_devices, error=software.driver_error)
    elif machine.host.amd_devices:
        yield finding("amd_gpu", devices=machine.host.amd_devices)
    else:
        yield finding("no_gpu", error=software.driver_error)


def _torch(software: Software) -> Iterator[Finding]:
    if software.torch and software.torch_cuda is None and not software.cuda_error:
        yield finding("torch_without_cuda", torch=software.torch, build=_build_for(software))
        return
    cuda = version(software.torch_cuda)
    driver = version(software.driver)
    oldest = minimum_driver(cuda[0]) if cuda else None
    if driver and oldest and driver[0] < oldest:
        yield finding("driver_too_old", driver=software.driver, needed=oldest, cuda=software.torch_cuda)
    elif software.cuda_error:
        yield finding("cuda_fails", error=software.cuda_error)
    elif cuda and software.driver_cuda and cuda[:2] > software.driver_cuda:
        knows = ".".join(map(str, software.driver_cuda))
        yield finding("driver_older", driver=software.driver, knows=knows, cuda=software.torch_cuda)


def _build_for(software: Software) -> str:
    """Return the build of torch that the driver runs."""
    newest = software.driver_cuda or (0, 0)
    return next((build for oldest, build in _BUILDS if newest >= oldest), _BUILDS[-1][1])


def _kernels(machine: MachineState) -> Iterator[Finding]:
    """Yield GPUs for which torch has no binary code."""
    architectures = machine.software.architectures
    if not architectures:
        return
    listed = ", ".join(architectures)
    for gpu in machine.gpus:
        if gpu.capability is None or has_binary(gpu.capability, architectures):
            continue
        name = "ptx_only" if has_ptx(gpu.capability, architectures) else "no_kernels"
        yield finding(name, gpu.index, capability="{}.{}".format(*gpu.capability), listed=listed)


def has_binary(capability: tuple[int, int], architectures: tuple[str, ...]) -> bool:
    """Return whether binary code runs: of the same major capability and no newer; ``sm_90a`` on 9.0 alone."""
    for kind, major, minor, suffix in _parsed(architectures):
        if kind != "sm" or major != capability[0]:
            continue
        if minor == capability[1] or (minor < capability[1] and suffix != "a"):
            return True
    return False


def has_ptx(capability: tuple[int, int], architectures: tuple[str, ...]) -> bool:
    """Return whether the driver can compile code for the GPU: PTX of the same or an older capability."""
    return any(
        kind == "compute" and (major, minor) <= capability and not suffix
        for kind, major, minor, suffix in _parsed(architectures)
    )


def _parsed(architectures: tuple[str, ...]) -> Iterator[tuple[str, int, int, str]]:
    for match in filter(None, map(_ARCHITECTURE.match, architectures)):
        yield match["kind"], int(match["major"]), int(match["minor"]), match["suffix"]


def _settings(machine: MachineState) -> Iterator[Finding]:
    software = machine.software
    newer = [gpu.index for gpu in machine.gpus if gpu.capability and gpu.capability >= _AMPERE]
    if software.torch_cuda is None or software.cuda_error:
        return
    if newer and software.matmul_tf32 is False:
        yield finding("tf32_off", *newer)
    if newer and software.flash_attention is False:
        yield finding("no_flash_attention", *newer)
    if "triton" not in software.versions:
        yield finding("no_triton")


def _versions(software: Software) -> Iterator[Finding]:
    for package, wanted in software.required.items():
        installed = software.versions.get(package)
        if installed is not None and installed != wanted:
            yield finding("other_versions", package=package, installed=installed, wanted=wanted, torch=software.torch)
    for library, prefix in _PACKAGES.items():
        loaded = software.loaded.get(library)
        for package, version_installed in software.versions.items():
            if loaded and package.startswith(prefix) and not same_version(loaded, version_installed):
                yield finding("other_library", library=library, loaded=loaded, installed=version_installed)
    yield from _bitsandbytes(software)


def _bitsandbytes(software: Software) -> Iterator[Finding]:
    """Yield a missing library of bitsandbytes: any of torch's major version serves."""
    cuda = version(software.torch_cuda)
    if cuda is None or software.bitsandbytes is None:
        return
    if not any(one.split(".")[0] == str(cuda[0]) for one in software.bitsandbytes):
        available = ", ".join(software.bitsandbytes) or "none"
        yield finding("bitsandbytes_cuda", cuda=software.torch_cuda, available=available)


def same_version(loaded: str, installed: str) -> bool:
    """Return whether a library's own number (cuDNN: 91002 for 9.10.2) is that of the package (9.10.2.21)."""
    if loaded.isdigit() and len(loaded) >= 4:
        number = int(loaded)
        major = number // 10000 if number >= 90000 else number // 1000
        rest = number % (10000 if number >= 90000 else 1000)
        loaded = f"{major}.{rest // 100}.{rest % 100}"
    wanted = version(installed) or ()
    return (version(loaded) or ())[:3] == wanted[:3]


def version(text: str | None) -> tuple[int, ...] | None:
    """Return the leading numbers of a version: ``580.159.04`` -> (580, 159, 4)."""
    numbers = re.match(r"\d+(?:\.\d+)*", text or "")
    return tuple(map(int, numbers[0].split("."))) if numbers else None


def _extensions(software: Software) -> Iterator[Finding]:
    for extension in software.extensions:
        if extension.error:
            yield finding("extension_broken", package=extension.name, version=extension.version, error=extension.error)


def _fallbacks(software: Software) -> Iterator[Finding]:
    if software.missing:
        models = [model for one in extensions() if one.package in software.missing for model in one.models]
        yield finding("slow_fallback", packages=", ".join(software.missing), models=", ".join(dict.fromkeys(models)))


def _environment(software: Software) -> Iterator[Finding]:
    for name, value in software.environment.items():
        known = variable(name, value)
        if known is not None:
            undo = "" if known.severity == "note" else f"unset {name}"  # notes are mostly set on purpose
            found = finding("environment", variable=name, value=value, effect=known.effect, undo=undo)
            yield replace(found, severity=known.severity, costs=known.costs)
    current, older = software.environment.get("PYTORCH_ALLOC_CONF"), software.environment.get("PYTORCH_CUDA_ALLOC_CONF")
    if current and older and current != older:
        yield finding("two_allocator_settings", current=current, older=older)
