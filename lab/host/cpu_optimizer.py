"""Measure what an optimizer on the host takes: ``python lab/host/cpu_optimizer.py [--json]``.

The fused AdamW of PyTorch on tensors of the CPU, as FSDP's and torchao's offloading run it, for several sizes and
numbers of threads: seconds, and bytes for each second (gradients are read, weights and both states read and written).
With a GPU, also copies of pinned and pageable memory.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

MIB = 1 << 20
TRIES = 5


def seconds_of(run: Callable[[], object]) -> float:
    """Return the median time of a few runs, after one that does not count."""
    taken = []
    for _ in range(TRIES + 1):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


def optimizer(elements: int, tensors: int, threads: int) -> dict[str, Any]:
    """Measure a step over so many tensors of so many elements."""
    torch.set_num_threads(threads)
    weights = [torch.zeros(elements) for _ in range(tensors)]
    for weight in weights:
        weight.grad = torch.zeros(elements)
    seconds = seconds_of(torch.optim.AdamW(weights, fused=True).step)
    moved = 4 * 7 * elements * tensors
    return {"elements": elements, "tensors": tensors, "threads": threads, "seconds": seconds, "rate": moved / seconds}


def copies(size: int) -> dict[str, Any]:
    """Measure copies between host and GPU."""
    on_gpu = torch.zeros(size, dtype=torch.uint8, device="cuda")
    found = {}
    for name, host in (
        ("pageable", torch.zeros(size, dtype=torch.uint8)),
        ("pinned", torch.zeros(size, dtype=torch.uint8).pin_memory()),
    ):
        found[f"{name}_to_device"] = size / seconds_of(lambda host=host: on_gpu.copy_(host, non_blocking=True))  # type: ignore[misc]
        found[f"device_to_{name}"] = size / seconds_of(lambda host=host: host.copy_(on_gpu, non_blocking=True))  # type: ignore[misc]
    return {"bytes": size, **found}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args()
    most = os.cpu_count() or 1
    steps = [
        optimizer(elements, tensors, threads)
        for threads in sorted({1, max(most // 2, 1), most})
        for elements, tensors in ((MIB, 8), (16 * MIB, 8), (64 * MIB, 4))
    ]
    moves = [copies(size) for size in (MIB, 64 * MIB, 512 * MIB)] if torch.cuda.is_available() else []
    about = {"torch": torch.__version__, "processors": most, "adamw": steps, "copies": moves}
    if asked.json:
        print(json.dumps(about))
        return
    for step in steps:
        size = f"{step['threads']:3} threads  {step['tensors']} x {step['elements']:11,}"
        print(f"{size}  {step['seconds'] * 1e3:8.1f} ms  {step['rate'] / 1e9:6.1f} GB/s")
    for move in moves:
        print({name: f"{rate / 1e9:.1f} GB/s" if name != "bytes" else rate for name, rate in move.items()})


if __name__ == "__main__":
    main()
