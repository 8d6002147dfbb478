"""A model that is spread over GPUs, and what its training loop has to do otherwise.

Importing this module imports nothing of ``torch.distributed``, which takes a second; a training on one GPU needs none.

Expert parallelism: ranks share the experts of a mixture, by transformers' own plan and code.

Every rank processes the same samples and all layers but the experts.  Up to transformers 5.18, router outputs for
experts of other ranks are masked, and the ranks' results are added up; later, each rank sends a part of the tokens to
the ranks of their experts.

Context parallelism: ranks share each sequence, with PyTorch's ring attention (``context_parallel``).

What a batch needs beforehand is what transformers' Trainer does to it (``_prepare_context_parallel_inputs``): labels
that are shifted before the sequence is divided, positions, and no mask in the layers (accelerate's
``_attach_context_parallel_hooks``).
"""

from __future__ import annotations

import contextlib
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor.experimental import context_parallel

from trainatomy.catalog.versions import transformers_has
from trainatomy.errors import WorkloadError
from trainatomy.libraries import import_library, version_of
from trainatomy.training.factory import loss_of
from trainatomy.training.optimizer import create_optimizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.device_mesh import DeviceMesh
    from transformers import TrainingArguments

    from trainatomy.training.batch import Batch
    from trainatomy.workload.parallel import ParallelSpec
    from trainatomy.workload.train import TrainSpec


_EXPERTS_KEY = "parallel.enable_expert_parallel"


def share_experts(model: Any, mesh: DeviceMesh) -> None:
    """Shard the experts of a model over the ranks of ``mesh``.

    Raises:
        WorkloadError: The model has no plan for it, the ranks cannot share the experts, or transformers is too old.
    """
    if not getattr(model, "_ep_plan", None):
        raise WorkloadError(
            f"{type(model).__name__} has no plan for expert parallelism (base_model_ep_plan); mixtures of experts such "
            "as Qwen3-MoE, Mixtral and GPT-OSS have one",
            key=_EXPERTS_KEY,
        )
    apply = _apply_plan if hasattr(model, "_expand_parallel_plan") else _apply_in_place_of_tensor_parallelism
    try:
        apply(model, mesh)
    except ValueError as error:
        raise WorkloadError(str(error), key=_EXPERTS_KEY) from None


def _apply_plan(model: Any, mesh: DeviceMesh) -> None:
    """Shard the experts as transformers 5.23 and later: tokens are sent to the ranks of their experts and back.

    All ranks have the same samples, of which each sends a part.
    """
    apply = import_module("transformers.distributed.expert_parallel").apply_expert_parallelism
    apply(model, mesh, mesh, model._expand_parallel_plan(dict(model._ep_plan)))


def _apply_in_place_of_tensor_parallelism(model: Any, mesh: DeviceMesh) -> None:
    """Shard the experts as transformers 5.17 and 5.18, whose configuration chooses the plan of tensor parallelism."""
    if not transformers_has("expert_plans_in_place_of_tensor_plans"):
        found = version_of("transformers")
        raise WorkloadError(
            f"expert parallelism needs transformers 5.17, 5.18, or 5.23 and later, found {found}", key=_EXPERTS_KEY
        )
    config = import_module("transformers.distributed").DistributedConfig
    model.config.distributed_config = config(tp_size=mesh.size(), enable_expert_parallel=True)
    import_module("transformers.distributed.tensor_parallel").apply_tensor_parallelism(model, mesh)


_CONTEXT_KEY = "parallel.cp_size"
_NO_LABEL = -100
_SEQUENCES = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids")
"""Inputs that are divided, in the order of the Trainer."""


