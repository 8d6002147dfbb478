"""Functions that run in the ranks of tests: some end well, some do not."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainatomy.errors import WorkloadError
from trainatomy.measurement.process.job import Reporter
from trainatomy.measurement.step import group
from trainatomy.workload.parallel import ParallelSpec


def rank() -> int:
    """Return the rank of this process."""
    return int(os.environ["RANK"])


def total_of_ranks(arguments: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Add the ranks up by an all-reduce."""
    group.BACKEND = "gloo"
    reporter.step(1, 2, 7)
    joined = group.join(group.place_of(ParallelSpec(gpus=arguments["gpus"])))
    value = torch.tensor([float(joined.rank + 1)])
    dist.all_reduce(value)
    agreed = joined.agree("steps", 10.0 + joined.rank)
    joined.wait_for_all()
    return {"total": value.item(), "agreed": agreed, "allocator": os.environ.get("PYTORCH_ALLOC_CONF")}


def one_rank_raises(arguments: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Fail in rank 1 while the others wait for it."""
    if rank() == 1:
        raise WorkloadError("train.optim: unknown")
    return hang(arguments, reporter)


def one_rank_leaves(arguments: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Have a result in rank 1 while the others wait for it."""
    return {"found": rank(), "left_early": True} if rank() == 1 else hang(arguments, reporter)


def one_rank_dies(arguments: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Kill the process of rank 1, with last words, while the others wait for it."""
    if rank() == 1:
        print("CUDA error: misaligned", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    return hang(arguments, reporter)


def hang(arguments: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Never end, and ignore requests to."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(arguments["pids"], str(os.getpid())).touch()
    reporter.stage("training")
    time.sleep(600)
    return {}


def variable(arguments: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Return the value of a variable of NCCL."""
    return {"value": os.environ.get("NCCL_P2P_DISABLE")}
