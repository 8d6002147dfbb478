"""Zeroing gradients, watched; and gradient checkpointing."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from trainatomy.errors import WorkloadError
from trainatomy.training.model import unwrap

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from trainatomy.training.observer import Observer
    from trainatomy.workload.train import TrainSpec


@contextmanager
def watched_zero_grad(model: nn.Module, observer: Observer, *, set_to_none: bool) -> Iterator[None]:
    """Tell ``observer`` when ``model.zero_grad()`` runs, and decide what it does with the gradients.

    The Trainer calls it without an argument, which means ``set_to_none=True`` since PyTorch 2.0.
    """
    original = model.zero_grad

    def zero_grad(*arguments: bool, **keywords: bool) -> None:
        observer.zero_grad_begin()
        original(set_to_none=set_to_none)
        observer.zero_grad_end()

    model.zero_grad = zero_grad  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.zero_grad  # the method of the class shows again


def can_checkpoint(model: nn.Module) -> bool:
    """Whether ``model`` knows how to recompute its layers in backward."""
    inner = unwrap(model)
    has_method = callable(getattr(inner, "gradient_checkpointing_enable", None))
    return has_method and bool(getattr(inner, "supports_gradient_checkpointing", True))


def check_checkpointing(model: nn.Module, train: TrainSpec) -> None:
    """Raise ``WorkloadError`` where checkpointing is asked of a model that has none."""
    if train.gradient_checkpointing and not can_checkpoint(model):
        name = type(unwrap(model)).__name__
        raise WorkloadError(f"train.gradient_checkpointing: {name} does not support it")
