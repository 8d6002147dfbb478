"""``loop: sentence_transformers``: its trainer with an observer.  Importing this module imports the library."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sentence_transformers import SentenceTransformerTrainer

from trainatomy.errors import WorkloadError
from trainatomy.training.checkpointing import check_checkpointing
from trainatomy.training.loops.trainer import ObservedTrainer, train_with
from trainatomy.training.sentence_transformers import as_sentence_transformer, loss_of, texts

if TYPE_CHECKING:
    import torch

    from trainatomy.training.run import Run


class ObservedSentenceTransformerTrainer(ObservedTrainer, SentenceTransformerTrainer):
    """sentence-transformers' trainer that notifies an observer of every phase of a step."""

    def __init__(self, run: Run, **keywords: Any) -> None:
        super(ObservedTrainer, self).__init__(model=run.model, callbacks=self.observe(run), **keywords)
        self.follow()

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        """Write no model card, which looks at the samples and asks the hub."""


def train(run: Run) -> None:
    """Train the model of ``run`` as a part of a ``SentenceTransformer``."""
    workload, model = run.workload, run.model
    if run.make_batch is not None:
        message = f"loop: {workload.loop} takes no batch of your own: sentence-transformers makes the batches"
        raise WorkloadError(message, key="loop")
    check_checkpointing(model, workload.train)
    trained = replace(run, model=as_sentence_transformer(workload, model, run.device))
    samples = texts(workload, model, run.samples)

    def make(arguments: Any, optimizer: torch.optim.Optimizer | None) -> ObservedSentenceTransformerTrainer:
        return ObservedSentenceTransformerTrainer(
            trained,
            args=arguments,
            train_dataset=samples,
            loss=lambda embedder: loss_of(workload, embedder),
            optimizers=(optimizer, None),
        )

    train_with(trained, make)
