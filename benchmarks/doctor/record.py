"""Record what a machine with a GPU answers, raw: ``python benchmarks/doctor/record.py FILE`` (15 s).

With ``--nvml`` only NVML's answers of idle GPUs, in a second.

NVML's answers are kept by call, idle and under load, beside the text of ``nvidia-smi``, files of the host and torch's
own facts. ``tests/doctor`` replays them, so that the readers of ``trainatomy doctor`` meet real answers without a GPU.
Needs nvidia-ml-py; everything else is optional. Changes no setting.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ONCE = """
    GetName GetUUID GetPciInfo_v3 GetCudaComputeCapability GetPersistenceMode GetComputeMode GetMigMode GetEccMode
    GetMaxPcieLinkGeneration GetGpuMaxPcieLinkGeneration GetMaxPcieLinkWidth GetPcieLinkMaxSpeed
    GetPowerManagementDefaultLimit GetPowerManagementLimitConstraints GetSupportedClocksEventReasons
    GetSupportedClocksThrottleReasons GetRemappedRows GetRowRemapperHistogram GetRetiredPagesPendingStatus
    GetMultiGpuBoard GetBoardPartNumber GetVbiosVersion GetBrand GetArchitecture GetNumaNodeId GetMinorNumber
    GetDisplayActive GetDisplayMode GetAutoBoostedClocksEnabled GetNumGpuCores GetMemoryBusWidth
    GetVirtualizationMode GetSupportedPerformanceStates GetNumFans GetMaxMigDeviceCount GetIrqNum GetPowerSource
""".split()
OFTEN = """
    GetPowerManagementLimit GetEnforcedPowerLimit GetPowerUsage GetTotalEnergyConsumption GetPerformanceState
    GetCurrentClocksEventReasons GetCurrentClocksThrottleReasons GetUtilizationRates GetCurrPcieLinkGeneration
    GetCurrPcieLinkWidth GetPcieSpeed GetPcieReplayCounter GetMemoryInfo GetComputeRunningProcesses_v3
    GetComputeRunningProcesses GetGraphicsRunningProcesses GetMarginTemperature GetFanSpeed
""".split()
FILES = """
    /proc/meminfo /proc/loadavg /proc/sys/vm/swappiness /proc/sys/kernel/osrelease /proc/self/limits
    /proc/driver/nvidia/version /sys/kernel/mm/transparent_hugepage/enabled /sys/fs/cgroup/cpu.max
    /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory.current /sys/fs/cgroup/memory.high /sys/fs/cgroup/memory.swap.max
    /sys/fs/cgroup/cpu.stat /sys/fs/cgroup/cpuset.cpus.effective /sys/fs/cgroup/cpu/cpu.cfs_quota_us
    /sys/fs/cgroup/cpu/cpu.cfs_period_us /sys/fs/cgroup/memory/memory.limit_in_bytes
    /sys/devices/system/cpu/cpu0/cpufreq/scaling_governor /sys/devices/system/node/online /proc/pressure/cpu
    /proc/sys/kernel/numa_balancing /sys/module/nvidia/version
""".split()
COMMANDS = (
    ("nvidia-smi", "-q"),
    ("nvidia-smi", "topo", "-m"),
    ("nvidia-smi", "nvlink", "-s"),
    ("nvidia-smi", "nvlink", "-e"),
    ("nvidia-smi", "topo", "-p2p", "r"),
    ("df", "-B1", "/dev/shm", "/tmp"),
    ("lscpu",),
)
LIBRARIES = """
    torch triton transformers accelerate bitsandbytes flash-attn causal-conv1d mamba-ssm apex xformers liger-kernel
    nvidia-nccl-cu12 nvidia-nccl-cu13 nvidia-cudnn-cu12 nvidia-cudnn-cu13 nvidia-ml-py psutil deepspeed kernels
