"""``mode: inference``: the forward pass alone, in evaluation mode and without gradients.

Batches have no labels, and outputs are released after each forward.  With ``fp16_full_eval`` or ``bf16_full_eval`` the
whole model is cast when it is moved to the device, as in the Trainer's evaluation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainatomy.training.batch import build_batch
from trainatomy.training.loops.pytorch import to_device
from trainatomy.training.model import set_use_cache
from trainatomy.training.precision import autocast, full_precision_of_inference, set_tf32

if TYPE_CHECKING:
    from trainatomy.training.batch import MakeBatch
    from trainatomy.training.observer import Observer
    from trainatomy.workload.schema import Workload


def infer(
    workload: Workload,
    model: nn.Module,
    *,
    device: str,
    steps: int,
    observer: Observer,
    make_batch: MakeBatch | None = None,
) -> None:
    """Run the forward of ``model`` ``steps`` times; the arguments are those of ``trainatomy.training.run.run``."""
    set_use_cache(model, workload.train.use_cache)
    batch = build_batch(workload, model, make_batch)
    prepare(workload, model, device, observer)
    for step in range(steps):
        observer.step_begin(step)
        observer.micro_step_begin(0)
        _forward(workload, model, to_device(batch, device), torch.device(device).type)
        observer.forward_end()
        observer.micro_step_end(0)
        observer.step_end(step)


def _forward(workload: Workload, model: nn.Module, batch: dict[str, Any], device_type: str) -> None:
    with torch.no_grad(), autocast(workload.train, device_type):
        model(**batch)


def prepare(workload: Workload, model: nn.Module, device: str, observer: Observer) -> None:
    """Move a model to the GPU for forward passes without training, in the precision of the workload."""
    dtype = full_precision_of_inference(workload.train)
    model.to(device) if dtype is None else model.to(device, dtype)
    observer.loaded(model)
    observer.ready(model, None)
    model.eval()
    set_tf32(workload.train)