def share_sequences(model: nn.Module, parallel: ParallelSpec) -> None:
    """Prepare a model for parts of sequences.

    Raises:
        WorkloadError: Its attention is not causal attention by ``sdpa``.
    """
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "_attn_implementation", None)
    if kind != "sdpa":
        raise WorkloadError(
            f"context parallelism replaces scaled_dot_product_attention, and {type(model).__name__} uses "
            f"attn_implementation {kind}: use sdpa",
            key=_CONTEXT_KEY,
        )
    import_library("accelerate", "parallel.cp_size")
    attach = import_module("accelerate.big_modeling")._attach_context_parallel_hooks
    try:
        attach(model)
    except ValueError as error:
        raise WorkloadError(str(error), key=_CONTEXT_KEY) from None
    rotation = import_module("torch.distributed.tensor.experimental._attention")
    rotation.set_rotate_method(parallel.cp_comm_strategy)


@contextlib.contextmanager
def shared(batch: Batch, mesh: DeviceMesh) -> Iterator[None]:
    """Divide the sequences of a batch in place; attention passes keys and values around the ranks of ``mesh``."""
    ids = batch["input_ids"]
    rows, length = ids.shape
    if length % (2 * mesh.size()):
        raise WorkloadError(
            f"{mesh.size()} ranks divide a sequence into {2 * mesh.size()} parts, and {length} tokens cannot be",
            key="data.sequence_length",
        )
    if "labels" in batch and "shift_labels" not in batch:
        shifted = nn.functional.pad(batch["labels"], (0, 1), value=_NO_LABEL)
        batch["shift_labels"] = shifted[:, 1:].contiguous()
        del shifted
    if "position_ids" not in batch:
        batch["position_ids"] = torch.arange(length, device=ids.device).expand(rows, -1).contiguous()
    buffers = [batch[name] for name in _SEQUENCES if name in batch]
    divided = context_parallel(
        mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
    )
    del buffers, ids
    with divided:
        yield


class Spread:
    """A model on one GPU; the base class of those on several.

    Attributes:
        module: The module to call: the model itself, or a wrapper around it.
    """

    def __init__(self, module: nn.Module) -> None:
        """Take a module that is on its device."""
        self.module = module

    def synchronizes(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a micro-batch; ``last``: gradients are reduced over the ranks in it."""
        return contextlib.nullcontext()

    def loss(self, outputs: Any) -> torch.Tensor:
        """Return the loss in the outputs of the module."""
        return loss_of(outputs)

    def sharing(self, batch: Batch) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a forward and a backward pass, in which ranks may divide a batch in place."""
        return contextlib.nullcontext()

    def clip(self, max_norm: float) -> None:
        """Clip gradients to a norm over all ranks."""
        nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def scaler(self, kind: str, *, enabled: bool) -> torch.amp.GradScaler:
        """Return the gradient scaler for a device of this kind."""
        return torch.amp.GradScaler(kind, enabled=enabled)

    def optimizer(self, train: TrainSpec, arguments: TrainingArguments) -> torch.optim.Optimizer:
        """Return the optimizer over the trainable parameters."""
        return create_optimizer(train, arguments, self.module)

    def with_states(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer that holds this rank's states: ``optimizer`` itself, or one inside it."""
        return optimizer


class Replicated(Spread):
    """``DataParallel``: the model is copied to all GPUs in each forward pass, and a thread runs each copy."""

    def __init__(self, model: nn.Module, parallel: ParallelSpec, device: str) -> None:
        """Move the model to the first GPU and wrap it."""
        super().__init__(nn.DataParallel(model.to(device), device_ids=list(range(parallel.devices))))

    def loss(self, outputs: Any) -> torch.Tensor:
        """Return the mean of the losses of all GPUs."""
        losses: torch.Tensor = loss_of(outputs, several=True)
        return losses.mean()


def spread_over_gpus(model: nn.Module, parallel: ParallelSpec, device: str) -> Spread:
    """Move a model to the GPU, or spread it over those of ``parallel``.

    Raises:
        WorkloadError: The strategy cannot be applied to this model.
    """
    if parallel.world_size == 1:
        return Spread(model.to(device))
    if parallel.devices > 1:
        return Replicated(model, parallel, device)
    from trainatomy.training.parallel import strategies

    return strategies.spread(model, parallel, device)
