"""Helpers of the loops of TRL's trainers: a reference model, adapters, and TRL's side effects switched off."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest import mock

from trainatomy.errors import WorkloadError
from trainatomy.libraries import version_of
from trainatomy.training.model import unwrap

if TYPE_CHECKING:
    from types import ModuleType

    from torch import nn


def check_model(loop: str, model: nn.Module) -> None:
    """Raise ``WorkloadError`` for a model that the trainer does not train.

    ``loop: reward`` needs a classifier of sequences with one label, the others a causal language model.
    """
    inner: Any = unwrap(model)
    if loop == "reward":
        _check_reward_model(inner)
        return
    head = getattr(inner, "get_output_embeddings", lambda: None)()
    if head is None or getattr(inner.config, "is_encoder_decoder", False) or not hasattr(inner, "generation_config"):
        name = type(inner).__name__
        raise WorkloadError(f"loop: {loop} trains causal language models, and {name} is none", key="loop")


def _check_reward_model(model: Any) -> None:
    name, labels = type(model).__name__, getattr(model.config, "num_labels", None)
    if "SequenceClassification" not in name:
        raise WorkloadError(
            f"loop: reward trains a classifier with one label, and {name} is none: set model.class: "
            "AutoModelForSequenceClassification and model.config: {num_labels: 1}",
            key="loop",
        )
    if labels != 1:
        raise WorkloadError(
            f"loop: reward trains a classifier with one label, and {name} has {labels}: set model.config: "
            "{num_labels: 1}",
            key="loop",
        )


def load_bitsandbytes() -> None:
    """Import bitsandbytes where it is installed beside peft, as any script that imports TRL does.

    The Trainer imports peft, and peft bitsandbytes (peft/helpers.py); a process that hid it at that time has it now.
    TRL's ``OffloadActivations.__enter__`` looks for it in ``sys.modules`` and empties the allocator's cache if it is
    there.
    """
    if version_of("peft") and version_of("bitsandbytes"):
        with suppress(Exception):  # peft reports what is wrong with it
            import_module("bitsandbytes")


def reference_of(model: nn.Module) -> nn.Module:
    """Return a copy of the model, which stands for the same checkpoint loaded once more."""
    reference = copy.deepcopy(model)
    for parameter in reference.parameters():
        parameter.requires_grad_(True)  # as `from_pretrained` leaves it; TRL runs it without gradients
    return reference


@contextmanager
def adapters_of_this_training(module: ModuleType) -> Iterator[None]:
    """Let a trainer treat an adapter that the model has as one that it made itself, by ``peft_config``.

    A trainer that gets a model with an adapter takes it for a trained one and keeps a copy of it as the reference.
    With ``peft_config`` the reference is the model without its adapter.  The trainer asks for the first of these before
    anything else about adapters.

    Args:
        module: The module of the trainer, for as long as it is constructed.
    """
    original, asked = module.is_peft_model, False

    def is_peft_model(model: nn.Module) -> bool:
        nonlocal asked
        first, asked = not asked, True
        return False if first else bool(original(model))

    with mock.patch.object(module, "is_peft_model", is_peft_model):
        yield


@contextmanager
def loaded_as(module: ModuleType, reference: nn.Module | None) -> Iterator[None]:
    """Let a trainer that loads its reference model from a checkpoint get ``reference`` instead.

    Args:
        module: The module of the trainer, for as long as it is constructed.
        reference: The model; None where the trainer loads none.
    """
    with mock.patch.object(module, "create_model_from_path", lambda *arguments, **keywords: reference):
        yield


@contextmanager
def quiet_trl() -> Iterator[None]:
    """Switch off TRL's telemetry and warnings, and the progress bars of datasets."""
    import datasets
    from trl.trainer.base_trainer import _BaseTrainer

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", FutureWarning)
        stack.enter_context(mock.patch.dict(os.environ, {"HF_HUB_DISABLE_TELEMETRY": "1", "TQDM_DISABLE": "1"}))
        if hasattr(_BaseTrainer, "_send_telemetry"):
            stack.enter_context(mock.patch.object(_BaseTrainer, "_send_telemetry", lambda trainer: None))
        try:
            yield
        finally:
            if shown:
                datasets.enable_progress_bars()
