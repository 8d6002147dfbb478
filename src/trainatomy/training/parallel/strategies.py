"""The strategies of ``loop: pytorch``, one class each.

Each takes the model from the CPU, as a script that ``torchrun`` starts would.

Clipping gradients of parameters that lie on several device meshes.

PyTorch's ``clip_grad_norm_`` takes gradients of one mesh only, so the norms of the meshes are combined as numbers.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from trainatomy.errors import WorkloadError
from trainatomy.training.optimizer import sharded_optimizer
from trainatomy.training.parallel.spread import Spread, share_experts, share_sequences, shared
from trainatomy.training.parallel.tensor import shard_layers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import TrainingArguments

    from trainatomy.training.batch import Batch
    from trainatomy.workload.parallel import ParallelSpec
    from trainatomy.workload.train import TrainSpec


def clip_by_mesh(model: nn.Module, max_norm: float) -> None:
    """Clip gradients to a norm over all of them."""
    groups = with_gradients_by_mesh(model)
    if len(groups) < 2:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        return
    total = total_norm(groups)
    for parameters in groups:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total)


def with_gradients_by_mesh(model: nn.Module) -> list[list[nn.Parameter]]:
    """Return the parameters that have gradients, those of each mesh and those of none together."""
    found: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            found.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(found.values())


def total_norm(groups: Sequence[Sequence[nn.Parameter]]) -> torch.Tensor:
    """Return the norm of all gradients of the groups, whole on each rank."""
    norms = []
    for parameters in groups:
        norm = nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def spread(model: nn.Module, parallel: ParallelSpec, device: str) -> Spread:
    """Spread a model over several GPUs; the process group exists.

    Raises:
        WorkloadError: The strategy cannot be applied to this model.
    """
    strategy = parallel.strategy or "ddp"
    if parallel.data_parallel_size == 1 and strategy in ("ddp", "zero1"):
        return TensorParallel(model, parallel, device)
    return {"ddp": DDP, "zero1": ZeRO1, "fsdp2": FSDP2, "fsdp1": FSDP1}[strategy](model, parallel, device)


class TensorParallel(Spread):
    """Layers sharded by the model's plan; every rank processes the same samples."""

    def __init__(self, model: nn.Module, parallel: ParallelSpec, device: str) -> None:
        """Move the model to the device and shard its layers there."""
        model.to(device)
        mesh = init_device_mesh(torch.device(device).type, (parallel.tp_size,), mesh_dim_names=("tp",))
        if parallel.enable_expert_parallel:
            share_experts(model, mesh)
        else:
            shard_layers(model, mesh, sequences=parallel.sequence_parallel)
        super().__init__(model)

    def clip(self, max_norm: float) -> None:
        """Clip the gradients of sharded and of whole parameters."""
        clip_by_mesh(self.module, max_norm)