""".split()


def plain(value: Any) -> Any:
    """Return what NVML answered as JSON."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, ctypes.Array):
        return [plain(each) for each in value]
    if isinstance(value, ctypes._SimpleCData):
        return value.value
    if isinstance(value, ctypes.Structure | ctypes.Union):
        return {name: plain(getattr(value, name)) for name, *_ in value._fields_}
    if hasattr(value, "__dict__") and not isinstance(value, type):
        return {name: plain(each) for name, each in vars(value).items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value if isinstance(value, int | float | str | bool | None) else repr(value)


def answer(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the answer of a call, or its error as ``{"error": ...}``."""
    try:
        return plain(function(*arguments))
    except Exception as error:  # every error is an answer
        return {"error": f"{type(error).__name__}: {error}", "code": getattr(error, "value", None)}


class Nvml:
    """NVML's answers, by the call as text: ``nvmlDeviceGetName(0)``."""

    def __init__(self) -> None:
        import pynvml

        self.library = pynvml
        pynvml.nvmlInit()
        self.handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]

    def ask(self, kept: dict[str, Any], name: str, *arguments: Any, show: tuple[Any, ...] | None = None) -> Any:
        """Keep the answer of one call; handles are written as indices."""
        function = getattr(self.library, name, None)
        key = f"{name}({', '.join(map(str, arguments if show is None else show))})"
        kept[key] = {"error": "missing in the binding"} if function is None else answer(function, *arguments)
        return kept[key]

    def system(self) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for name in ("GetDriverVersion", "GetNVMLVersion", "GetCudaDriverVersion_v2", "GetCudaDriverVersion"):
            self.ask(kept, f"nvmlSystem{name}")
        self.ask(kept, "nvmlDeviceGetCount")
        return kept

    def once(self) -> dict[str, Any]:
        """Ask what does not change: limits, links, errors, modes."""
        kept: dict[str, Any] = {}
        for index, handle in enumerate(self.handles):
            for name in ONCE:
                self.ask(kept, f"nvmlDevice{name}", handle, show=(index,))
            for kind in range(4):
                self.ask(kept, "nvmlDeviceGetMaxClockInfo", handle, kind, show=(index, kind))
                self.ask(kept, "nvmlDeviceGetApplicationsClock", handle, kind, show=(index, kind))
                self.ask(kept, "nvmlDeviceGetMaxCustomerBoostClock", handle, kind, show=(index, kind))
            for kind in range(10):
                self.ask(kept, "nvmlDeviceGetTemperatureThreshold", handle, kind, show=(index, kind))
            for kind in (0, 1):
                for counter in (0, 1):
                    shown = (index, kind, counter)
                    self.ask(kept, "nvmlDeviceGetTotalEccErrors", handle, kind, counter, show=shown)
                self.ask(kept, "nvmlDeviceGetRetiredPages", handle, kind, show=(index, kind))
            self._links(kept, index, handle)
            self._topology(kept, index, handle)
            self._fabric(kept, index, handle)
        return kept

    def _links(self, kept: dict[str, Any], index: int, handle: Any) -> None:
        for link in range(18):
            for name in ("State", "Version", "RemoteDeviceType", "RemotePciInfo"):
                self.ask(kept, f"nvmlDeviceGetNvLink{name}", handle, link, show=(index, link))
            for counter in range(4):
                shown = (index, link, counter)
                self.ask(kept, "nvmlDeviceGetNvLinkErrorCounter", handle, link, counter, show=shown)
            for capability in range(6):
                shown = (index, link, capability)
                self.ask(kept, "nvmlDeviceGetNvLinkCapability", handle, link, capability, show=shown)

    def _topology(self, kept: dict[str, Any], index: int, handle: Any) -> None:
        words = (os.cpu_count() or 1) // 64 + 1
        self.ask(kept, "nvmlDeviceGetCpuAffinity", handle, words, show=(index, words))
        self.ask(kept, "nvmlDeviceGetMemoryAffinity", handle, 1, 0, show=(index, 1, 0))
        for other, peer in enumerate(self.handles):
            if other != index:
                self.ask(kept, "nvmlDeviceGetTopologyCommonAncestor", handle, peer, show=(index, other))
                for kind in range(5):
                    self.ask(kept, "nvmlDeviceGetP2PStatus", handle, peer, kind, show=(index, other, kind))

    def _fabric(self, kept: dict[str, Any], index: int, handle: Any) -> None:
        kind = getattr(self.library, "c_nvmlGpuFabricInfo_v2_t", None)
        if kind is not None:
            info = kind()
            self.ask(kept, "nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(info), show=(index,))
            kept[f"nvmlDeviceGetGpuFabricInfoV({index}).info"] = plain(info)

    def often(self) -> dict[str, Any]:
        """Ask what changes from moment to moment."""
        kept: dict[str, Any] = {}
        for index, handle in enumerate(self.handles):
            for name in OFTEN:
                self.ask(kept, f"nvmlDevice{name}", handle, show=(index,))
            for kind in range(4):
                self.ask(kept, "nvmlDeviceGetClockInfo", handle, kind, show=(index, kind))
            self.ask(kept, "nvmlDeviceGetTemperature", handle, 0, show=(index, 0))
            for policy in range(12):
                self.ask(kept, "nvmlDeviceGetViolationStatus", handle, policy, show=(index, policy))
            for counter in (0, 1):
                self.ask(kept, "nvmlDeviceGetPcieThroughput", handle, counter, show=(index, counter))
            self.ask(kept, "nvmlDeviceGetProcessUtilization", handle, 0, show=(index, 0))
            fields = (38, 45, 52, 59, 74, 75, 76, 77, 78, 79, 80, 81, 82, 91, 93, 94, 95, 142, 143, 144, 145, 185, 186)
            for field in (*fields, *range(193, 260)):
                self.ask(kept, "nvmlDeviceGetFieldValues", handle, [field], show=(index, field))
        return kept


def host() -> dict[str, Any]:
    """Return files, limits and the processes' number of this machine."""
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
    affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    wanted = ("CUDA", "NCCL", "TORCH", "PYTORCH", "OMP", "MKL", "NVIDIA", "CUBLAS", "CUDNN", "LD_", "TF32", "TRITON")
    return {
        "files": {path: answer(lambda path=path: Path(path).read_text()[:20000]) for path in FILES},
        "limits": limits,
        "affinity": affinity,
        "cpu_count": os.cpu_count(),
        "environment": {name: value for name, value in os.environ.items() if name.startswith(wanted)},
        "markers": {path: Path(path).exists() for path in ("/.dockerenv", "/run/.containerenv")},
        "versions": {name: answer(importlib.metadata.version, name) for name in LIBRARIES},
        "commands": {" ".join(command): answer(_run, command) for command in COMMANDS},
    }


def _run(command: tuple[str, ...]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    return (done.stdout + done.stderr)[:40000]


def torch_facts() -> dict[str, Any]:
    """Return what torch says about itself and its GPUs."""
    import torch

    found: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": answer(torch.backends.cudnn.version),
        "nccl": answer(torch.cuda.nccl.version),
        "arch_list": torch.cuda.get_arch_list(),
        "gencode": answer(torch.cuda.get_gencode_flags),
        "available": torch.cuda.is_available(),
        "matmul_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "precision": torch.get_float32_matmul_precision(),
        "flash_sdp": torch.backends.cuda.flash_sdp_enabled(),
        "is_flash_attention_available": answer(torch.backends.cuda.is_flash_attention_available),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "threads": torch.get_num_threads(),
        "devices": [],
        "config": torch.__config__.show(),
    }
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found["devices"].append({name: plain(getattr(properties, name)) for name in dir(properties) if name[0] != "_"})
    found["peers"] = [
        [answer(torch.cuda.can_device_access_peer, one, other) if one != other else None for other in range(count)]
        for count in (torch.cuda.device_count(),)
        for one in range(count)
    ]
    return found


def copies() -> dict[str, Any]:
    """Return seconds of copies of 256 MiB: host to device and back (pageable and pinned), and device to device."""
    import torch

    size, found = 256 << 20, {}
    on_device = torch.empty(size, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(on_device)
    pinned, pageable = torch.ones(size, dtype=torch.uint8).pin_memory(), torch.ones(size, dtype=torch.uint8)
    pairs = {
        "pinned_to_device": (on_device, pinned),
        "device_to_pinned": (pinned, on_device),
        "pageable_to_device": (on_device, pageable),
        "device_to_pageable": (pageable, on_device),
        "device_to_device": (other, on_device),
    }
    for name, (target, source) in pairs.items():
        found[name] = []
        for _ in range(6):
            torch.cuda.synchronize()
            started = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            found[name].append(time.perf_counter() - started)
    return {"bytes": size, "seconds": found}


def under_load(nvml: Nvml, seconds: float = 4.0) -> dict[str, Any]:
    """Return NVML's answers while matrices are multiplied, and copied to the GPU."""
    import torch

    found: dict[str, Any] = {}
    stop = threading.Event()

    def work() -> None:
        left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        host_side = torch.ones(64 << 20, dtype=torch.uint8).pin_memory()
        target = torch.empty_like(host_side, device="cuda")
        while not stop.is_set():
            for _ in range(20):
                left @ left
            target.copy_(host_side, non_blocking=True)
            torch.cuda.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    began = time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        time.sleep(seconds / 4)
        found[f"{passed + seconds / 4:.1f}"] = answer(nvml.often)
    stop.set()
    thread.join()
    return found


def main(file: Path, *, only_nvml: bool) -> None:
    """Write all answers, part by part, so that an error in one loses no other."""
    kept: dict[str, Any] = {"host": answer(host)}
    began = time.monotonic()
    try:
        nvml = Nvml()
    except Exception as error:
        kept["nvml"] = {"error": repr(error)}
    else:
        kept["nvml"] = {"system": answer(nvml.system), "once": answer(nvml.once), "idle": answer(nvml.often)}
        kept["nvml_seconds"] = time.monotonic() - began
        kept["pynvml"] = answer(importlib.metadata.version, "nvidia-ml-py")
    if only_nvml:
        file.write_text(json.dumps(kept))
        return
    kept["torch"] = answer(torch_facts)
    if isinstance(kept["torch"], dict) and kept["torch"].get("available"):
        kept["copies"] = answer(copies)
        kept["load"] = answer(under_load, nvml)
        kept["after"] = answer(nvml.often)
    kept["seconds"] = time.monotonic() - began
    file.write_text(json.dumps(kept))


if __name__ == "__main__":
    main(Path(sys.argv[1]), only_nvml="--nvml" in sys.argv)
