"""``loop: pytorch`` with a pipeline: PyTorch's schedule runs the forward and backward passes of all micro-batches.

Every rank loads the whole batch, as torchtitan's ranks do.  The loop holds the last batch and its losses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainatomy.training.checkpointing import check_checkpointing
from trainatomy.training.loops.pytorch import batches_of, enable_training, optimizer_of
from trainatomy.training.model import set_use_cache
from trainatomy.training.parallel.pipeline import Pipeline

if TYPE_CHECKING:
    from trainatomy.training.run import Run


def train(run: Run) -> None:
    """Train this rank's stages."""
    workload, model, observer = run.workload, run.model, run.observer
    settings = workload.train
    check_checkpointing(model, settings)
    set_use_cache(model, settings.use_cache)
    batches = batches_of(run, workload.batch_size)
    enable_training(model, workload)
    pipeline = Pipeline(workload, model, run.device, observer)
    observer.loaded(model)
    optimizer = optimizer_of(run, pipeline)
    observer.ready(model, optimizer)
    for step in range(run.steps):
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
