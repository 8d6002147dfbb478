"""``loop: sft``: TRL's ``SFTTrainer`` with an observer.  Importing this module imports TRL, which takes seconds."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

from transformers import PrinterCallback
from trl import SFTTrainer

from trainatomy.training.arguments import training_arguments
from trainatomy.training.checkpointing import check_checkpointing
from trainatomy.training.loops.observed_trainer import ObservedTrainer
from trainatomy.training.loops.trainer import watched_zero_grad
from trainatomy.training.optimizer import create_custom
from trainatomy.training.trl import check_model, quiet_trl
from trainatomy.training.trl_data import make_tokenizer, sequence_length, tokenised_samples
from trainatomy.workload.arguments import is_class_path

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
    check_model("sft", model)
    check_checkpointing(model, workload.train)
    optimizer = create_custom(workload.train, model) if is_class_path(workload.train.optim) else None
    with tempfile.TemporaryDirectory(prefix="trainatomy-") as folder, quiet_trl():
        arguments = training_arguments(workload, steps=steps, output_dir=folder, use_cpu=device == "cpu")
        rows = workload.batch_size * workload.train.gradient_accumulation_steps * steps
        in_a_pack = (arguments.max_length or 0) // sequence_length(workload, model) if arguments.packing else 1
        with watched_zero_grad(model, observer, set_to_none=workload.zero_grad_set_to_none):
            trainer = ObservedSFTTrainer(
                workload,
                observer,
                model,
                args=arguments,
                train_dataset=tokenised_samples(workload, model, rows * max(in_a_pack, 1)),
                processing_class=make_tokenizer(model),
                optimizers=(optimizer, None),
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train()
