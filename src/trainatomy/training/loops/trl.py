"""What ``loop: sft``, ``dpo`` and ``grpo`` share: the arguments, and the training itself."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import PrinterCallback

from trainatomy.training.arguments import training_arguments
from trainatomy.training.checkpointing import check_checkpointing
from trainatomy.training.loops.observed_trainer import ObservedTrainer
from trainatomy.training.loops.trainer import continue_training, watched_zero_grad, without_progress_bars
from trainatomy.training.optimizer import create_single
from trainatomy.training.trl import check_model, quiet_trl
from trainatomy.training.trl_data import make_tokenizer
from trainatomy.workload.arguments import is_own

if TYPE_CHECKING:
    from torch import nn

    from trainatomy.training.observer import Observer
    from trainatomy.workload.schema import Workload


def train_with(
    loop: str,
    make: Callable[..., ObservedTrainer],
    workload: Workload,
    model: nn.Module,
    *,
    device: str,
    steps: int,
    observer: Observer,
) -> None:
    """Train ``model`` with one of TRL's trainers.

    Args:
        loop: Name of the loop.
        make: Returns the trainer for its arguments and the keywords that all of TRL's trainers take.
        workload: The training; the remaining arguments are those of ``trainatomy.training.run.run``.
        model: The model.
        device: ``"cuda"`` or ``"cpu"``.
        steps: Optimizer steps.
        observer: Is notified of every phase.
    """
    check_model(loop, model)
    check_checkpointing(model, workload.train)
    optimizer = create_single(workload, model) if is_own(workload.train.optim) else None
    with tempfile.TemporaryDirectory(prefix="trainatomy-") as folder, quiet_trl():
        arguments = training_arguments(workload, steps=steps, output_dir=folder, use_cpu=device == "cpu")
        with watched_zero_grad(model, observer, set_to_none=workload.zero_grad_set_to_none):
            trainer: Any = make(arguments, processing_class=make_tokenizer(model), optimizers=(optimizer, None))
            trainer.remove_callback(PrinterCallback)
            with without_progress_bars():
                trainer.train(resume_from_checkpoint=continue_training(workload, trainer.args))
