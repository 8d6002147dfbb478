"""Parts that the loops of TRL's trainers share: the arguments, the observed trainer, and the training itself."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import PrinterCallback

from trainatomy.errors import WorkloadError
from trainatomy.training.arguments import training_arguments
from trainatomy.training.batch import BatchesOfLengths
from trainatomy.training.checkpointing import check_checkpointing
from trainatomy.training.loops.observed_trainer import EngineBegins, ObservedTrainer
from trainatomy.training.loops.trainer import continue_training, watched_zero_grad, without_progress_bars
from trainatomy.training.optimizer import create_single
from trainatomy.training.trl import check_model, load_bitsandbytes, make_tokenizer, quiet_trl
from trainatomy.workload.arguments import is_own

if TYPE_CHECKING:
    from torch import nn

    from trainatomy.training.batch import MakeBatch
    from trainatomy.training.observer import Observer
    from trainatomy.workload.schema import Workload


class ObservedTrlTrainer(ObservedTrainer):
    """Base of TRL's trainers that notify an observer of every phase of a step; TRL's class is the second base."""

    def __init__(self, workload: Workload, observer: Observer, model: nn.Module, **keywords: Any) -> None:
        steps = self.observe(workload, observer)
        super(ObservedTrainer, self).__init__(model=model, callbacks=[steps], **keywords)
        if self._is_loaded_by_bitsandbytes(model):
            observer.loaded(model)
        if self.args.deepspeed:
            self.add_callback(EngineBegins(self))
        if (reference := getattr(self, "ref_model", None)) is not None:
            observer.reference_loaded(reference)


def batches_given(workload: Workload, make_batch: MakeBatch | BatchesOfLengths | None) -> BatchesOfLengths | None:
    """Return the batches whose lengths are given, None where the workload describes them.

    Raises:
        WorkloadError: A function makes the batches, which is what TRL does.
    """
    if make_batch is None or isinstance(make_batch, BatchesOfLengths):
        return make_batch
    raise WorkloadError(f"loop: {workload.loop} takes no batch of your own: TRL makes the batches", key="loop")


def train_with(
    make: Callable[..., ObservedTrlTrainer],
    workload: Workload,
    model: nn.Module,
    *,
    device: str,
    steps: int,
    observer: Observer,
) -> None:
    """Train ``model`` with one of TRL's trainers.

    Args:
        make: Returns the trainer for its arguments and the keywords that all of TRL's trainers take.
        workload: The training; the remaining arguments are those of ``trainatomy.training.run.run``.
        model: The model.
        device: ``"cuda"`` or ``"cpu"``.
        steps: Optimizer steps.
        observer: Is notified of every phase.

    Raises:
        WorkloadError: The model is none that the trainer trains.
    """
    check_model(workload.loop, model)
    check_checkpointing(model, workload.train)
    if workload.trl.get("activation_offloading"):
        load_bitsandbytes()
    optimizer = create_single(workload, model) if is_own(workload.train.optim) else None
    with tempfile.TemporaryDirectory(prefix="trainatomy-") as folder, quiet_trl():
        arguments = training_arguments(workload, steps=steps, output_dir=folder, use_cpu=device == "cpu")
        with watched_zero_grad(model, observer, set_to_none=workload.zero_grad_set_to_none):
            trainer: Any = make(arguments, processing_class=make_tokenizer(model), optimizers=(optimizer, None))
            trainer.remove_callback(PrinterCallback)
            with without_progress_bars():
                trainer.train(resume_from_checkpoint=continue_training(workload, trainer.args))
