"""A model that is spread over GPUs, and what its training loop has to do otherwise.

Importing this module imports nothing of ``torch.distributed``, which takes a second; a training on one GPU needs none.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainatomy.training.optimizer import create_optimizer
from trainatomy.training.outputs import loss_of

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from trainatomy.training.batch import Batch
    from trainatomy.workload.parallel import ParallelSpec
    from trainatomy.workload.train import TrainSpec


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
