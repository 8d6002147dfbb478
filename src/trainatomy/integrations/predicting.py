"""The prediction of a training that just ran, from its live model: what stands beside the measurement."""

from __future__ import annotations

import sys
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from trainatomy.api import predict
from trainatomy.catalog.gpus import gpus
from trainatomy.simulator.live import on_meta

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

    from trainatomy.results.measurement import Measurement
    from trainatomy.results.prediction import Prediction

PRECISIONS = {torch.float16: "fp16", torch.bfloat16: "bf16"}
"""Settings of ``TrainingArguments`` by the type that autocast computes in."""


def predict_live(
    model: nn.Module,
    optimizer: Any,
    batch: Mapping[str, Any] | None,
    measurement: Measurement,
    autocast: torch.dtype | None = None,
) -> Prediction | None:
    """Predict the training that ``measurement`` is of, on the gpu that it ran on; warns and gives ``None`` where that
    cannot be done, because a training must not fail for it.

    ``batch``: a micro-batch with the shapes of the training's (``None``: what fits a transformers model);
    ``autocast``: the type in which the modules were seen to compute under autocast.
    """
    gpu = next((gpu for gpu in gpus() if gpu.device_name == measurement.gpu), None)
    if gpu is None:
        warnings.warn(
            f"no prediction: trainatomy knows no gpu called {measurement.gpu!r}", RuntimeWarning, stacklevel=2
        )
        return None
    workload = measurement.workload
    train: dict[str, Any] = dict(workload.get("train", {}))  # type: ignore[call-overload]
    if "optim" not in train and workload.get("loop") != "trainer" and optimizer is not None:
        train["optimizer"] = type(optimizer)
    if workload.get("loop") != "trainer" and autocast in PRECISIONS:
        train.setdefault(PRECISIONS[autocast], True)
    try:
        with kept_accelerate_state():
            bare = unprepared(on_meta(model))
            return predict(bare, batch=batch, gpu=gpu.id, loop=workload.get("loop", "pytorch"), **train)
    except Exception as error:  # whatever it is, the training's end must not be lost for it
        warnings.warn(f"no prediction: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)
        return None


def unprepared(model: nn.Module) -> nn.Module:
    """``model`` (a copy) without what ``accelerator.prepare`` did to it: an autocast around its forward, and a mark
    that it is prepared, because of which the loop of the prediction would not put its own there.

    Source: ``Accelerator.prepare_model`` (accelerate 1.0-1.15).
    """
    own = vars(model)
    own.pop("_is_accelerate_prepared", None)
    original = own.pop("_original_forward", None)
    if original is not None:
        del model.forward
        if getattr(original, "__func__", None) is not type(model).forward:  # somebody had replaced it before
            model.forward = original
    return model


@contextmanager
def kept_accelerate_state() -> Iterator[None]:
    """Put back what accelerate's shared states hold: a prediction resets them, and the Trainer goes on with them."""
    state: Any = sys.modules.get("accelerate.state")
    kinds = [] if state is None else [state.PartialState, state.AcceleratorState, state.GradientState]
    kept = [dict(kind._shared_state) for kind in kinds]
    try:
        yield
    finally:
        for kind, values in zip(kinds, kept, strict=True):
            kind._shared_state.clear()
            kind._shared_state.update(values)
