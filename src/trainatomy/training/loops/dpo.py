"""``loop: dpo``: TRL's ``DPOTrainer`` with an observer.  Importing this module imports TRL, which takes seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trl import DPOTrainer
from trl.trainer import dpo_trainer

from trainatomy.training.loops.observed_trainer import ObservedTrainer
from trainatomy.training.loops.trl import train_with
from trainatomy.training.trl import adapters_of_this_training, reference_of
from trainatomy.training.trl_data import preference_pairs

if TYPE_CHECKING:
    from torch import nn

    from trainatomy.training.batch import BatchesOfLengths, MakeBatch
    from trainatomy.training.observer import Observer
    from trainatomy.workload.schema import Workload


class ObservedDPOTrainer(ObservedTrainer, DPOTrainer):
    """TRL's trainer that notifies an observer of every phase of a step."""

    def __init__(self, workload: Workload, observer: Observer, model: nn.Module, **keywords: Any) -> None:
        steps = self.observe(workload, observer)
        with adapters_of_this_training(dpo_trainer):
            DPOTrainer.__init__(self, model=model, callbacks=[steps], **keywords)
        if self._is_loaded_by_bitsandbytes(model):
            observer.loaded(model)
        if self.ref_model is not None:
            observer.reference_loaded(self.ref_model)


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

    def make(arguments: Any, **shared: Any) -> ObservedDPOTrainer:
        pairs = workload.batch_size * workload.train.gradient_accumulation_steps * steps
        has_reference = workload.model.lora is None and not arguments.precompute_ref_log_probs
        if workload.evaluates:
            shared["eval_dataset"] = preference_pairs(workload, model, workload.eval_samples)
        return ObservedDPOTrainer(
            workload,
            observer,
            model,
            ref_model=reference_of(model) if has_reference else None,
            args=arguments,
            train_dataset=preference_pairs(workload, model, pairs),
            **shared,
        )

    train_with("dpo", make, workload, model, device=device, steps=steps, observer=observer)
