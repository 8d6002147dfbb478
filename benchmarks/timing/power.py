"""Measure the power of operations at full clocks: ``python benchmarks/timing/power.py --out FILE.jsonl``.

Each operation is repeated for 4 ms at a time, with pauses, so that the mean power stays below the limit and the clock
at its maximum.  A line for each: the share of time in which it ran, the mean power by NVML's energy counter, and its
rates.  The figures of ``src/trainatomy/catalog/power.yaml`` come from these lines.  Needs a GPU that nothing else uses.

``--mixtures`` runs products and other kernels in turns instead, first with pauses and then without, and writes how long
each took: what lower clocks slow, and how much.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pynvml as nvml
import torch
import torch.nn.functional as F

BURST_SECONDS = 0.004
DUTY = 0.45
SECONDS = 3.0
CLOCK_EVERY = 20
ROUND_SECONDS = 0.02
MIXTURES = (1.0, 0.8, 0.6, 0.4)
"""Shares of products in the time of a mixture."""


class Load(NamedTuple):
    """An operation, with its arithmetic and its memory traffic."""

    name: str
    run: Callable[[], Any]
    flop: float = 0.0
    moved: float = 0.0


def product(m: int, n: int, k: int, dtype: torch.dtype, name: str, *, tf32: bool = False) -> Load:
    """Return a matrix product."""
    a, b = torch.randn(m, k, device="cuda", dtype=dtype), torch.randn(k, n, device="cuda", dtype=dtype)
    out = torch.empty(m, n, device="cuda", dtype=dtype)

    def run() -> None:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.mm(a, b, out=out)

    return Load(f"{name} {m} x {n} x {k}", run, 2.0 * m * n * k, out.itemsize * (m * k + k * n + m * n))


def attention(size: int) -> Load:
    """Return attention, forward and backward, with heads of a size."""
    shape = (8, 2048 // size, 4096, size)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    grad = torch.randn_like(q)
    flop = 3.5 * 2 * 2 * 8 * 4096 * 4096 * 2048 / 2

    def run() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), grad)

    return Load(f"attention, heads of {size}", run, flop)


def convolution() -> Load:
    """Return a convolution."""
    image = torch.randn(64, 256, 56, 56, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(256, 256, 3, 3, device="cuda", dtype=torch.bfloat16)
    return Load("convolution bf16", lambda: F.conv2d(image, weight, padding=1), 2.0 * 64 * 56 * 56 * 256 * 256 * 9)


def adamw() -> Load:
    """Return a step of fused AdamW."""
    parameters = [torch.randn(2**26, device="cuda", requires_grad=True) for _ in range(2)]
    for each in parameters:
        each.grad = torch.randn_like(each)
    return Load("fused AdamW", torch.optim.AdamW(parameters, fused=True).step, 0.0, 2.0 * 2**26 * 4 * 7)


def loads() -> Iterator[Callable[[], Load]]:
    """Yield what makes each operation, so that one at a time is in memory."""
    small = torch.zeros(8, device="cuda")
    yield lambda: Load("hardly anything", lambda: small.add_(1))
    for m, n, k in ((8192, 8192, 8192), (16384, 8192, 2048), (4096, 4096, 1024)):
        yield lambda m=m, n=n, k=k: product(m, n, k, torch.bfloat16, "bf16")  # type: ignore[misc]
    yield lambda: product(8192, 8192, 8192, torch.float16, "fp16")
    yield lambda: product(8192, 8192, 8192, torch.float32, "fp32")
    yield lambda: product(8192, 8192, 8192, torch.float32, "tf32", tf32=True)
    x, half = torch.randn(2**28, device="cuda"), torch.randn(2**28, device="cuda", dtype=torch.bfloat16)
    y, rows, weight = torch.empty_like(x), half.view(-1, 4096), torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    yield lambda: Load("copy", lambda: y.copy_(x), 0.0, 2.0 * 2**30)
    yield lambda: Load("gelu bf16", lambda: F.gelu(half), 0.0, 2.0 * 2**29)
    yield lambda: Load("layer norm bf16", lambda: F.layer_norm(rows, (4096,), weight, weight), 0.0, 2.0 * 2**29)
    yield lambda: attention(64)
    yield lambda: attention(128)
    yield convolution
    yield adamw


def timed(run: Callable[[], Any], times: int) -> float:
    """Return the seconds that the GPU takes for so many calls."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def measure(load: Load, handle: Any) -> dict[str, Any]:
    """Measure an operation in bursts."""
    timed(load.run, 3)
    times = max(1, int(BURST_SECONDS / (timed(load.run, 3) / 3)))
    busy, bursts, clocks = 0.0, 0, []
    began, joules = time.perf_counter(), nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
    while time.perf_counter() - began < SECONDS:
        burst = timed(load.run, times)
        busy, bursts = busy + burst, bursts + 1
        time.sleep(burst * (1 / DUTY - 1))
        if bursts % CLOCK_EVERY == 0:
            clocks.append(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
    spent = time.perf_counter() - began
    watts = (nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3 - joules) / spent
    each = busy / bursts / times
    return {
        "name": load.name,
        "duty": busy / spent,
        "watts": watts,
        "seconds": each,
        "flop_per_second": load.flop / each,
        "bytes_per_second": load.moved / each,
        "clocks_mhz": sorted(set(clocks)),
    }


def parts(share: float) -> list[tuple[Load, float]]:
    """Return products and four other kernels, with the share of time that each is to take."""
    image = torch.randn(32, 1024, 28, 28, device="cuda", dtype=torch.bfloat16)
    small, large = torch.randn(2**22, device="cuda", dtype=torch.bfloat16), torch.randn(2**28, device="cuda")
    copy, mean, variance = torch.empty_like(large), torch.zeros(1024, device="cuda"), torch.ones(1024, device="cuda")
    matrix = torch.randn(2048, 2048, device="cuda")
    others = [
        Load("gelu bf16 in the cache", lambda: F.gelu(small)),
        Load("batch norm bf16", lambda: F.batch_norm(image, mean, variance, training=True)),
        Load("copy", lambda: copy.copy_(large)),
        Load("fp32 product", lambda: torch.mm(matrix, matrix)),
    ]
    first = product(8192, 8192, 8192, torch.bfloat16, "bf16")
    return [(first, share), *((each, (1 - share) / len(others)) for each in others if share < 1)]


def mixture(share: float, handle: Any) -> dict[str, Any]:
    """Measure parts that run in turns: each with pauses, and without until the power limit has its effect."""
    found = parts(share)
    torch.backends.cuda.matmul.allow_tf32 = False
    times = [max(1, round(part * ROUND_SECONDS / (timed(load.run, 3) / 3))) for load, part in found]
    line: dict[str, Any] = {"share": share, "times": times, "parts": [load.name for load, _ in found]}
    for name, pause, seconds in (("paused", 1 / DUTY - 1, 1.0), ("sustained", 0.0, 2.5)):
        began, joules = time.perf_counter(), nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
        rounds, clocks = [], []
        while (passed := time.perf_counter() - began) < seconds:
            rounds.append([timed(load.run, count) / count for (load, _), count in zip(found, times, strict=True)])
            time.sleep(pause * sum(each * count for each, count in zip(rounds[-1], times, strict=True)))
            if passed > seconds / 2:
                clocks.append(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        watts = (nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3 - joules) / (time.perf_counter() - began)
        late = rounds[len(rounds) // 2 :]
        line[name] = {
            "seconds": [sum(column) / len(late) for column in zip(*late, strict=True)],
            "watts": watts,
            "mhz": sum(clocks) / max(len(clocks), 1),
        }
    return line


def main() -> int:
    """Measure all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mixtures", action="store_true", help="measure what lower clocks slow")
    options = parser.parse_args()
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    about = {
        "gpu": torch.cuda.get_device_name(),
        "limit_watts": nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
        "torch": str(torch.__version__),
        "driver": str(nvml.nvmlSystemGetDriverVersion()),
    }
    with options.out.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"environment": about}) + "\n")
        for share in MIXTURES if options.mixtures else ():
            line = mixture(share, handle)
            file.write(json.dumps(line) + "\n")
            file.flush()
            print(line, flush=True)
        for make in () if options.mixtures else loads():
            line = measure(make(), handle)
            file.write(json.dumps(line) + "\n")
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
