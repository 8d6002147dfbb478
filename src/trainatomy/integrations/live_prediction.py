"""Predict a training that just ran, from its live model, to compare it with the measurement."""

from __future__ import annotations

import sys
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from trainatomy.api import predict
from trainatomy.catalog.gpus import gpus
from trainatomy.errors import WorkloadError
from trainatomy.integrations.live_measurement import process_place
from trainatomy.simulator.live import on_meta
from trainatomy.training.checkpointing import checkpointed_every, checkpointed_layers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

    from trainatomy.results.measurement import Measurement
    from trainatomy.results.prediction import Prediction

PRECISIONS = {torch.float16: "fp16", torch.bfloat16: "bf16"}
"""Setting of ``TrainingArguments`` by the dtype of autocast."""


def predict_live(
    model: nn.Module,
    optimizer: Any,
    batch: Mapping[str, Any] | None,
    measurement: Measurement,
    autocast: torch.dtype | None = None,
) -> Prediction | None:
    """Predict the training of ``measurement`` on the GPU that it ran on.

    Warns and returns ``None`` if that is not possible, because the training must not fail for it.

    Args:
        model: The trained model.
        optimizer: Its optimizer.
        batch: A micro-batch with the training's shapes (``None``: one that fits a transformers model).
        measurement: The measurement.
        autocast: The dtype in which modules computed under autocast.
    """
    if (place := process_place()).size > 1:
        warnings.warn(
            f"no prediction: a live model is predicted on one GPU, and this training has {place.size} processes; "
            "`trainatomy predict --gpus` predicts it from a description",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    gpu = next((gpu for gpu in gpus() if gpu.device_name == measurement.gpu), None)
    if gpu is None:
        warnings.warn(
            f"no prediction: trainatomy has no data for the GPU {measurement.gpu!r}", RuntimeWarning, stacklevel=2
        )
        return None
    workload = measurement.workload
    train: dict[str, Any] = dict(workload.get("train", {}))  # type: ignore[call-overload]
    if "optim" not in train and workload.get("loop") != "trainer" and optimizer is not None:
        train["optimizer"] = type(optimizer)
    if workload.get("loop") != "trainer" and autocast in PRECISIONS:
        train.setdefault(PRECISIONS[autocast], True)
    try:
        if train.get("gradient_checkpointing") and checkpointed_layers(model) and checkpointed_every(model) is None:
            raise WorkloadError("the layers that recompute their activations are not every n-th one")
        with restored_accelerate_state():
            bare = unprepared(on_meta(model))
            return predict(bare, batch=batch, gpu=gpu.id, loop=workload.get("loop", "pytorch"), **train)
    except Exception as error:  # whatever happens, the end of the training must not fail
        warnings.warn(f"no prediction: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)
        return None


def unprepared(model: nn.Module) -> nn.Module:
    """Undo what ``accelerator.prepare`` did to ``model`` (a copy), and return it.

    It wrapped the forward in autocast, and marked the model as prepared, so that the predicted loop would not wrap it.
    Source: ``Accelerator.prepare_model`` (accelerate 1.0-1.15).
    """
    own = vars(model)
    own.pop("_is_accelerate_prepared", None)
    original = own.pop("_original_forward", None)
    if original is not None:
        del model.forward
        if getattr(original, "__func__", None) is not type(model).forward:  # the user had replaced it before
            model.forward = original
    return model


@contextmanager
def restored_accelerate_state() -> Iterator[None]:
    """Restore accelerate's shared states: a prediction resets them, and the Trainer continues to use them."""
    state: Any = sys.modules.get("accelerate.state")
    kinds = [] if state is None else [state.PartialState, state.AcceleratorState, state.GradientState]
    kept = [dict(kind._shared_state) for kind in kinds]
    try:
        yield
    finally:
        for kind, values in zip(kinds, kept, strict=True):
            kind._shared_state.clear()
            kind._shared_state.update(values)
