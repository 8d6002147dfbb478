"""Functions that run in the ranks of tests: some end well, some do not."""

from __future__ import annotations

import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainatomy.errors import WorkloadError
from trainatomy.measurement.process.progress import Reporter
from trainatomy.measurement.step import group
from trainatomy.training.model import build_model
from trainatomy.training.observer import Silent
from trainatomy.training.optimizer import tensors_in
from trainatomy.training.parallel.deepspeed import engine_tensors
from trainatomy.training.process import preload
from trainatomy.training.run import run
from trainatomy.workload.parallel import ParallelSpec
from trainatomy.workload.schema import Workload

RANK = int(os.environ.get("RANK", "0"))


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
    if RANK == 1:
        raise WorkloadError("train.optim: unknown")
    return hang(arguments, reporter)


def one_rank_leaves(arguments: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Have a result in rank 1 while the others wait for it."""
    return {"found": RANK, "left_early": True} if RANK == 1 else hang(arguments, reporter)


def one_rank_dies(arguments: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Kill the process of rank 1, with last words, while the others wait for it."""
    if RANK == 1:
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


def measured_on_cpu(arguments: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Measure a rank with fake CUDA and NVML; its steps and its collectives are real, on the CPU."""
    import pytest
    from fake_gpu import MIB, FakeNvml, fake_cuda

    from trainatomy.measurement.device import nvml
    from trainatomy.measurement.step import runner

    group.BACKEND = "gloo"
    library = FakeNvml(pid=os.getpid())
    patch = pytest.MonkeyPatch()
    patch.setattr(nvml, "_library", lambda: library)
    fake_cuda(patch, library, [{"action": "alloc", "addr": 1, "size": 4, "stream": 0}])
    patch.setattr(torch.cuda, "set_device", lambda index: None)
    patch.setattr(torch.cuda, "memory_snapshot", list, raising=False)

    def connect() -> None:
        dist.all_reduce(torch.zeros(1))
        library.used += (100 + RANK) * MIB

    patch.setattr(runner, "first_collective", connect)
    if arguments.get("fails") == RANK:
        out_of_memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        def fail(*_: object, **__: object) -> None:
            raise out_of_memory

        patch.setattr(torch.optim.AdamW, "step", fail)
    return runner.run_rank(arguments, reporter)


def collectives_on_cpu(arguments: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Measure real collectives on the CPU, as if each took half a second."""
    import pytest
    from fake_gpu import FakeEvent

    from trainatomy.measurement.calibration import collectives

    group.BACKEND = "gloo"
    patch = pytest.MonkeyPatch()
    patch.setattr(collectives, "DEVICE", "cpu")
    patch.setattr(collectives, "SIZES", (1024, 4096))
    patch.setattr(torch.cuda, "set_device", lambda index: None)
    patch.setattr(torch.cuda, "synchronize", lambda: None)
    patch.setattr(torch.cuda, "_sleep", lambda cycles: None, raising=False)
    patch.setattr(torch.cuda, "Event", FakeEvent)
    return collectives.measure_rank(arguments, reporter)


def gradients_beside_one_process(arguments: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Run a forward and a backward pass spread over the ranks; return the largest difference from the whole model."""
    import copy

    from torch.distributed.tensor import DTensor

    from trainatomy.training.outputs import loss_of
    from trainatomy.training.parallel.spread import spread_over_gpus

    group.BACKEND = "gloo"
    workload = Workload.from_mapping(arguments["workload"])
    group.join(group.place_of(workload.parallel))
    torch.manual_seed(0)
    whole: Any = build_model(workload)
    ids = torch.randint(0, whole.config.vocab_size, (workload.batch_size, 8))
    batch = {"input_ids": ids, "labels": ids}
    model = copy.deepcopy(whole)
    loss = whole(**batch).loss
    loss.backward()
    if workload.parallel.pp_size > 1:
        from trainatomy.training.parallel.pipeline import Pipeline

        losses = Pipeline(workload, model, "cpu", Silent()).step(batch)
        own = torch.stack(losses).mean() if losses else loss
    else:
        spread = spread_over_gpus(model, workload.parallel, "cpu")
        own = loss_of(spread.module(**batch))
        own.backward()
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    differences = [(own - loss).abs().item()]
    for name, parameter in model.named_parameters():
        grad: Any = parameter.grad
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        differences.append((grad - expected[name]).abs().max().item())
    return {"difference": max(differences), "parameters": len(differences) - 1}


def deepspeed_sizes(arguments: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Train with DeepSpeed's engine on CPUs; return the bytes that its optimizer holds, and the order of events."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    workload = Workload.from_mapping(arguments["workload"])
    preload(workload)
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]  # would be compiled
    group.BACKEND = "gloo"
    group.join(group.place_of(workload.parallel))
    observer = Sizes()
    run(workload, build_model(workload), device="cpu", steps=1, observer=observer)
    return {"sizes": observer.sizes, "events": observer.events}


class Sizes(Silent):
    """Observer that notes what the optimizer holds after its step, and in which order the loop notifies it."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.events: list[str] = []
        self._optimizer: Any = None

    def ready(self, model: Any, optimizer: Any) -> None:
        self.events.append("ready")
        self._optimizer = optimizer

    def micro_step_end(self, micro_step: int) -> None:
        self.events.append("micro_step_end")

    def optimizer_begin(self) -> None:
        self.events.append("optimizer_begin")

    def optimizer_end(self) -> None:
        self.events.append("optimizer_end")
        held = dict(engine_tensors(self._optimizer))
        held["optimizer_state"] = list(tensors_in(list(self._optimizer.state.values())))
        self.sizes = {label: sum(tensor.nbytes for tensor in tensors) for label, tensors in held.items()}
