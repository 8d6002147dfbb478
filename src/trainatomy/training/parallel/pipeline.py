"""A pipeline: PyTorch's own stages and schedules (``torch.distributed.pipelining``) for the stages of one rank.

Shapes are given to the stages, so that PyTorch runs no extra pass to find them.

The order of a pipeline's work in all its ranks, as PyTorch's schedules have it.

The stages of a pipeline: a causal language model of transformers, divided by its layers.

Every stage runs the model's own forward pass.  Where a layer belongs to another stage, a module that returns its input
takes its place; the model's plan (``base_model_pp_plan``) says which modules come before the layers and which after
them.  The first stage takes token ids, the others the hidden states of the stage before; the last one has the head.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from itertools import accumulate, count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from trainatomy.errors import WorkloadError
from trainatomy.results.time import Work
from trainatomy.training.parallel.spread import Spread
from trainatomy.training.parallel.strategies import (
    ddp_options,
    fsdp2_options,
    total_norm,
    with_gradients_by_mesh,
    wrapped_layers,
)
from trainatomy.training.parallel.tensor import shard_layers, shard_length
from trainatomy.training.process import autocast

if TYPE_CHECKING:
    from trainatomy.training.batch import Batch
    from trainatomy.training.observer import Observer, StageWork
    from trainatomy.workload.parallel import ParallelSpec
    from trainatomy.workload.schema import Workload


_KINDS = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "backward_input",
    "BACKWARD_WEIGHT": "backward_weight",
}
"""Names of PyTorch's actions (``_ComputationType``) that take time; the others are communication."""


def order_of_work(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int) -> list[list[Work]]:
    """Return what each rank of a pipeline does in a step, in order.

    Schedules compute it for all ranks when they are made, from nothing but the numbers of stages and ranks.
    """
    kind: Any = get_schedule_class(schedule)
    stages = [
        SimpleNamespace(
            num_stages=ranks * stages_per_rank, group_size=ranks, group_rank=0, stage_index=ranks * local, submod=None
        )
        for local in range(stages_per_rank)
    ]
    made = kind(stages if issubclass(kind, PipelineScheduleMulti) else stages[0], n_microbatches=micro_batches)
    order = [list(_work(made.pipeline_order[rank])) for rank in range(ranks)]
    return order if issubclass(kind, PipelineScheduleMulti) else [_renumbered(works) for works in order]


def _renumbered(works: list[Work]) -> list[Work]:
    """Number the micro-batches of each kind of work in order, as schedules with one stage for each rank run them.

    PyTorch 2.13 runs 1F1B so, but describes its last rank with forward passes from 1 (``_get_pipeline_order``).
    """
    counts: dict[str, count[int]] = {}
    return [work._replace(micro_batch=next(counts.setdefault(work.kind, count()))) for work in works]


def _work(actions: Any) -> Iterator[Work]:
    for action in actions:
        if action is not None and action.computation_type.name in _KINDS:
            yield Work(_KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)


_KEY = "parallel.pp_size"


class Elsewhere(nn.Module):
    """Takes the place of a module that belongs to another stage: returns the hidden states unchanged."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the first argument."""
        return hidden_states


