"""Numbers and tables of docs/context.md, from the cards' data, the probes of benchmarks/context and the records of
benchmarks/accuracy."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from typing import Any

import yaml

from concepts.page import MIB, ROOT, mib, page, table
from trainatomy.catalog.files import read_yaml
from trainatomy.catalog.gpus import GPU, Context, find_gpu, gpus
from trainatomy.catalog.published import notebook
from trainatomy.units import exact_bytes, human_bytes

RUN = "bert-large-sgd-momentum"
"""The run that is drawn: of the H200's held-out rows, which have every figure, one of the guides' model."""
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
"""Stages of the probe's sequence "fp32" that are shown, and what they are."""
CHECKED = {
    ("fp32", "foreach adamw"): ("a training in fp32", FP32),
    ("fp32", "cudnn attention"): ("with attention by cuDNN", HALF),
    ("images", "conv fp32"): (
        "convolutions, forward and backward",
        ("kernels", "cudnn", "cudnn_backward", "convolution"),
    ),
    ("images", "conv bf16"): ("convolutions and products", (*HALF, "convolution")),
    ("inference", "conv inference"): (
        "inference: products and convolutions",
        ("kernels", "cublas", "cudnn", "convolution"),
    ),
    ("bf16", "backward addmm bf16"): (
        "products in 16 bits, forward and backward",
        ("kernels", "cublas", "cublas_backward"),
    ),
}
"""Moments of the probe with the libraries that are in use by then, as the card's data name them."""


def context_page() -> str:
    """docs/context.md."""
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
            "stages": stages_table(),
            "reached": {
                stage["name"].replace(" ", "_"): stage["device_bytes"] - stage["reserved_bytes"]
                for stage in run["stages"]
            },
            "published": notebook(),
            "published_process_mib": read_yaml("published.yaml")["notebook"]["process_mib"],
            "probe": probe("h200"),
            "probed": probed_table(),
            "checked": checked_table(),
            "cards": cards_table(),
            "shortfall": shortfall(),
            "lacking": Counter(lacking),
            "alone": len(lacking),
            "fp32": h200.context().holding(FP32),
            "half": h200.context().holding(HALF),
            "fp32_rows": held[h200.context().holding(FP32)],
            "half_rows": held[h200.context().holding(HALF)],
            "trainings": sum(held.values()),
            "rest": {size - h200.context().holding(HALF) for size in held} - {0, -CUDNN},
            "eager": find_gpu("v100-16gb").context("eager-cuda-11"),
            "per_thread": h200.context().first_tensor_bytes / threads(h200),
        },
    )


@cache
def records(name: str) -> list[dict[str, Any]]:
    """The rows of a file of benchmarks/accuracy/records."""
    lines = (ROOT / "benchmarks" / "accuracy" / "records" / f"{name}.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def alone() -> list[dict[str, Any]]:
    """Rows that had the card to themselves and give both the card's figure and the process's, of both cards."""
    rows = [row for name in ("h200-held-out", "h200-tuning", "h100-sample") for row in records(name)]
    return [row for row in rows if row["nvml_used_bytes"] is not None and row["process_bytes"] is not None]


def shortfall() -> int:
    """What the driver's figure for a process leaves out, bytes, as the records' notes have it."""
    notes = yaml.safe_load((ROOT / "benchmarks" / "accuracy" / "records" / "cards.yaml").read_text("utf-8"))
    size: int = notes["NVIDIA H200"]["process_shortfall_bytes"]
    return size


def outside(row: dict[str, Any]) -> int:
    """Bytes outside of PyTorch's allocator at the peak of a run."""
    size: int = row["device_bytes"] - row["peak_reserved_bytes"]
    return size


def where(row: dict[str, Any]) -> str:
    """``NVIDIA H200, driver 580.159.04, torch 2.11.0 on CUDA 13.0, 2026-11-21``."""
    torch = f"torch {row['versions']['torch']} on CUDA {row['versions']['cuda']}"
    return f"{row['gpu']}, driver {row['driver']}, {torch}, {row['date']}"


@cache
def probe(name: str) -> dict[str, Any]:
    """What benchmarks/context/probe.py found on a card."""
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "context" / f"{name}.json").read_text("utf-8"))
    return found


