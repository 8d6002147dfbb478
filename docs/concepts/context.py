"""Numbers and tables of docs/context.md: from the GPU catalog, lab/context and the accuracy records."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from typing import Any

import yaml

from concepts.page import ROOT, mib, page, table
from trainatomy.catalog.gpus import GPU, find_gpu, gpus
from trainatomy.units import exact_bytes, human_bytes

RUN = "bert-large-sgd-momentum"
"""The run in the figure: a held-out row of the H200 (these have all five figures), of the guides' model."""
FP32 = ("kernels", "cublas", "cublas_backward", "training")
HALF = (*FP32, "cudnn", "cudnn_backward")
CUDNN = find_gpu("h200").context().holding(HALF) - find_gpu("h200").context().holding(FP32)
PROBED = {
    "tensor": "first tensor",
    "elementwise": "first kernel of PyTorch's own",
    "mm fp32": "first matrix product",
    "efficient": "first fused attention, forward and backward",
    "backward mm fp32": "first matrix product of autograd's thread",
    "mm bf16": "the same products in 16 bits",
    "cudnn attention": "first attention by cuDNN, forward and backward",
    "lstm": "an LSTM by cuDNN",
    "linalg": "`torch.linalg.qr` (cuSOLVER)",
}
"""Stages of the probe's sequence "fp32" shown in the table, with their descriptions."""


def context_page() -> str:
    """Render docs/context.md."""
    rows = records("h200-held-out")
    lacking = [row["device_bytes"] - row["process_bytes"] for row in alone()]
    held = Counter(outside(row) for row in rows if row["workload"].get("mode") != "inference")
    h200 = find_gpu("h200")
    run = next(row for row in rows if row["name"] == RUN)
    return page(
        "context.md",
        {
            "h200": h200,
            "h100": find_gpu("h100-sxm"),
            "context": h200.context(),
            "run": run,
            "where": where(run),
            "figures": figures_table(run),
            "probe": probe("h200"),
            "probed": probed_table(),
            "measured_gpus": ", ".join(f"`{one.id}`" for one in gpus() if "measured" in basis(one)),
            "shortfall": shortfall(),
            "lacking": Counter(lacking),
            "alone": len(lacking),
            "fp32": h200.context().holding(FP32),
            "half": h200.context().holding(HALF),
            "fp32_rows": held[h200.context().holding(FP32)],
            "half_rows": held[h200.context().holding(HALF)],
            "trainings": sum(held.values()),
            "rest": {size - h200.context().holding(HALF) for size in held} - {0, -CUDNN},
            "per_thread": h200.context().first_tensor_bytes / threads(h200),
        },
    )


@cache
def records(name: str) -> list[dict[str, Any]]:
    """Return the rows of a file in lab/accuracy/records."""
    lines = (ROOT / "lab" / "accuracy" / "records" / f"{name}.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def alone() -> list[dict[str, Any]]:
    """Return the rows of both GPUs that ran alone and have a figure for the GPU and one for the process."""
    rows = [row for name in ("h200-held-out", "h200-tuning", "h100-sample") for row in records(name)]
    return [row for row in rows if row["nvml_used_bytes"] is not None and row["process_bytes"] is not None]


def shortfall() -> int:
    """Return the bytes that the driver's figure for a process omits, from records/cards.yaml."""
    notes = yaml.safe_load((ROOT / "lab" / "accuracy" / "records" / "cards.yaml").read_text("utf-8"))
    size: int = notes["NVIDIA H200"]["process_shortfall_bytes"]
    return size


def outside(row: dict[str, Any]) -> int:
    """Return the bytes outside PyTorch's allocator at the peak of a run."""
    size: int = row["device_bytes"] - row["peak_reserved_bytes"]
    return size


def where(row: dict[str, Any]) -> str:
    """Describe a run's environment: ``NVIDIA H200, driver 580.159.04, torch 2.11.0 on CUDA 13.0, 2026-11-21``."""
    torch = f"torch {row['versions']['torch']} on CUDA {row['versions']['cuda']}"
    return f"{row['gpu']}, driver {row['driver']}, {torch}, {row['date']}"


@cache
def probe(name: str) -> dict[str, Any]:
    """Return what lab/context/probe.py measured on a GPU."""
    found: dict[str, Any] = json.loads((ROOT / "lab" / "context" / f"{name}.json").read_text("utf-8"))
    return found


def figures(run: dict[str, Any]) -> tuple[tuple[str, str, int, str], ...]:
    """Return source, call, bytes and contents of each figure, the largest first."""
    driver = run["idle_bytes"]
    return (
        ("NVML, version 1", "`nvmlDeviceGetMemoryInfo(handle).used`", run["nvml_used_bytes"],
         "all processes and the driver's own memory"),
        ("NVML, version 2; `nvidia-smi`", "`nvmlDeviceGetMemoryInfo(handle, version=nvmlMemory_v2).used`",
         run["nvml_used_bytes"] - driver, "all processes"),
        ("NVML, this process", "`nvmlDeviceGetComputeRunningProcesses(handle)`, the processes of `nvidia-smi`",
         run["process_bytes"], "this process, without a small part of its context"),
        ("PyTorch, reserved", "`torch.cuda.max_memory_reserved()`", run["peak_reserved_bytes"],
         "memory that PyTorch's allocator obtained from the driver"),
        ("PyTorch, allocated", "`torch.cuda.max_memory_allocated()`", run["peak_allocated_bytes"],
         "memory that it handed out: tensors and workspaces"),
    )  # fmt: skip


def figures_table(run: dict[str, Any]) -> str:
    rows = [(name, call, what, human_bytes(size), exact_bytes(size)) for name, call, size, what in figures(run)]
    return table(("figure", "call", "contents", "", "bytes"), rows, 2)


def probed_table() -> str:
    """Tabulate what each first use adds outside the allocator, on both GPUs."""
    growth = {name: _growth(name) for name in ("h200", "h100-sxm")}
    rows = [
        (what, *(mib(growth[name][stage]) if growth[name][stage] else "0" for name in growth))
        for stage, what in PROBED.items()
    ]
    return table(("first use", "H200", "H100"), rows, 2)


def _growth(name: str) -> dict[str, int]:
    before, found = 0, {}
    for stage, size in probe(name)["sequences"]["fp32"]:
        if isinstance(size, int):  # a stage that failed on the GPU says why
            found[stage], before = size - before, size
    return found


def basis(one: GPU) -> str:
    """Return whether the context with current software is measured, published, computed from the H200's or assumed."""
    source = one.source("contexts.lazy.first_tensor_bytes")
    if not source.startswith("assumed"):
        return "**measured**" if source.startswith("measured") else "published"
    return "from the H200" if "each thread" in source else "assumed"


def threads(one: GPU) -> int:
    """Return the threads that can be resident on a GPU: 2048 on each multiprocessor of an H200.

    Source: CUDA programming guide, compute capabilities.
    """
    return one.multiprocessors * 2048
