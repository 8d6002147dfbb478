"""Processors, memory and limits of the host: what /proc, /sys, the control groups and psutil say.

Versions of driver and libraries, and environment variables; with what the probe said about torch and CUDA.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from trainatomy.catalog.machines import extensions, variable
from trainatomy.doctor.gpus import DriverState
from trainatomy.libraries import LIBRARIES, version_of
from trainatomy.measurement.proc import group_memory, sizes_in
from trainatomy.results.machine import Extension, Host, Process, Software

_NVIDIA, _AMD = "0x10de", "0x1002"
_DISPLAY, _ACCELERATOR = "0x03", "0x12"
_CONTAINERS = {"/.dockerenv": "Docker", "/run/.containerenv": "Podman", "/singularity": "Apptainer"}
_BUSIEST = 3
_BUSY = 0.2
"""Processors that a process must use to be named."""


def read_host(seconds: float = 0.5, root: Path = Path("/")) -> Host:
    """Return the state of the host, whose processors are watched for some seconds.

    Args:
        seconds: How long the processors are watched.
        root: Where /proc, /sys, /dev and /run are.
    """
    swapped = _swapped(root)
    busy, busiest = _processors(seconds)
    return replace(
        _limits(root),
        busy_cpus=busy,
        busiest=busiest,
        swapped_pages=_less(_swapped(root), swapped),
        **_memory(root),
        **_shared_memory(root),
        memlock_bytes=_memlock(),
        container=next((name for path, name in _CONTAINERS.items() if (root / path[1:]).exists()), ""),
        infiniband=tuple(sorted(each.name for each in _folder(root / "sys/class/infiniband"))),
        nvidia_devices=_devices(root, _NVIDIA),
        amd_devices=_devices(root, _AMD),
        governor=_governor(root),
        huge_pages=_chosen(_text(root / "sys/kernel/mm/transparent_hugepage/enabled")),
    )


def _limits(root: Path) -> Host:
    """Return the processors that this process may use, and the limits of its control group."""
    group, memory = root / "sys/fs/cgroup", group_memory(root)
    affinity = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else None
    load = (_text(root / "proc/loadavg") or "").split()
    return Host(
        cpus=os.cpu_count(),
        usable_cpus=affinity,
        load=float(load[0]) if load else None,
        cpu_quota=_quota(group),
        throttled_share=_throttled(group),
        memory_limit_bytes=None if memory is None else memory.limit,
        memory_used_bytes=None if memory is None else memory.used - memory.cache,
        oom_kills=None if memory is None else memory.kills,
    )


def _quota(group: Path) -> float | None:
    """Return how many processors the control group grants; ``None`` where it sets no limit."""
    words = (_text(group / "cpu.max") or "").split()
    if not words:  # version 1
        quota, period = _number(group / "cpu/cpu.cfs_quota_us"), _number(group / "cpu/cpu.cfs_period_us")
    else:
        quota, period = (None if words[0] == "max" else int(words[0])), int(words[1])
    return quota / period if quota is not None and quota > 0 and period else None


def _throttled(group: Path) -> float | None:
    text = _text(group / "cpu.stat") or _text(group / "cpu/cpu.stat") or ""
    counts = dict(line.split()[:2] for line in text.splitlines() if len(line.split()) == 2)
    periods = int(counts.get("nr_periods", 0))
    return int(counts.get("nr_throttled", 0)) / periods if periods else None


def _memory(root: Path) -> dict[str, Any]:
    """Return memory and swap of /proc/meminfo in bytes."""
    sizes = sizes_in(root / "proc/meminfo")
    names = {"memory_bytes": "MemTotal", "available_bytes": "MemAvailable", "swap_bytes": "SwapTotal"}
    found = {name: sizes[key] for name, key in names.items() if key in sizes}
    if "SwapFree" in sizes and "SwapTotal" in sizes:
        found["swap_used_bytes"] = sizes["SwapTotal"] - sizes["SwapFree"]
    return found


def _shared_memory(root: Path) -> dict[str, Any]:
    with suppress(OSError, AttributeError):
        found = os.statvfs(root / "dev/shm")
        return {"shm_bytes": found.f_frsize * found.f_blocks, "shm_free_bytes": found.f_frsize * found.f_bavail}
    return {}


def _memlock() -> int | None:
    try:
        resource: Any = import_module("resource")
    except ImportError:  # Windows
        return None
    return int(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])


def _processors(seconds: float) -> tuple[float | None, tuple[Process, ...]]:
    """Return how many processors are in use, and the processes that use most of them, for some seconds."""
    try:
        psutil: Any = import_module("psutil")
    except ImportError:
        return None, ()
    before = _times(psutil)
    psutil.cpu_percent()
    time.sleep(seconds)
    busy = psutil.cpu_percent() / 100 * (os.cpu_count() or 1)
    used = {pid: (spent - before[pid][0]) / seconds for pid, (spent, _) in _times(psutil).items() if pid in before}
    most = sorted((pid for pid in used if used[pid] >= _BUSY), key=lambda pid: -used[pid])[:_BUSIEST]
    return busy, tuple(Process(pid, before[pid][1], cpus=round(used[pid], 2)) for pid in most)


def _times(psutil: Any) -> dict[int, tuple[float, str]]:
    """Return the processor time and name of every process but this one."""
    found = {}
    for process in psutil.process_iter(["cpu_times", "name"]):
        times = process.info["cpu_times"]
        if times is not None and process.pid != os.getpid():
            found[process.pid] = times.user + times.system, process.info["name"] or ""
    return found


def _swapped(root: Path) -> int | None:
    """Return how many pages were brought in from swap since the machine was started."""
    lines = (_text(root / "proc/vmstat") or "").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("pswpin ")), None)


def _less(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before


def _governor(root: Path) -> tuple[str, str] | None:
    folder = root / "sys/devices/system/cpu/cpu0/cpufreq"
    governor, driver = _text(folder / "scaling_governor"), _text(folder / "scaling_driver")
    return (governor.strip(), (driver or "").strip()) if governor else None


def _devices(root: Path, vendor: str) -> int | None:
    """Return how many display devices and accelerators of a vendor the PCI bus has."""
    devices = _folder(root / "sys/bus/pci/devices")
    if not devices:
        return None
    return sum(
        (_text(each / "vendor") or "").strip() == vendor
        and (_text(each / "class") or "").startswith((_DISPLAY, _ACCELERATOR))
        for each in devices
    )


def _chosen(text: str | None) -> str | None:
    """Return the word in brackets of ``always [madvise] never``."""
    return text.partition("[")[2].partition("]")[0] if text and "[" in text else None


def _folder(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def _number(path: Path) -> int | None:
    text = (_text(path) or "").strip()
    return int(text) if text.lstrip("-").isdigit() else None


_PINNED = re.compile(r"^(?P<name>nvidia-[\w-]+|triton)\s*==\s*(?P<version>[\w.+]+)")
_BITSANDBYTES = re.compile(r"libbitsandbytes_cuda(?P<major>\d\d)(?P<minor>\d+)")
_ALSO = ("triton", "kernels", "nvidia-ml-py")


def read_software(driver: DriverState, probed: Mapping[str, Any]) -> Software:
    """Return what is installed, with what ``doctor.probe`` said."""
    torch: Mapping[str, Any] = probed.get("torch", {})
    required = _required()
    names = (*LIBRARIES, *_ALSO, *required, *(each.package for each in extensions()))
    versions = {name: version for name in names if (version := version_of(name)) is not None}
    return Software(
        python=platform.python_version(),
        driver=driver.version,
        driver_cuda=driver.cuda,
        driver_error=driver.error,
        torch=torch.get("torch") or version_of("torch"),
        torch_cuda=torch.get("torch_cuda"),
        cuda_error=_cuda_error(probed),
        architectures=tuple(torch.get("architectures", ())),
        versions=versions,
        required=required,
        loaded=torch.get("loaded", {}),
        bitsandbytes=bitsandbytes_libraries(),
        extensions=_extensions(probed, versions),
        missing=tuple(each.package for each in extensions() if each.models and not _is_served(each.package, versions)),
        environment=environment(os.environ),
        flash_attention=torch.get("flash_attention"),
        matmul_tf32=torch.get("matmul_tf32"),
    )


def _cuda_error(probed: Mapping[str, Any]) -> str:
    """Return why CUDA does not start; the probe may have hung or died of it."""
    if "torch" not in probed:
        return "torch cannot be imported" if version_of("torch") else ""
    if probed.get("starting"):
        return "starting it does not end, or ends the process"
    error: str = probed["torch"].get("cuda_error", "")
    return error


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables whose values change memory or speed."""
    return {name: value for name, value in variables.items() if variable(name, value) is not None}