class Stage(nn.Module):
    """A stage: some layers of a model, with the embeddings in the first and the head in the last one.

    Attributes:
        base: The base model, in which modules of other stages are replaced.
        head: The output layer; None in all stages but the last.
    """

    def __init__(self, base: nn.Module, head: nn.Module | None, *, is_first: bool) -> None:
        """Take the parts of a model."""
        super().__init__()
        self.base = base
        self.head = head
        self._argument = "input_ids" if is_first else "inputs_embeds"

    def forward(self, given: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
        """Return hidden states; the last stage returns logits."""
        output = self.base(**{self._argument: given}, use_cache=False, **options)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden if self.head is None else self.head(hidden)


def stages_of(model: Any, indices: Sequence[int], count: int) -> list[Stage]:
    """Return the stages with these indices of a model that is divided into ``count``.

    The stages hold the model's own modules.  The model loses all others: its parameters are then those of the stages.

    Raises:
        WorkloadError: The model cannot be divided, or has fewer layers than stages.
    """
    base, plan = model.base_model, _plan_of(model)
    layers = layers_in(model)
    if count > len(layers):
        raise WorkloadError(
            f"{type(model).__name__} has {len(layers)} layers, too few for {count} stages: each has at least one",
            key=_KEY,
        )
    names = list(plan)
    position = names.index(_name_of(base, layers))
    bounds = [0, *accumulate(layers_by_stage(len(layers), count))]
    stages = []
    for index in indices:
        is_first, is_last = index == 0, index == count - 1
        part = _without_modules(base)
        for place, name in enumerate(names):
            is_here = is_first if place < position else is_last
            part.register_module(name, getattr(base, name) if is_here else Elsewhere())
        here = range(bounds[index], bounds[index + 1])
        kept = [layer if number in here else Elsewhere() for number, layer in enumerate(layers)]
        part.register_module(names[position], nn.ModuleList(kept))
        stages.append(Stage(part, model.get_output_embeddings() if is_last else None, is_first=is_first))
    _drop_others(model, stages)
    return stages


def layers_by_stage(layers: int, stages: int) -> list[int]:
    """Return the number of layers of each stage: equal, with one more in the first ones if they cannot be."""
    return [layers // stages + (index < layers % stages) for index in range(stages)]


def _drop_others(model: nn.Module, stages: Sequence[Stage]) -> None:
    """Replace the modules of a model with parameters that are in none of the stages."""
    kept = {id(module) for stage in stages for module in stage.modules()}
    for name, module in list(model.named_modules()):
        if id(module) not in kept and any(True for _ in module.parameters(recurse=False)):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, Elsewhere())


def _without_modules(base: nn.Module) -> nn.Module:
    """Return a copy of a model that shares all its modules, so that some can be replaced."""
    part = copy.copy(base)
    part._modules = dict(base._modules)
    return part


def _plan_of(model: Any) -> dict[str, Any]:
    """Return the model's plan for pipelines.

    Raises:
        WorkloadError: It has none, or weights that two stages would share.
    """
    name, config = type(model).__name__, getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise WorkloadError(
            f"{name} has an encoder and a decoder; pipelines of decoder models alone are simulated", key=_KEY
        )
    plan = getattr(config, "base_model_pp_plan", None) or {}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not plan or head is None or not hasattr(model, "base_model"):
        raise WorkloadError(
            f"{name} cannot be divided into stages: it has no output layer, or its configuration has no plan "
            "(base_model_pp_plan); causal language models such as Llama, Qwen, Mistral and Gemma have both",
            key=_KEY,
        )
    if model.get_input_embeddings().weight is head.weight:
        raise WorkloadError(
            f"{name} shares the weights of its embeddings and its output layer (tie_word_embeddings), which belong to "
            "the first and the last stage: set model.config: {tie_word_embeddings: false}",
            key=_KEY,
        )
    return dict(plan)


def layers_in(model: Any) -> list[nn.Module]:
    """Return the layers of a model that a pipeline divides.

    Raises:
        WorkloadError: It cannot be divided.
    """
    plan, base = _plan_of(model), model.base_model
    lists = [module for name in plan if isinstance(module := getattr(base, name, None), nn.ModuleList)]
    missing = [name for name in plan if not isinstance(getattr(base, name, None), nn.Module)]
    if len(lists) != 1 or missing:
        raise WorkloadError(
            f"the plan of {type(base).__name__} names {', '.join(missing) or 'several lists of layers'}, which cannot "
            "be divided into stages",
            key=_KEY,
        )
    return list(lists[0])


def _name_of(base: nn.Module, layers: list[nn.Module]) -> str:
    return next(
        name for name, module in base.named_children() if isinstance(module, nn.ModuleList) and list(module) == layers
    )


_SHARED_INPUTS = frozenset({"attention_mask", "position_ids"})
"""Inputs that every stage takes."""


class Pipeline(Spread):
    """The stages of one rank, and the schedule that runs them."""

    def __init__(self, workload: Workload, model: Any, device: str, observer: Observer) -> None:
        """Move this rank's stages to the device, and spread each over the ranks that share it.

        Raises:
            WorkloadError: The model cannot be divided into stages.
        """
        parallel = workload.parallel
        self._workload, self._device, self._observer = workload, torch.device(device), observer
        mesh = _mesh(parallel, self._device.type)
        self._group = mesh["pp"].get_group()
        self._indices = range(self._group.rank(), parallel.stages, parallel.pp_size)
        embeddings = model.get_input_embeddings().weight
        policy = parallel.mp_policy
        computed = policy.param_dtype if policy is not None and parallel.strategy == "fsdp2" else None
        self._dtype = embeddings.dtype if computed is None else getattr(torch, computed)
        self._width = embeddings.shape[1]
        self._loss_function = model.loss_function
        self._vocabulary = model.config.get_text_config().vocab_size
        layers = wrapped_layers(model, parallel) if parallel.strategy == "fsdp2" else []
        self._parts = [
            _spread(part, model, layers, parallel, mesh, device)
            for part in stages_of(model, self._indices, parallel.stages)
        ]
        self._schedule: Any = None
        super().__init__(model)

    def step(self, batch: Batch) -> list[torch.Tensor]:
        """Run all micro-batches of a batch forward and backward; return their losses, in the last stage's rank."""
        if unknown := set(batch) - _SHARED_INPUTS - {"input_ids", "labels"}:
            raise WorkloadError(
                f"the batch has {', '.join(sorted(unknown))}, which the stages of a pipeline do not take: they take "
                f"input_ids, labels, {', '.join(sorted(_SHARED_INPUTS))}",
                key="parallel.pp_size",
            )
        if self._schedule is None:
            self._schedule = self._scheduled(tuple(batch["input_ids"].shape))
        losses: list[torch.Tensor] = []
        given = (batch["input_ids"],) if 0 in self._indices else ()
        target = {"target": batch["labels"], "losses": losses} if self._is_last else {}
        shared = {name: value for name, value in batch.items() if name in _SHARED_INPUTS}
        self._schedule.step(*given, **target, return_outputs=False, **shared)
        return losses

    def clip(self, max_norm: float) -> None:
        """Clip gradients to a norm over all stages."""
        groups = with_gradients_by_mesh(self.module)
        squared = total_norm(groups) ** 2
        dist.all_reduce(squared, group=self._group)
        norm = squared**0.5
        for parameters in groups:
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)

    @property
    def _is_last(self) -> bool:
        return self._workload.parallel.stages - 1 in self._indices

    def _scheduled(self, shape: tuple[int, ...]) -> Any:
        """Return the schedule over this rank's stages, for batches of ids of this shape."""
        parallel, count = self._workload.parallel, self._workload.microbatches
        rows = shape[0] // count
        ids = torch.empty((rows, *shape[1:]), dtype=torch.int64, device="cpu")
        length = shard_length(shape[1], parallel.tp_size) if parallel.sequence_parallel else shape[1]
        hidden = torch.empty((rows, length, self._width), dtype=self._dtype, device="cpu", requires_grad=True)
        stages = [
            ObservedStage(
                part,
                index,
                parallel.stages,
                self._device,
                input_args=ids if index == 0 else hidden,
                output_args=hidden,
                group=self._group,
                workload=self._workload,
                observer=self._observer,
            )
            for part, index in zip(self._parts, self._indices, strict=True)
        ]
        schedule: Any = get_schedule_class(parallel.schedule)
        given: Any = stages if issubclass(schedule, PipelineScheduleMulti) else stages[0]
        return schedule(given, n_microbatches=count, loss_fn=self._loss)

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the model's loss of a micro-batch; the forward pass of the last stage ends with it."""
        with autocast(self._workload.train, self._device.type):
            loss: torch.Tensor = self._loss_function(logits=logits, labels=labels, vocab_size=self._vocabulary)
        self._observer.forward_end()
        self._observer.stage_end()
        return loss


