"""A machine with two GPUs with which nothing is wrong, and how to break it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainatomy.results.machine import (
    Clocks,
    CopyRates,
    GPUPair,
    GPUState,
    Host,
    MachineState,
    MemoryHealth,
    NVLinks,
    PCIe,
    Power,
    Software,
    Temperature,
)

GIB = 1024**3

GPU = GPUState(
    index=0,
    name="NVIDIA H200",
    uuid="GPU-zero",
    capability=(9, 0),
    memory_bytes=150_754_820_096,
    used_bytes=0,
    persistence=True,
    compute_mode="default",
    mig=False,
    near_cpus=tuple(range(16)),
    utilisation=0.0,
    power=Power(80.0, 700.0, 700.0, ("idle",)),
    clocks=Clocks(345, 1980, 3201, 3201),
    temperature=Temperature(30, 85, 92, 95),
    pcie=PCIe(1, 5, 5, 16, 16, 0),
    nvlinks=NVLinks(tuple(range(18)), (), 4, {"replay": 0, "recovery": 0, "crc": 0}, "completed"),
    memory=MemoryHealth(True, True, 0, 0, None, 0, False, False),
    copies=CopyRates(
        {"pinned_to_device": 55e9, "device_to_pinned": 54e9, "pageable_to_device": 12e9, "device_to_device": 1.9e12},
        PCIe(5, 5, 5, 16, 16, 0),
        0,
        Power(650.0, 700.0, 700.0, ("power cap",)),
        Clocks(1700, 1980, 3201, 3201),
    ),
)

SOFTWARE = Software(
    python="3.12.3",
    driver="580.159.04",
    driver_cuda=(13, 0),
    torch="2.11.0+cu130",
    torch_cuda="13.0",
    architectures=("sm_80", "sm_90", "sm_100", "sm_120"),
    versions={"torch": "2.11.0+cu130", "triton": "3.6.0", "kernels": "0.11", "nvidia-cudnn-cu13": "9.19.0.56"},
    required={"triton": "3.6.0", "nvidia-cudnn-cu13": "9.19.0.56"},
    loaded={"cudnn": "91900", "nccl": "2.28.9"},
    bitsandbytes=("12.8", "13.0"),
    flash_attention=True,
    matmul_tf32=True,
)

HOST = Host(
    cpus=32,
    usable_cpus=tuple(range(32)),
    load=0.5,
    busy_cpus=0.5,
    memory_bytes=256 * GIB,
    available_bytes=240 * GIB,
    swap_bytes=0,
    swap_used_bytes=0,
    swapped_pages=0,
    huge_pages="madvise",
    shm_bytes=128 * GIB,
    shm_free_bytes=127 * GIB,
    memlock_bytes=-1,
    governor=("performance", "intel_pstate"),
    nvidia_devices=2,
)

HEALTHY = MachineState(
    gpus=(GPU, replace(GPU, index=1, uuid="GPU-one", near_cpus=tuple(range(16, 32)))),
    pairs=(GPUPair(0, 1, "NV18", True, 370e9),),
    software=SOFTWARE,
    host=HOST,
)


def with_gpu(**changes: Any) -> MachineState:
    """Return the machine with a changed GPU 0; ``pcie={"width": 8}`` changes a part of one value."""
    return replace(HEALTHY, gpus=(changed(GPU, **changes), HEALTHY.gpus[1]))


def with_software(**changes: Any) -> MachineState:
    """Return the machine with other software."""
    return replace(HEALTHY, software=changed(SOFTWARE, **changes))


def with_host(**changes: Any) -> MachineState:
    """Return the machine with another host."""
    return replace(HEALTHY, host=changed(HOST, **changes))


def without_gpus(**changes: Any) -> MachineState:
    """Return a machine on which no driver answers."""
    software = replace(SOFTWARE, driver=None, driver_cuda=None, driver_error="NVML Shared Library Not Found")
    return replace(
        HEALTHY,
        gpus=(),
        pairs=(),
        **{"software": software, "host": replace(HOST, nvidia_devices=0, amd_devices=0), **changes},
    )


def changed(value: Any, **changes: Any) -> Any:
    """Return a frozen value with changes, nested ones as dictionaries."""
    nested = {
        name: changed(getattr(value, name), **new)
        if isinstance(new, dict) and hasattr(getattr(value, name), "__dataclass_fields__")
        else new
        for name, new in changes.items()
    }
    return replace(value, **nested)
