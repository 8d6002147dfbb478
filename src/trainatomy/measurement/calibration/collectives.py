"""Measure collectives by size on this machine's links, for the section ``collectives`` of a calibration.

Sizes are those of whole messages, as nccl-tests counts them: the output of an all-gather, the input of a
reduce-scatter, one rank's buffer otherwise.
"""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Any

from trainatomy.errors import DeviceError
from trainatomy.measurement.process.pool import TimeLimit
from trainatomy.measurement.process.ranks import RankProcesses, RankTask
from trainatomy.measurement.step.group import COLLECTIVE_SECONDS, RankGroup, join, place_of
from trainatomy.units import human_bytes
from trainatomy.workload.parallel import ParallelSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainatomy.measurement.process.progress import Reporter

DEVICE = "cuda"
SIZES = tuple(1024 * 4**power for power in range(11))
"""1 KiB to 1 GiB."""
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
TASK = "trainatomy.measurement.calibration.collectives:measure_rank"
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
    task = RankTask("collectives", TASK, {"gpus": gpus, "time_limit": time_limit})
    limit = TimeLimit(time_limit + COLLECTIVE_SECONDS)
    with RankProcesses(gpus) as processes:
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
    import torch

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
    import torch

    call = collective(kind, size, group, DEVICE)
    calls = max(min(_BYTES_IN_A_ROW // size, _MOST_CALLS), 2)
    for _ in range(_WARM_UP):
        call()
    torch.cuda.synchronize()
    seconds = median(_period(call, calls) for _ in range(REPEATS))
    ranks = 2 if kind == "send" else group.size
    return {"kind": kind, "ranks": ranks, "nodes": 1, "bytes": size, "seconds": seconds}


def _period(call: Callable[[], None], calls: int) -> float:
    """Return the GPU's seconds for one of ``calls`` calls in a row.

    The GPU waits until they are queued, so that the CPU's time to launch them does not count; the first call, which is
    not timed, makes the ranks begin together.
    """
    import torch

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
    import torch
    import torch.distributed as dist

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
