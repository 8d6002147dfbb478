"""Measure GPU overheads beside kernels: consecutive launches, memory allocation by the driver, synchronisation.

Measure collectives by size on this machine's links, for the section ``collectives`` of a calibration.

Sizes are those of whole messages, as nccl-tests counts them: the output of an all-gather, the input of a
reduce-scatter, one rank's buffer otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from trainatomy.errors import DeviceError
from trainatomy.measurement.calibration.cases import MIB
from trainatomy.measurement.process.job import Reporter, Task
from trainatomy.measurement.process.pool import Processes, TimeLimit
from trainatomy.measurement.profiled_calls import profiled
from trainatomy.measurement.step.group import COLLECTIVE_SECONDS, RankGroup, join, place_of
from trainatomy.units import human_bytes
from trainatomy.workload.parallel import ParallelSpec

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


DEVICE = "cuda"
SIZES = tuple(1024 * 4**power for power in range(11))
"""1 KiB to 1 GiB."""
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
TASK = "trainatomy.measurement.calibration.device:measure_rank"
REPEATS = 5
_WARM_UP = 2
_SLEEP_CYCLES = 10_000_000
"""Cycles that the GPU waits, some milliseconds, while the CPU queues the calls that are timed."""
_MOST_CALLS = 20
_BYTES_IN_A_ROW = 2**28
"""Calls that are timed in a row move about this many bytes."""


def collectives_section(gpus: int, *, time_limit: float, report: Callable[[str], None]) -> dict[str, Any]:
    """Return the section for ``gpus`` GPUs of this machine, with a process for each.

    Args:
        gpus: Number of GPUs.
        time_limit: Seconds after which kinds that are not measured are left out.
        report: Called with lines of progress.

    Raises:
        DeviceError: A process died.
    """
    began = time.monotonic()
    task = Task("collectives", TASK, {"gpus": gpus, "time_limit": time_limit}, ranks=gpus)
    limit = TimeLimit(time_limit + COLLECTIVE_SECONDS)
    with Processes() as processes:
        answers = processes.run(task, limit, lambda progress: report(f"collectives: {progress.stage}"))
    for answer in answers:
        if not answer.went_well and not answer.was_stopped:
            raise answer.died() if answer.result is None else DeviceError(str(answer.result.get("message")))
    found = slowest([answer.result["points"] for answer in answers if answer.result])
    left_out: list[str] = next(
        (answer.result["left_out"] for answer in answers if answer.result and answer.rank == 0), []
    )
    report(f"collectives on {gpus} GPUs: {len(found)} points, {time.monotonic() - began:.1f} s")
    return {"points": found, "left_out": left_out}


def slowest(by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the points with the time of the rank that took longest."""
    return [
        {**rows[0], "seconds": round(max(row["seconds"] for row in rows), 9)} for rows in zip(*by_rank, strict=True)
    ]


def measure_rank(arguments: Mapping[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Measure every kind and size in one rank of ``arguments["gpus"]``."""
    deadline = time.monotonic() + arguments["time_limit"]
    place = place_of(ParallelSpec(gpus=arguments["gpus"]))
    torch.cuda.set_device(place.local_rank)
    group = join(place)
    points: list[dict[str, Any]] = []
    left_out: list[str] = []
    for kind in KINDS:
        if group.agree(f"time for {kind}", float(time.monotonic() < deadline)):
            reporter.stage(f"{kind}, {human_bytes(SIZES[0])} to {human_bytes(SIZES[-1])}")
            points += [_point(kind, size, group) for size in SIZES]
        else:
            left_out.append(f"{kind}: out of time")
    group.wait_for_all()
    return {"points": points, "left_out": left_out}


def _point(kind: str, size: int, group: RankGroup) -> dict[str, Any]:
    call = collective(kind, size, group, DEVICE)
    calls = max(min(_BYTES_IN_A_ROW // size, _MOST_CALLS), 2)
    for _ in range(_WARM_UP):
        call()
    torch.cuda.synchronize()
    seconds = median(_collective_period(call, calls) for _ in range(REPEATS))
    ranks = 2 if kind == "send" else group.size
    return {"kind": kind, "ranks": ranks, "nodes": 1, "bytes": size, "seconds": seconds}


def _collective_period(call: Callable[[], None], calls: int) -> float:
    """Return the GPU's seconds for one of ``calls`` calls in a row.

    The GPU waits until they are queued, so that the CPU's time to launch them does not count; the first call, which is
    not timed, makes the ranks begin together.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    sleep: Any = torch.cuda._sleep
    sleep(_SLEEP_CYCLES)
    call()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000 / calls


def collective(kind: str, size: int, group: RankGroup, device: str) -> Callable[[], None]:
    """Return a function that runs a collective of ``size`` bytes of bfloat16 on the current stream."""
    ranks = group.size
    number = size // 2 // ranks * ranks
    whole = torch.ones(number, dtype=torch.bfloat16, device=device)
    other = torch.empty_like(whole)
    share = torch.ones(number // ranks, dtype=torch.bfloat16, device=device)

    def send() -> None:
        if group.rank == 0:
            dist.send(whole, 1)
        elif group.rank == 1:
            dist.recv(other, 0)

    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, share),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(share, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "send": send,
    }
    return calls[kind]
