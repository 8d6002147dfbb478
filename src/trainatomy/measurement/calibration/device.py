"""Measure GPU overheads beside kernels: consecutive launches, memory allocation by the driver, synchronisation."""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from trainatomy.measurement.calibration.cases import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

LAUNCHES = 400
"""Consecutive launches: fewer than the 1024 that fit a stream's queue."""
SEQUENCES = 20
"""Repetitions of a short sequence of kernels in which, as in training, each follows a different one."""
SLEEP_CYCLES = 20_000_000
"""The GPU sleeps about 10 ms so that the CPU is ahead when it starts."""


def launches() -> list[dict[str, float]]:
    """Return microseconds between the starts of consecutive kernels with the CPU far ahead, by bytes updated."""
    found = []
    for size in (4, 65536, MIB, 4 * MIB, 16 * MIB):
        x = torch.zeros(max(size // 4, 1), device="cuda")
        periods = [_period(partial(x.add_, 1.0)) for _ in range(5)]
        found.append({"bytes": size, "period_us": round(median(periods), 3)})
    return found


def _period(work: Callable[[], Any], runs: int = LAUNCHES) -> float:
    for _ in range(10):
        work()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(SLEEP_CYCLES)
    begin.record()
    for _ in range(runs):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / runs


def gap() -> dict[str, float]:
    """Return ``gap_us``: microseconds from the end of a kernel to the start of the next, with the CPU far ahead.

    It is the time of a sequence of different kernels, minus that of each of them.  The same kernel repeated starts
    sooner after itself, so that would not represent a training.
    """
    from torch.nn import functional

    from trainatomy.measurement.profiler.calls import profiled

    x, weight = (torch.randn(2048, 1024, device="cuda") for _ in range(2))
    last = x.new_zeros(1024)

    def sequence() -> None:
        functional.layer_norm(functional.gelu(functional.linear(x, weight[:1024])).add(last), (1024,)).softmax(-1)

    events: list[dict[str, Any]] = []
    with profiled(events):
        for _ in range(SEQUENCES):
            sequence()
    kernels = sorted((event["ts"], event["dur"]) for event in events if event.get("cat") == "kernel")
    each = len(kernels) // SEQUENCES
    busy = sum(median(microseconds for _, microseconds in kernels[first::each]) for first in range(each))
    period = median(_period(sequence, LAUNCHES // each) for _ in range(5))
    return {"gap_us": round(max(period - busy, 0.0) / each, 3)}


def synchronisation() -> dict[str, float]:
    """Return microseconds on an idle GPU: from a launch to its result on the CPU, and of a synchronisation."""
    x = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    return {
        "item_us": _cpu_microseconds(lambda: x.item()),
        "launch_to_item_us": _cpu_microseconds(lambda: (x + 1).item()),
        "synchronize_us": _cpu_microseconds(torch.cuda.synchronize),
    }


def _cpu_microseconds(work: Callable[[], Any], runs: int = 200) -> float:
    for _ in range(10):
        work()
    taken = []
    for _ in range(runs):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return round(median(taken) * 1e6, 2)


def memory() -> list[dict[str, float]]:
    """Return microseconds of ``cudaMalloc`` and ``cudaFree`` by size, and of an allocation from PyTorch's cache.

    Sizes that do not fit on the GPU are left out.
    """
    found = []
    for size in (2 * MIB, 20 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB, 4096 * MIB):
        try:
            rounds = [_allocation_seconds(size) for _ in range(5)]
        except torch.OutOfMemoryError:
            break
        names = ("malloc_us", "free_us", "cached_us")
        medians = (round(median(taken) * 1e6, 2) for taken in zip(*rounds, strict=True))
        found.append({"bytes": size} | dict(zip(names, medians, strict=True)))
    return found


def _allocation_seconds(size: int) -> tuple[float, float, float]:
    """Return the seconds to allocate a block from the driver, to return it, and to allocate it from the cache."""
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    times = [time.perf_counter()]
    for _ in range(2):  # from the driver, then from the cache
        block = torch.empty(size, dtype=torch.uint8, device="cuda")
        times.append(time.perf_counter())
        del block
        times.append(time.perf_counter())
    torch.cuda.empty_cache()
    times.append(time.perf_counter())
    return times[1] - times[0], times[5] - times[4], times[3] - times[2]
