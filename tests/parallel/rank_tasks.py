"""Functions that train in the ranks of tests.

All imports are here, where they happen once for all forks.
"""

from __future__ import annotations

import copy
import os
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_gpu import MIB, FakeEvent, FakeNvml, fake_cuda
from torch.distributed.tensor import DTensor

from trainatomy.measurement.calibration import device
from trainatomy.measurement.device import nvml
from trainatomy.measurement.process.job import Reporter
from trainatomy.measurement.step import group, runner
from trainatomy.measurement.step.group import followed
from trainatomy.simulator.parallel.recorder import local
from trainatomy.training.factory import loss_of
from trainatomy.training.model import build_model
from trainatomy.training.observer import Observer
from trainatomy.training.optimizer import tensors_in
from trainatomy.training.parallel import strategies  # noqa: F401  takes most of a second to import
from trainatomy.training.parallel.deepspeed import engine_tensors
from trainatomy.training.parallel.pipeline import Pipeline
from trainatomy.training.parallel.spread import spread_over_gpus
from trainatomy.training.process import preload
from trainatomy.training.run import run
from trainatomy.workload.schema import Workload


def measured_on_cpu(arguments: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Measure a rank with fake CUDA and NVML; its steps and its collectives are real, on the CPU."""
    group.BACKEND = "gloo"
    rank = int(os.environ["RANK"])
    library = FakeNvml(pid=os.getpid())
    patch = pytest.MonkeyPatch()
    patch.setattr(nvml, "_library", lambda: library)
    fake_cuda(patch, library, [{"action": "alloc", "addr": 1, "size": 4, "stream": 0}])
    patch.setattr(torch.cuda, "set_device", lambda index: None)
    patch.setattr(torch.cuda, "memory_snapshot", list, raising=False)

    def connect() -> None:
        dist.all_reduce(torch.zeros(1))
        library.used += (100 + rank) * MIB

    patch.setattr(runner, "first_collective", connect)
    if arguments.get("fails") == rank:
        out_of_memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        def fail(*_: object, **__: object) -> None:
            raise out_of_memory

        patch.setattr(torch.optim.AdamW, "step", fail)
    return runner.run_rank(arguments, reporter)


def collectives_on_cpu(arguments: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Measure real collectives on the CPU, as if each took half a second."""
    group.BACKEND = "gloo"
    patch = pytest.MonkeyPatch()
    patch.setattr(device, "DEVICE", "cpu")
    patch.setattr(device, "SIZES", (1024, 4096))
    patch.setattr(torch.cuda, "set_device", lambda index: None)
    patch.setattr(torch.cuda, "synchronize", lambda: None)
    patch.setattr(torch.cuda, "_sleep", lambda cycles: None, raising=False)
    patch.setattr(torch.cuda, "Event", FakeEvent)
    return device.measure_rank(arguments, reporter)


def gradients_beside_one_process(arguments: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Run a forward and a backward pass spread over the ranks, and clip the gradients; compare it with the whole model.

    Returns:
        The largest difference of the loss and the gradients, and the shapes of what this rank holds of the parameters.
    """
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
        pipeline = spread = Pipeline(workload, model, "cpu", Observer())
        losses = pipeline.step(batch)
        own = torch.stack(losses).mean() if losses else loss
    else:
        spread = spread_over_gpus(model, workload.parallel, "cpu")
        own = loss_of(spread.module(**batch))
        own.backward()
    differences = [(own - loss).abs().item(), *_differences(model, whole)]
    half = torch.nn.utils.get_total_norm([parameter.grad for parameter in whole.parameters()]).item() / 2
    torch.nn.utils.clip_grad_norm_(whole.parameters(), half)
    spread.clip(half)
    differences += _differences(model, whole)
    return {
        "difference": max(differences),
        "shapes": {name: list(local(parameter).shape) for name, parameter in model.named_parameters()},
    }


def packed_weights_on_cpu(arguments: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Shard a small Llama with 4-bit weights by FSDP on the CPU; return its loss, and what this rank holds."""
    import bitsandbytes
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from transformers import LlamaConfig, LlamaForCausalLM

    group.BACKEND = "gloo"
    group.join(group.RankGroup(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), 2))
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**arguments["config"])).to(torch.bfloat16)
    layers = [
        (parent, name, child) for parent in model.model.layers.modules() for name, child in parent.named_children()
    ]
    for parent, name, child in layers:
        if isinstance(child, torch.nn.Linear):
            made = bitsandbytes.nn.Linear4bit(
                child.in_features, child.out_features, bias=False, quant_type="nf4", quant_storage=torch.bfloat16
            )
            made.weight.data = child.weight.data
            setattr(parent, name, made.to("cpu"))
    model.requires_grad_(False)
    ids = torch.randint(0, 100, (1, 8))
    whole = loss_of(model(input_ids=ids, labels=ids)).item()
    packed = [each for each in model.modules() if isinstance(each, bitsandbytes.nn.Linear4bit)]
    if arguments["version"] == 1:
        policy = ModuleWrapPolicy({type(layer) for layer in model.model.layers})
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
        held = [parameter for name, parameter in model.named_parameters() if "layers" in name]
    else:
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        held = [layer.weight for layer in packed]
    loss = loss_of(model(input_ids=ids, labels=ids)).item()
    return {
        "loss": loss,
        "loss of whole": whole,
        "packed": sum(int(local(parameter).nbytes) for parameter in held),
        "scales": sum(each.quant_state.absmax.numel() for each in packed),
    }


