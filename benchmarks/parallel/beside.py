"""Measure on one GPU how kernels slow beside one like NCCL's: ``benchmarks/parallel/beside.py --out FILE.jsonl``.

A kernel holds multiprocessors for itself, as NCCL does with one block for each channel, and copies memory there or
sleeps, while another stream runs products, attention and operations that move data.  A line for each operation and
number of multiprocessors: how many times as long it takes, to compare with ``timing/contention.py``, and the clock.

Needs one NVIDIA GPU that nothing else uses; it takes about a minute.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pynvml as nvml
import torch
import torch.nn.functional as F

SOURCE = """
extern "C" __global__ void hold(float* data, int numbers, int moves, volatile int* stop, unsigned long long* copied) {
    extern __shared__ int shared[];
    unsigned int stride = gridDim.x * blockDim.x, at = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned long long turns = 0;
    long long began = clock64();
    float sum = 0.0f;
    while (true) {
        if (!threadIdx.x) shared[0] = *stop || clock64() - began > 20000000000LL;
        __syncthreads();
        if (shared[0]) break;
        for (int turn = 0; turn < 256 && moves; ++turn, ++turns) {
            at = at + stride < (unsigned int)numbers ? at + stride : blockIdx.x * blockDim.x + threadIdx.x;
            sum += data[at];
            data[at] = sum;
        }
        if (!moves) __nanosleep(2000);
        __syncthreads();
    }
    atomicAdd(copied, turns * 2 * sizeof(float));
}
"""
THREADS, NUMBERS = 640, 2**28
HELD = (1, 8, 16, 24, 32)
REPEATS = 15
SPARE = 0.3
"""Pause after each measurement as a share of it, so that the GPU stays below its power limit."""


class Holder:
    """A kernel that holds multiprocessors until it is told to stop; its blocks leave no shared memory to others."""

    def __init__(self) -> None:
        """Compile the kernel."""
        self._shared = int(getattr(torch.cuda.get_device_properties(0), "shared_memory_per_block_optin")) - 1024  # noqa: B009
        self._kernel = torch.cuda._compile_kernel(SOURCE, "hold")
        self._kernel.set_shared_memory_config(self._shared)
        self._data = torch.zeros(NUMBERS, device="cuda")
        self._stop = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._copied = torch.zeros(1, dtype=torch.int64, device="cuda")
        self._stream = torch.cuda.Stream(priority=-1)

    def start(self, blocks: int, *, moves: bool) -> None:
        """Hold ``blocks`` multiprocessors."""
        self._stop.zero_()
        self._copied.zero_()
        torch.cuda.synchronize()
        arguments = [self._data, NUMBERS, int(moves), self._stop, self._copied]
        self._kernel((blocks, 1, 1), (THREADS, 1, 1), arguments, self._shared, self._stream)
        time.sleep(0.002)

    def stop(self) -> int:
        """Let them go; return the bytes that were read and written."""
        self._stop.fill_(1)
        self._stream.synchronize()
        return int(self._copied.item())


def operations() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield operations, each with its name."""
    for size in (4096, 8192):
        for dtype in (torch.bfloat16, torch.float32):
            if size * dtype.itemsize <= 2**14:
                a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
                name = str(dtype).removeprefix("torch.")
                yield f"{name} product of {size}", lambda a=a, b=b: torch.mm(a, b)  # type: ignore[misc]
                yield f"{name} linear of {size}", lambda a=a, b=b: F.linear(a, b)  # type: ignore[misc]
    q, k, v = (torch.randn(4, 16, 4096, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    yield "attention", lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    half = torch.randn(2**28, device="cuda", dtype=torch.bfloat16)
    rows, weight, out = (
        half.view(-1, 4096),
        torch.ones(4096, device="cuda", dtype=torch.bfloat16),
        torch.empty_like(half),
    )
    yield "copy", lambda: out.copy_(half)
    yield "gelu", lambda: F.gelu(half)
    yield "layer norm", lambda: F.layer_norm(rows, (4096,), weight, weight)


def timed(run: Callable[[], Any]) -> float:
    """Return the median seconds of a call on the GPU."""
    found = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
        time.sleep(found[-1] * SPARE)
    return median(found)


def measure(holder: Holder, name: str, run: Callable[[], Any], handle: Any) -> Iterator[dict[str, Any]]:
    """Yield a line for each number of multiprocessors."""
    run()
    torch.cuda.synchronize()
    alone = timed(run)
    for moves in (False, True):
        for blocks in HELD:
            holder.start(blocks, moves=moves)
            began = time.perf_counter()
            try:
                beside, clock = timed(run), nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
            finally:
                spent, copied = time.perf_counter() - began, holder.stop()
            yield {
                "name": name,
                "held": blocks,
                "moves": moves,
                "alone_seconds": alone,
                "slowdown": beside / alone,
                "copied_per_second": copied / spent,
                "clock_mhz": clock,
            }


def main() -> int:
    """Measure, a line at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    holder = Holder()
    with options.out.open("a", encoding="utf-8") as file:

        def write(line: dict[str, Any]) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()
            print(line, flush=True)

        write(
            {
                "environment": {
                    "gpu": torch.cuda.get_device_name(0),
                    "torch": torch.__version__,
                    "cuda": torch.version.cuda,
                }
            }
        )
        for name, run in operations():
            try:
                for line in measure(holder, name, run, handle):
                    write(line)
            except Exception as error:  # the other operations are measured all the same
                holder.stop()
                write({"name": name, "error": str(error)})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
