"""``loop: sentence_transformers``: its trainer with an observer.  Importing this module imports the library."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

from sentence_transformers import SentenceTransformerTrainer
from transformers import PrinterCallback

from trainatomy.errors import WorkloadError
from trainatomy.training.arguments import training_arguments
from trainatomy.training.checkpointing import check_checkpointing
from trainatomy.training.loops.observed_trainer import CheckpointEvery, ObservedTrainer
from trainatomy.training.loops.trainer import watched_zero_grad, without_progress_bars
from trainatomy.training.optimizer import create_single
from trainatomy.training.sentence_transformers import as_sentence_transformer, loss_of, texts
from trainatomy.training.shape import samples_per_step
from trainatomy.workload.arguments import is_own

if TYPE_CHECKING:
    from torch import nn

    from trainatomy.training.batch import BatchesOfLengths, MakeBatch
    from trainatomy.training.observer import Observer
    from trainatomy.workload.schema import Workload


class ObservedSentenceTransformerTrainer(ObservedTrainer, SentenceTransformerTrainer):
    """sentence-transformers' trainer that notifies an observer of every phase of a step."""

    def __init__(self, workload: Workload, observer: Observer, model: nn.Module, **keywords: Any) -> None:
        steps, every = self.observe(workload, observer), workload.train.gradient_checkpointing_every
        callbacks = [steps] if every == 1 else [steps, CheckpointEvery(every)]
        super(ObservedTrainer, self).__init__(model=model, callbacks=callbacks, **keywords)

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        """Write no model card, which looks at the samples and asks the hub."""


def train(
    workload: Workload,
    model: nn.Module,
    *,
    device: str,
    steps: int,
    observer: Observer,
    make_batch: MakeBatch | BatchesOfLengths | None = None,
) -> None:
    """Train ``model`` for ``steps`` optimizer steps; the arguments are those of ``trainatomy.training.run.run``."""
    if make_batch is not None:
        message = f"loop: {workload.loop} takes no batch of your own: sentence-transformers makes the batches"
        raise WorkloadError(message, key="loop")
    check_checkpointing(model, workload.train)
    embedder = as_sentence_transformer(workload, model, device)
    optimizer = create_single(workload, embedder) if is_own(workload.train.optim) else None
    samples = texts(workload, model, samples_per_step(workload) * steps * workload.parallel.data_parallel_size)
    with tempfile.TemporaryDirectory(prefix="trainatomy-") as folder:
        arguments = training_arguments(workload, steps=steps, output_dir=folder, use_cpu=device == "cpu")
        with watched_zero_grad(embedder, observer, set_to_none=True):
            trainer = ObservedSentenceTransformerTrainer(
                workload,
                observer,
                embedder,
                args=arguments,
                train_dataset=samples,
                loss=lambda trained: loss_of(workload, trained),
                optimizers=(optimizer, None),
            )
            trainer.remove_callback(PrinterCallback)
            with without_progress_bars():
                trainer.train()
