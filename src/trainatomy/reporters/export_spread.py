"""The lines of a plain PyTorch loop that spread it over GPUs, one process for each, started by torchrun."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainatomy.results.prediction import Plan
from trainatomy.workload.parallel import ParallelSpec
from trainatomy.workload.schema import Workload
from trainatomy.workload.support import belongs_to


@dataclass(frozen=True, slots=True)
class SpreadCode:
    """Lines of code that several GPUs add to a loop.

    Attributes:
        imports: Imports of other modules than ``torch`` and its ``DataLoader``.
        start: Lines at the beginning of the function.
        spread: Lines between moving the model to the GPU and making the optimizer.
        moves: Whether the model is moved to the GPU as on one GPU.
        skips_sync: The context of a micro-batch that does not reduce gradients; empty if there is none.
        syncs: The line before a micro-batch that says whether it reduces gradients (``last``); empty if there is none.
        shards_optimizer: Whether ``ZeroRedundancyOptimizer`` wraps the optimizer.
        devices: GPUs that the process divides each batch among.
        remarks: What is left to do, as comments.
    """

    imports: tuple[str, ...] = ()
    start: tuple[str, ...] = ()
    spread: tuple[str, ...] = ()
    moves: bool = True
    skips_sync: str = ""
    syncs: str = ""
    shards_optimizer: bool = False
    devices: int = 1
    remarks: tuple[str, ...] = field(default=())


_PROCESS = 'dist.init_process_group("{}" if device == "cuda" else "gloo")'
_GPU = ('if device == "cuda":', '    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))')
_COMMON = ("import os", "import torch.distributed as dist", "from torch.utils.data import DistributedSampler")


def spread_code(workload: Workload) -> SpreadCode | None:
    """Return what several GPUs add to the loop of a workload; ``None`` on one GPU."""
    parallel, plan = workload.parallel, Plan.of(workload.to_mapping())
    if parallel.world_size == 1:
        return None
    if plan.strategy == "dp":
        return SpreadCode(spread=("model = torch.nn.DataParallel(model)",), devices=parallel.devices)
    offloads = parallel.offload_policy is not None  # the norm of gradients in host memory is a collective of the CPU
    start = (_PROCESS.format("cpu:gloo,cuda:nccl" if offloads else "nccl"), *_GPU)
    if parallel.pp_size > 1 or parallel.tp_size > 1 or plan.strategy == "fsdp1":
        missing = ["FSDP1"] * (plan.strategy == "fsdp1")
        missing += [f"tensor parallelism over {parallel.tp_size} GPUs"] * (parallel.tp_size > 1)
        missing += [f"a pipeline over {parallel.pp_size} GPUs"] * (parallel.pp_size > 1)
        return SpreadCode(_COMMON, start, remarks=(f"not written out: {' and '.join(missing)}",))
    if plan.strategy == "fsdp2":
        return _fsdp2(parallel, plan, start)
    names = ("gradient_as_bucket_view", "static_graph", "find_unused_parameters", "bucket_cap_mb", "broadcast_buffers")
    options = [f"{name}={value!r}" for name in names if (value := _set(parallel, name)) is not None]
    wrapper = ", ".join(["model", *options])
    wraps = "from torch.nn.parallel import DistributedDataParallel"
    shards = "from torch.distributed.optim import ZeroRedundancyOptimizer"
    return SpreadCode(
        imports=(*_COMMON, *([shards] if plan.strategy == "zero1" else []), wraps),
        start=start,
        spread=(f"model = DistributedDataParallel({wrapper})",),
        skips_sync="" if parallel.sync_each_batch else "model.no_sync()",
        shards_optimizer=plan.strategy == "zero1",
    )


def _set(parallel: ParallelSpec, name: str) -> object:
    """Return the value of an option that differs from its default, ``None`` of one that does not."""
    value = getattr(parallel, name)
    return None if value == ParallelSpec.model_fields[name].default or not belongs_to(name, "ddp") else value


def _fsdp2(parallel: ParallelSpec, plan: Plan, start: tuple[str, ...]) -> SpreadCode:
    imports, options = ["from torch.distributed.fsdp import fully_shard"], list[str]()
    if plan.replicas > 1:
        imports.append("from torch.distributed.device_mesh import init_device_mesh")
        sizes = f"({plan.replicas}, {plan.data_parallel_size // plan.replicas})"
        options.append(f'"mesh": init_device_mesh(device, {sizes}, mesh_dim_names=("replicate", "shard"))')
    if (policy := parallel.mp_policy) is not None:
        imports[0] += ", MixedPrecisionPolicy"
        given = {"param_dtype": policy.param_dtype, "reduce_dtype": policy.reduce_dtype}
        dtypes = ", ".join(f"{name}=torch.{dtype}" for name, dtype in given.items() if dtype)
        options.append(f'"mp_policy": MixedPrecisionPolicy({dtypes})')
    if parallel.offload_policy is not None:
        imports[0] += ", CPUOffloadPolicy"
        options.append('"offload_policy": CPUOffloadPolicy()')
    keeps_last = parallel.reshard_after_forward == "all_but_last"
    if parallel.reshard_after_forward is not None and not keeps_last:
        options.append(f'"reshard_after_forward": {parallel.reshard_after_forward!r}')
    keywords = ", **options" if options else ""
    spread = [
        *(["options = {", *(f"    {option}," for option in options), "}"] if options else []),
        "layers = [each for each in model.modules() if type(each).__name__ in model._no_split_modules]",
        "for layer in layers:" if not keeps_last else "for layer in layers[:-1]:",
        f"    fully_shard(layer{keywords})",
        *([f"fully_shard(layers[-1], reshard_after_forward=False{keywords})"] if keeps_last else []),
        f"fully_shard(model{keywords})",
        *([] if parallel.offload_policy else ["model.to(device)"]),
        "model.train()",
    ]
    syncs = "" if parallel.sync_each_batch else "model.set_requires_gradient_sync(last)"
    return SpreadCode((*_COMMON, *imports), start, tuple(spread), moves=False, syncs=syncs)
