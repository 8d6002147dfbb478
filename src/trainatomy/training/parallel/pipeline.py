"""A pipeline: PyTorch's own stages and schedules (``torch.distributed.pipelining``) for the stages of one rank.

Shapes are given to the stages, so that PyTorch runs no extra pass to find them.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from trainatomy.errors import WorkloadError
from trainatomy.training.parallel.clipping import total_norm, with_gradients_by_mesh
from trainatomy.training.parallel.sequence import shard_length
from trainatomy.training.parallel.spread import Spread
from trainatomy.training.parallel.stages import Stage, stages_of
from trainatomy.training.parallel.strategies import ddp_options, fsdp2_options, wrapped_layers
from trainatomy.training.parallel.tensor import shard_layers
from trainatomy.training.precision import autocast

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trainatomy.training.batch import Batch
    from trainatomy.training.observer import Observer, StageWork
    from trainatomy.workload.parallel import ParallelSpec
    from trainatomy.workload.schema import Workload

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