def figures(run: dict[str, Any]) -> tuple[tuple[str, str, int, str], ...]:
    """Who is asked, how, what it says (bytes), what is in it: the widest first."""
    driver = run["idle_bytes"]
    return (
        ("NVML, first form", "`nvmlDeviceGetMemoryInfo(handle).used`", run["nvml_used_bytes"],
         "the driver's own share, every process"),
        ("NVML, second form; `nvidia-smi`", "`nvmlDeviceGetMemoryInfo(handle, version=nvmlMemory_v2).used`",
         run["nvml_used_bytes"] - driver, "every process"),
        ("NVML, this process", "`nvmlDeviceGetComputeRunningProcesses(handle)`, the processes of `nvidia-smi`",
         run["process_bytes"], "this process, but for a small part of its context"),
        ("PyTorch, reserved", "`torch.cuda.max_memory_reserved()`", run["peak_reserved_bytes"],
         "what PyTorch's allocator took from the driver"),
        ("PyTorch, allocated", "`torch.cuda.max_memory_allocated()`", run["peak_allocated_bytes"],
         "what it handed out: tensors and workspaces"),
    )  # fmt: skip


def figures_table(run: dict[str, Any]) -> str:
    rows = [(name, asked, what, human_bytes(size), exact_bytes(size)) for name, asked, size, what in figures(run)]
    return table(("figure", "asked by", "what is in it", "", "bytes"), rows, 2)


def stages_table() -> str:
    """The guide's four stages for its first training: as published in 2022, and on an H200 today."""
    guide = notebook()
    file = ROOT / "tests" / "data" / "h200-notebook.jsonl"
    today = json.loads(file.read_text("utf-8").splitlines()[0])
    first = next(row for row in guide.rows if row.name == "vanilla").memory_bytes
    published = (guide.idle_bytes, guide.context_bytes, guide.model_bytes, first)
    names = ("idle card", "first tensor", "model loaded", "training, at its peak")
    rows = []
    for name, old, key in zip(names, published, ("nvml_start", "nvml_context", "nvml_model", "nvml_end"), strict=True):
        now = today[key]
        rows.append((name, *(f"{size // MIB:,}" for size in (old, now, now - today["nvml_start"]))))
    return table(("stage", "guide, V100, 2022", "same call, H200, 2026", "less the idle card"), rows, 3)


def probed_table() -> str:
    """What each first use adds, on both cards, and under which name the cards' data have it."""
    growth = {name: _growth(name) for name in ("h200", "h100-sxm")}
    rows = [
        (what, *(mib(growth[name][stage]) if growth[name][stage] else "0" for name in growth))
        for stage, what in PROBED.items()
    ]
    return table(("what happens for the first time", "H200", "H100"), rows, 2)


def _growth(name: str) -> dict[str, int]:
    before, found = 0, {}
    for stage, size in probe(name)["sequences"]["fp32"]:
        if isinstance(size, int):  # a stage that failed on the GPU says why
            found[stage], before = size - before, size
    return found


def checked() -> list[tuple[str, int, int, int]]:
    """A moment, what the card's data say is held by then, what the probe read on the H200 and on the H100."""
    context: Context = find_gpu("h200").context()
    found = []
    for (sequence, stage), (what, libraries) in CHECKED.items():
        read = [dict(probe(name)["sequences"][sequence])[stage] for name in ("h200", "h100-sxm")]
        found.append((what, context.holding(libraries), *read))
    return found


def checked_table() -> str:
    rows = [(what, *(mib(size) for size in sizes)) for what, *sizes in checked()]
    return table(("after", "by the card's data", "H200", "H100"), rows, 3)


def cards_table() -> str:
    """Every card: what its first tensor costs today, and what that rests on."""
    rows = [
        (
            f"`{one.id}`",
            human_bytes(one.context().first_tensor_bytes),
            human_bytes(one.context().holding(FP32)),
            basis(one),
        )
        for one in gpus()
    ]
    return table(("card", "first tensor", "training in fp32", "basis"), rows)


def basis(one: GPU) -> str:
    """In two words, of today's software."""
    source = one.source("contexts.lazy.first_tensor_bytes")
    if not source.startswith("assumed"):
        return "**measured**" if source.startswith("measured") else "published"
    return "assumed: multiprocessors × threads × the H200's ratio" if "each thread" in source else "assumed"


def threads(one: GPU) -> int:
    """Threads that can be resident on a card of the H200's kind: 2048 for each multiprocessor (CUDA programming guide,
    compute capabilities)."""
    return one.multiprocessors * 2048
