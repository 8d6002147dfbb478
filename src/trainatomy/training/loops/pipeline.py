"""``loop: pytorch`` with a pipeline: PyTorch's schedule runs the forward and backward passes of all micro-batches.

Every rank loads the whole batch, as torchtitan's ranks do.  The loop holds the last batch and its losses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from trainatomy.training.batch import build_dataset
from trainatomy.training.checkpointing import check_checkpointing
from trainatomy.training.loops.pytorch import batches_of, enable_training, optimizer_of
from trainatomy.training.model import set_use_cache
from trainatomy.training.parallel.pipeline import Pipeline

if TYPE_CHECKING:
    from trainatomy.training.batch import BatchesOfLengths, MakeBatch
    from trainatomy.training.observer import Observer
    from trainatomy.workload.schema import Workload


def train(
    workload: Workload,
    model: nn.Module,
    *,
    device: str,
    steps: int,
    observer: Observer,
    make_batch: MakeBatch | BatchesOfLengths | None = None,
) -> None:
    """Train this rank's stages; the arguments are those of ``trainatomy.training.run.run``."""
    settings = workload.train
    check_checkpointing(model, settings)
    set_use_cache(model, settings.use_cache)
    batches = batches_of(
        build_dataset(workload, model, workload.batch_size * steps, make_batch), workload.batch_size, device
    )
    enable_training(model, workload)
    pipeline = Pipeline(workload, model, device, observer)
    observer.loaded(model)
    optimizer = optimizer_of(workload, pipeline, device, steps)
    observer.ready(model, optimizer)
    for step in range(steps):
        observer.step_begin(step)
        batch = next(batches)
        losses = pipeline.step(batch)  # noqa: F841 - held until the next step, as a script that logs them does
        if settings.max_grad_norm > 0:
            pipeline.clip(settings.max_grad_norm)
        observer.optimizer_begin()
        optimizer.step()
        observer.optimizer_end()
        observer.zero_grad_begin()
        optimizer.zero_grad(set_to_none=workload.zero_grad_set_to_none)
        observer.zero_grad_end()
        observer.step_end(step)