def bitsandbytes_libraries(folder: Path | None = None) -> tuple[str, ...] | None:
    """Return the CUDA versions that the installed bitsandbytes has a library for; ``None`` where it is not installed.

    Args:
        folder: Where the package is; found if it is left out.
    """
    if folder is None:
        try:
            folder = Path(str(metadata.distribution("bitsandbytes").locate_file("bitsandbytes")))
        except metadata.PackageNotFoundError:
            return None
    found = (_BITSANDBYTES.match(each.name) for each in sorted(folder.glob("libbitsandbytes_cuda*")))
    return tuple(f"{match['major']}.{match['minor']}" for match in found if match)


def _required() -> dict[str, str]:
    """Return the versions of NVIDIA's libraries and Triton that torch's package asks for."""
    try:
        wanted = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return {}
    matches = (_PINNED.match(each) for each in wanted if "extra ==" not in each)
    return {match["name"]: match["version"] for match in matches if match}


def _is_served(package: str, versions: Mapping[str, str]) -> bool:
    """Return whether a package or the one that serves instead is installed."""
    entry = next(each for each in extensions() if each.package == package)
    return package in versions or entry.either in versions


def _extensions(probed: Mapping[str, Any], versions: Mapping[str, str]) -> tuple[Extension, ...]:
    """Return the installed extensions with what importing them raised; one of them may have ended the probe."""
    errors: dict[str, str] = dict(probed.get("extensions", {}))
    if crashed := probed.get("importing"):
        errors[crashed] = "importing it ends the process"
    known = [each.package for each in extensions() if each.package in versions and each.package in errors]
    return tuple(Extension(package, versions[package], errors[package]) for package in known)
