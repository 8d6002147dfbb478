"""``loop: sft``: TRL's ``SFTTrainer`` with an observer.  Importing this module imports TRL, which takes seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trl import SFTTrainer

from trainatomy.training.loops.trl import ObservedTrlTrainer, batches_given, train_with
from trainatomy.training.trl import (
    evaluated_lengths,
    packed_samples,
    sequence_length,
    tokenised_samples,
    trained_batches,
    trained_lengths,
)

if TYPE_CHECKING:
    from torch import nn

    from trainatomy.training.batch import BatchesOfLengths, MakeBatch
    from trainatomy.training.observer import Observer
    from trainatomy.workload.schema import Workload


class ObservedSFTTrainer(ObservedTrlTrainer, SFTTrainer):
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
    batches = batches_given(workload, make_batch)

    def make(arguments: Any, **shared: Any) -> ObservedSFTTrainer:
        fitting = max((arguments.max_length or 0) // sequence_length(workload, model), 1)
        if workload.evaluates:
            packs = arguments.packing if arguments.eval_packing is None else arguments.eval_packing
            more = fitting if packs and workload.data.eval_samples is None else 1  # as many batches of packs
            shared["eval_dataset"] = tokenised_samples(workload, model, evaluated_lengths(workload, model) * more)
        if arguments.packing and workload.data.varies:
            arguments.dataset_kwargs = {"skip_prepare_dataset": True}
            samples = packed_samples(workload, model, trained_batches(workload, steps, batches))
        else:
            lengths = trained_lengths(workload, model, steps, batches)
            samples = tokenised_samples(workload, model, lengths * (fitting if arguments.packing else 1))
        return ObservedSFTTrainer(workload, observer, model, args=arguments, train_dataset=samples, **shared)

    train_with(make, workload, model, device=device, steps=steps, observer=observer)
