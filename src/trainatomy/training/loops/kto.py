"""``loop: kto``: TRL's ``KTOTrainer`` with an observer.  Importing this module imports TRL, which takes seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trl import KTOTrainer
from trl.trainer import kto_trainer

from trainatomy.training.loops.trl import ObservedTrlTrainer, batches_given, train_with
from trainatomy.training.trl import (
    adapters_of_this_training,
    evaluated_lengths,
    labelled_answers,
    reference_of,
    trained_lengths,
)

if TYPE_CHECKING:
    from torch import nn

    from trainatomy.training.batch import BatchesOfLengths, MakeBatch
    from trainatomy.training.observer import Observer
    from trainatomy.workload.schema import Workload


class ObservedKTOTrainer(ObservedTrlTrainer, KTOTrainer):
    """TRL's trainer that notifies an observer of every phase of a step."""


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
    batches_given(workload, make_batch)

    def make(arguments: Any, **shared: Any) -> ObservedKTOTrainer:
        has_reference = workload.model.lora is None and not arguments.precompute_ref_log_probs
        if workload.evaluates:
            evaluated = evaluated_lengths(workload, model)
            shared["eval_dataset"] = labelled_answers(workload, model, evaluated, workload.eval_batch_size)
        trained = trained_lengths(workload, model, steps)
        with adapters_of_this_training(kto_trainer):
            return ObservedKTOTrainer(
                workload,
                observer,
                model,
                ref_model=reference_of(model) if has_reference else None,
                args=arguments,
                train_dataset=labelled_answers(workload, model, trained, workload.batch_size),
                **shared,
            )

    train_with(make, workload, model, device=device, steps=steps, observer=observer)
