"""``loop: sft``: TRL's ``SFTTrainer`` with an observer.  Importing this module imports TRL, which takes seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trl import SFTTrainer

from trainatomy.training.loops.observed_trainer import ObservedTrainer
from trainatomy.training.loops.trl import train_with
from trainatomy.training.trl_data import sequence_length, tokenised_samples

if TYPE_CHECKING:
    from torch import nn

    from trainatomy.training.batch import BatchesOfLengths, MakeBatch
    from trainatomy.training.observer import Observer
    from trainatomy.workload.schema import Workload


class ObservedSFTTrainer(ObservedTrainer, SFTTrainer):
    """TRL's trainer that notifies an observer of every phase of a step."""

    def __init__(self, workload: Workload, observer: Observer, model: nn.Module, **keywords: Any) -> None:
        steps = self.observe(workload, observer)
        SFTTrainer.__init__(self, model=model, callbacks=[steps], **keywords)
        if self._is_loaded_by_bitsandbytes(model):
            observer.loaded(model)


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

    def make(arguments: Any, **shared: Any) -> ObservedSFTTrainer:
        rows = workload.batch_size * workload.train.gradient_accumulation_steps * steps
        fitting = max((arguments.max_length or 0) // sequence_length(workload, model), 1)
        samples = tokenised_samples(workload, model, rows * (fitting if arguments.packing else 1))
        if workload.evaluates:
            packs = arguments.packing if arguments.eval_packing is None else arguments.eval_packing
            more = fitting if packs and workload.data.eval_samples is None else 1  # as many batches of packs
            shared["eval_dataset"] = tokenised_samples(workload, model, workload.eval_samples * more)
        return ObservedSFTTrainer(workload, observer, model, args=arguments, train_dataset=samples, **shared)

    train_with("sft", make, workload, model, device=device, steps=steps, observer=observer)
