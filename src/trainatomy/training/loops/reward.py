"""``loop: reward``: TRL's ``RewardTrainer`` with an observer.  Importing this module imports TRL; it takes seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trl import RewardTrainer

from trainatomy.errors import WorkloadError
from trainatomy.training.loops.trl import ObservedTrlTrainer, batches_given, train_with
from trainatomy.training.trl import evaluated_lengths, sequence_length, tokenised_pairs, trained_lengths

if TYPE_CHECKING:
    from torch import nn

    from trainatomy.training.batch import BatchesOfLengths, MakeBatch
    from trainatomy.training.observer import Observer
    from trainatomy.workload.schema import Workload


class ObservedRewardTrainer(ObservedTrlTrainer, RewardTrainer):
    """TRL's trainer that notifies an observer of every phase of a step."""


def _check_length(workload: Workload, model: nn.Module, longest: int | None) -> None:
    """Raise ``WorkloadError`` where TRL would leave out every sample for its length."""
    length = sequence_length(workload, model)
    if longest is not None and length > longest and not workload.data.varies:
        raise WorkloadError(
            f"trl.max_length: TRL leaves out samples of more than {longest} tokens, and all have {length}: raise it",
            key="trl.max_length",
        )


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

    def make(arguments: Any, **shared: Any) -> ObservedRewardTrainer:
        _check_length(workload, model, arguments.max_length)
        if workload.evaluates:
            shared["eval_dataset"] = tokenised_pairs(model, evaluated_lengths(workload, model))
        pairs = tokenised_pairs(model, trained_lengths(workload, model, steps, batches))
        return ObservedRewardTrainer(workload, observer, model, args=arguments, train_dataset=pairs, **shared)

    train_with(make, workload, model, device=device, steps=steps, observer=observer)