class ObservedStage(PipelineStage):
    """A stage that runs under autocast and tells the observer what it does."""

    def __init__(self, *args: Any, workload: Workload, observer: Observer, **options: Any) -> None:
        """Take the arguments of ``PipelineStage``, and who observes it."""
        super().__init__(*args, **options)
        self._train, self._observer = workload.train, observer
        hidden = options["output_args"]
        self._expected = tuple(hidden.shape), hidden.dtype

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        """Run a micro-batch forward."""
        self._observer.stage_begin("forward", self.stage_index, fwd_chunk_id)
        self._observer.micro_step_begin(fwd_chunk_id)
        with autocast(self._train, self.device.type):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **options)
        if not self.is_last:
            self._check(output)
            self._observer.forward_end()
            self._observer.stage_end()
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        """Run a micro-batch backward, or only to its inputs."""
        with self._observed("backward" if full_backward else "backward_input", bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        """Compute the gradients of the weights, which ``backward_one_chunk`` left out."""
        with self._observed("backward_weight", bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **options)

    @contextlib.contextmanager
    def _observed(self, work: StageWork, micro_batch: int) -> Iterator[None]:
        self._observer.stage_begin(work, self.stage_index, micro_batch)
        yield
        self._observer.micro_step_end(micro_batch)
        self._observer.stage_end()

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Check what another stage receives; PyTorch 2.11 would also compare the logits with ``output_args``."""
        if not self.is_last:
            super()._validate_fwd_outputs(outputs)  # type: ignore[misc]  # not in PyTorch 2.13

    def _check(self, output: Any) -> None:
        """Refuse a stage whose output is not what the next one receives."""
        found = (tuple(output.shape), output.dtype) if isinstance(output, torch.Tensor) else type(output).__name__
        if found != self._expected:
            raise WorkloadError(
                f"the layers of this model return {found}, not hidden states of {self._expected}: "
                "it cannot be divided into stages",
                key="parallel.pp_size",
            )


def _mesh(parallel: ParallelSpec, kind: str) -> DeviceMesh:
    """Return the mesh, laid out as torchtitan's: stages first, so that the ranks of a stage are neighbours."""
    data = "dp_shard" if parallel.strategy == "fsdp2" else "dp_replicate"
    sizes = {"pp": parallel.pp_size, data: parallel.data_parallel_size}
    if parallel.tp_size > 1:
        sizes["tp"] = parallel.tp_size
    return init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _spread(
    part: Stage,
    model: nn.Module,
    layers: Sequence[nn.Module],
    parallel: ParallelSpec,
    mesh: DeviceMesh,
    device: str,
) -> nn.Module:
    """Move a stage of a model to the device, shard its layers, and wrap it for its data-parallel ranks.

    Args:
        part: The stage.
        model: The model.
        layers: Layers of the whole model that FSDP wraps one by one.
        parallel: The degrees and options of parallelism.
        mesh: The mesh of all ranks.
        device: This rank's device.
    """
    shards_data = parallel.strategy == "fsdp2"
    if not shards_data:
        part.to(device)
    if parallel.tp_size > 1:
        shard_layers(model, mesh["tp"], sequences=parallel.sequence_parallel, part=part)
    if shards_data:
        options = fsdp2_options(parallel, mesh["dp_shard"])
        here = set(part.modules())
        for layer in layers:
            if layer in here:
                fully_shard(layer, **options)
        fully_shard(part, **options)
        return part if parallel.offload_policy == "cpu" else part.to(device)
    if parallel.data_parallel_size == 1:
        return part
    group = mesh["dp_replicate"].get_group()
    return nn.parallel.DistributedDataParallel(part, process_group=group, **ddp_options(parallel))