def communication_on_cpu(arguments: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Train on the CPU; return the sizes of weights that were gathered, and how often a collective or buckets came."""
    group.BACKEND = "gloo"
    workload = Workload.from_mapping(arguments["workload"])
    group.join(group.place_of(workload.parallel))
    observer = Communication()
    with followed(observer):
        run(workload, build_model(workload), device="cpu", steps=workload.steps or 1, observer=Observer())
    return {"gathered": sorted(observer.sizes), "collectives": observer.collectives, "buckets": observer.buckets}


def adapters_saved_on_cpu(arguments: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Save and load adapters and their optimizer by accelerate's functions for FSDP; return the sizes of files."""
    from accelerate import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils

    group.BACKEND = "gloo"
    workload = Workload.from_mapping(arguments["workload"])
    place = group.join(group.place_of(workload.parallel))
    PartialState(cpu=True)
    version, kind, folder = arguments["version"], arguments["kind"], arguments["folder"]
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind)
    model: Any = build_model(workload)
    spread = spread_over_gpus(model, workload.parallel, "cpu")
    ids = torch.randint(0, 100, (1, 8))
    optimizer = torch.optim.AdamW([each for each in spread.module.parameters() if each.requires_grad])
    loss_of(spread.module(input_ids=ids, labels=ids)).backward()
    optimizer.step()
    accelerator: Any = SimpleNamespace(
        num_processes=place.size, process_index=place.rank, is_fsdp2=version == 2, is_main_process=place.rank == 0,
        wait_for_everyone=dist.barrier, device=torch.device("cpu"),
    )  # fmt: skip
    given = (plugin, accelerator)
    fsdp_utils.save_fsdp_model(*given, spread.module, folder, adapter_only=True)
    fsdp_utils.save_fsdp_optimizer(*given, optimizer, spread.module, folder)
    dist.barrier()
    fsdp_utils.load_fsdp_model(*given, spread.module, folder, adapter_only=True)
    fsdp_utils.load_fsdp_optimizer(*given, optimizer, spread.module, folder, adapter_only=True)
    files = {str(each.relative_to(folder)): each.stat().st_size for each in Path(folder).rglob("*") if each.is_file()}
    dist.barrier()
    return {"files": files}


class Communication:
    """Counts what it is told of communication."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.collectives = self.buckets = 0

    def communicates(self, tensors: list[torch.Tensor]) -> None:
        self.collectives += bool(tensors)

    def gathered(self, storage: torch.UntypedStorage) -> None:
        self.sizes.append(storage.nbytes())

    def buckets_begin(self) -> None:
        self.buckets += 1

    def buckets_end(self) -> None: ...


def _differences(model: torch.nn.Module, whole: torch.nn.Module) -> list[float]:
    """Return the largest difference of each gradient that this rank has a part of."""
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    found = []
    for name, parameter in model.named_parameters():
        grad: Any = parameter.grad
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        found.append((grad - expected[name]).abs().max().item())
    return found


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


class Sizes(Observer):
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