class _Wrapped(Spread):
    """A model inside a wrapper that can leave out the reduction of gradients (``no_sync``)."""

    def __init__(self, module: nn.Module, parallel: ParallelSpec) -> None:
        """Take the wrapper."""
        super().__init__(module)
        self._sync_each_batch = parallel.sync_each_batch

    def synchronizes(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Reduce gradients after the last micro-batch only, unless ``parallel.sync_each_batch`` is on."""
        wrapper: Any = self.module
        return contextlib.nullcontext() if last or self._sync_each_batch else wrapper.no_sync()


class DDP(_Wrapped):
    """``DistributedDataParallel``: every rank holds the whole model, and gradients are reduced in buckets."""

    def __init__(self, model: nn.Module, parallel: ParallelSpec, device: str) -> None:
        """Move the model to the device and wrap it."""
        self._model = model.to(device)
        super().__init__(nn.parallel.DistributedDataParallel(model, **ddp_options(parallel)), parallel)


class ZeRO1(DDP):
    """DDP with ``ZeroRedundancyOptimizer``: each rank holds the optimizer states of a part of the parameters."""

    def optimizer(self, train: TrainSpec, arguments: TrainingArguments) -> torch.optim.Optimizer:
        """Return the sharded optimizer."""
        chosen, keywords = sharded_optimizer(train, arguments, self._model)
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        return ZeroRedundancyOptimizer(trained, optimizer_class=chosen, **keywords)

    def with_states(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer of this rank's parameters."""
        inner: torch.optim.Optimizer = optimizer.optim  # type: ignore[attr-defined]
        return inner


ALL_BUT_LAST = "all_but_last"
"""Value of ``parallel.reshard_after_forward`` that keeps the gathered weights of the last layer."""


class FSDP2(Spread):
    """``fully_shard`` on each layer and on the model; with ``tp_size``, on layers that are sharded already."""

    def __init__(self, model: nn.Module, parallel: ParallelSpec, device: str) -> None:
        """Shard the model, which ``fully_shard`` moves to the device; with replicas it is hybrid (HSDP)."""
        self._sync_each_batch = parallel.sync_each_batch
        mesh = _mesh(parallel, torch.device(device).type)
        if parallel.enable_expert_parallel:
            share_experts(model, mesh["tp"])
        elif parallel.tp_size > 1:
            shard_layers(model, mesh["tp"], sequences=parallel.sequence_parallel)
        self._contexts = mesh["cp"] if parallel.cp_size > 1 else None
        if parallel.cp_size > 1:
            share_sequences(model, parallel)
        options = fsdp2_options(parallel, _data_mesh(mesh))
        layers = wrapped_layers(model, parallel)
        kept = layers[-1:] if parallel.reshard_after_forward == ALL_BUT_LAST else []
        for layer in layers:
            fully_shard(layer, **options | ({"reshard_after_forward": False} if layer in kept else {}))
        fully_shard(model, **options)
        offloads = parallel.offload_policy == "cpu"
        super().__init__(model if offloads else model.to(device))  # the buffers; the weights are there already

    def synchronizes(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Reduce gradients after the last micro-batch only, unless ``parallel.sync_each_batch`` is on."""
        if not self._sync_each_batch:
            model: Any = self.module
            model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def sharing(self, batch: Batch) -> contextlib.AbstractContextManager[Any]:
        """Divide the sequences of a batch, with context parallelism."""
        return contextlib.nullcontext() if self._contexts is None else shared(batch, self._contexts)

    def clip(self, max_norm: float) -> None:
        """Clip gradients that may lie on several meshes."""
        clip_by_mesh(self.module, max_norm)


class FSDP1(_Wrapped):
    """``FullyShardedDataParallel``, wrapped around each layer and the model."""

    def __init__(self, model: nn.Module, parallel: ParallelSpec, device: str) -> None:
        """Wrap the model, which moves it to the device."""
        classes = {type(layer) for layer in wrapped_layers(model, parallel)}
        keeps = parallel.reshard_after_forward is False
        on_gpu = torch.device(device).type == "cuda"
        super().__init__(
            FullyShardedDataParallel(
                model,
                auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls=classes),
                device_id=torch.cuda.current_device() if on_gpu else torch.device(device),
                sharding_strategy=ShardingStrategy.SHARD_GRAD_OP if keeps else ShardingStrategy.FULL_SHARD,
                mixed_precision=MixedPrecision(**_dtypes(parallel)) if parallel.mp_policy is not None else None,
                use_orig_params=True,
            ),
            parallel,
        )

    def clip(self, max_norm: float) -> None:
        """Clip by FSDP's own function, which knows that gradients are sharded."""
        wrapper: Any = self.module
        wrapper.clip_grad_norm_(max_norm)

    def scaler(self, kind: str, *, enabled: bool) -> torch.amp.GradScaler:
        """Return the scaler whose ranks agree on whether gradients are finite."""
        return ShardedGradScaler(kind, enabled=enabled)


def ddp_options(parallel: ParallelSpec) -> dict[str, Any]:
    """Return the arguments of ``DistributedDataParallel``."""
    capacity: dict[str, Any] = {} if parallel.bucket_cap_mb is None else {"bucket_cap_mb": parallel.bucket_cap_mb}
    return {
        "gradient_as_bucket_view": parallel.gradient_as_bucket_view,
        "static_graph": parallel.static_graph,
        "find_unused_parameters": parallel.find_unused_parameters,
        "broadcast_buffers": parallel.broadcast_buffers,
        **capacity,
    }


def fsdp2_options(parallel: ParallelSpec, mesh: DeviceMesh) -> dict[str, Any]:
    """Return the arguments of ``fully_shard`` for the mesh of the data-parallel ranks."""
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(**_dtypes(parallel)),
        "offload_policy": CPUOffloadPolicy() if parallel.offload_policy == "cpu" else OffloadPolicy(),
    }
    if parallel.reshard_after_forward not in (None, ALL_BUT_LAST):
        options["reshard_after_forward"] = parallel.reshard_after_forward
    return options


def _mesh(parallel: ParallelSpec, kind: str) -> DeviceMesh:
    """Return the mesh of FSDP2: copies, then shards, then tensor parallelism, in accelerate's order."""
    sizes = {
        "dp_replicate": parallel.replicas,
        "dp_shard": parallel.data_parallel_size // parallel.replicas,
        "cp": parallel.cp_size,
        "tp": parallel.tp_size,
    }
    used = {name: size for name, size in sizes.items() if size > 1 or name == "dp_shard"}
    return init_device_mesh(kind, tuple(used.values()), mesh_dim_names=tuple(used))


def _data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the ranks that FSDP shards over: those of data and of context parallelism, as accelerate joins them."""
    names = [name for name in mesh.mesh_dim_names or () if name != "tp"]
    if "cp" in names:
        mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
        names = [*names[: names.index("dp_shard")], "dp_shard_cp"]
    return mesh[tuple(names)] if len(names) > 1 else mesh[names[0]]


def wrapped_layers(model: nn.Module, parallel: ParallelSpec) -> list[nn.Module]:
    """Return the layers that FSDP wraps one by one: those of the named classes, else ``repeated_layers``.

    Raises:
        WorkloadError: The model has no layer of a class that is named.
    """
    names = parallel.transformer_layer_cls_to_wrap
    if not names:
        return repeated_layers(model)
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if missing := set(names) - {type(layer).__name__ for layer in layers}:
        known = ", ".join(sorted({type(layer).__name__ for layer in repeated_layers(model)}))
        raise WorkloadError(
            f"parallel.transformer_layer_cls_to_wrap: {type(model).__name__} has no {', '.join(sorted(missing))}; "
            f"its layers are {known}",
            key="parallel.transformer_layer_cls_to_wrap",
        )
    return layers


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that FSDP wraps one by one, as scripts do: those in the model's lists of layers.

    These are the modules in a ``ModuleList`` or ``Sequential`` whose classes transformers keeps whole
    (``_no_split_modules``).  Embeddings, which that attribute names as well, often share weights with the output layer.
    A model that names no class is wrapped by its longest list; one without a list is one unit.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    lists = [list(module) for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    named = [layer for layers in lists for layer in layers if type(layer).__name__ in names]
    return named or max(lists, key=len, default=[])


def _dtypes(parallel: ParallelSpec) -> dict[str, Any]:
    policy = parallel.mp_policy
    given = {} if policy is None else {"param_dtype": policy.param_dtype, "reduce_dtype": policy.reduce_dtype}
    return {name: getattr(torch, dtype) for name, dtype in given.items() if dtype is not None}
