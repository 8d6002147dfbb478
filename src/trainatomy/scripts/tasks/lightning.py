"""Validation and checkpoints of Lightning's Trainer, under both of its names."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from trainatomy.scripts.tasks.planned import EvaluationBatches, Tasks

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def install(tasks: Tasks) -> None:
    """Follow Lightning's Trainer once it is imported, under whatever name."""
    for package in _PACKAGES:
        names = (
            f"{package}.loops.training_epoch_loop",
            f"{package}.loops.evaluation_loop",
            f"{package}.trainer.trainer",
        )
        tasks.stand_ins.when(names, functools.partial(_follow, tasks, package))


def _follow(tasks: Tasks, package: str, training: Any, evaluation: Any, trainer: Any) -> None:
    validation = _Validation(tasks)
    for owner, name, around in (
        (training._TrainingEpochLoop, "on_advance_end", functools.partial(_at_batch_end, tasks, package)),
        (evaluation._EvaluationLoop, "run", validation.run),
        (evaluation._EvaluationLoop, "_evaluation_step", validation.step),
        (trainer.Trainer, "save_checkpoint", functools.partial(_saving, tasks)),
    ):
        tasks.stand_ins.put(owner, name, _around(getattr(owner, name), around))


def _around(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(owner: Any, *arguments: Any, **keywords: Any) -> Any:
        return around(functools.partial(original, owner), owner, *arguments, **keywords)

    return replacement


# -- what the configuration plans --------------------------------------------------------------------------------------


def _at_batch_end(tasks: Tasks, package: str, original: Callable[..., Any], loop: Any, *arguments: Any) -> None:
    """End a batch as Lightning does; after the last step, validate and save as it would do later."""
    with tasks.observer.looking_ahead():  # to validate ends the step, before the next batch is fetched
        original(*arguments)
    trainer = loop.trainer
    total = whole(trainer.estimated_stepping_batches)
    tasks.of_trainer(trainer, trainer.global_step, total)
    if not tasks.become_due() or total == trainer.global_step:
        return
    epoch = steps_of(trainer, trainer.num_training_batches)
    saves = bool(trainer.checkpoint_callbacks) and tasks.plan("saving", epoch)
    if trainer.enable_validation and not loop.val_loop.skip:
        after = first_validation(trainer, epoch)
        if (after is None or after <= (total or math.inf)) and tasks.plan("evaluation", after):
            tasks.execute("evaluation", lambda: _validate(loop, package))
    if saves:
        path = Path(trainer.default_root_dir, f"step={trainer.global_step}.ckpt")
        tasks.execute("saving", lambda: trainer.save_checkpoint(path))


def whole(number: float) -> int | None:
    """Return a number of steps; None if it is infinite, or -1 for no limit."""
    return int(number) if math.isfinite(number) and number >= 0 else None


def steps_of(trainer: Any, batches: float) -> int | None:
    """Return the optimizer steps that batches of one epoch take."""
    return whole(math.ceil(batches / trainer.accumulate_grad_batches) if math.isfinite(batches) else batches)


def first_validation(trainer: Any, epoch: int | None) -> int | None:
    """Return the step after which Lightning validates first; None if the length of an epoch is not known."""
    batches = trainer.num_training_batches if math.isinf(trainer.val_check_batch) else trainer.val_check_batch
    inside, before = steps_of(trainer, batches), (trainer.check_val_every_n_epoch or 1) - 1
    if inside is None or (before and epoch is None):
        return None
    return inside + before * (epoch or 0)


def _validate(loop: Any, package: str) -> None:
    """Validate between two batches.

    Source: ``_TrainingEpochLoop.on_advance_end`` (lightning/pytorch/loops/training_epoch_loop.py, 2.4-2.6).
    """
    trainer, connector = loop.trainer, loop.trainer._logger_connector
    first = connector._first_loop_iter
    trainer.validating = True
    try:
        sys.modules[f"{package}.trainer.call"]._call_lightning_module_hook(trainer, "on_validation_model_zero_grad")
        loop.val_loop.run()
    except BaseException:
        loop.val_loop._on_evaluation_model_train()
        raise
    finally:
        trainer.training = True
        connector._first_loop_iter = first


# -- what it executes --------------------------------------------------------------------------------------------------


class _Validation:
    """Follows the validation that runs, which ends where further batches show nothing new."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._followed: EvaluationBatches | None = None

    def run(self, original: Callable[..., Any], loop: Any) -> Any:
        """Run a validation; the few batches before the training, which check the code, are none."""
        if loop.trainer.sanity_checking:
            return original()
        with ExitStack() as stack:
            loop.setup_data()
            if not loop.skip:
                batches = whole(sum(loop.max_batches))
                self._followed = stack.enter_context(self._tasks.evaluating(batches))
            try:
                return original()
            finally:
                self._followed = None

    def step(self, original: Callable[..., Any], loop: Any, batch: Any, *arguments: Any) -> None:
        """Evaluate a batch.

        Raises:
            StopIteration: Lightning ends the validation then.
        """
        followed = self._followed
        if followed is not None and loop.num_dataloaders == 1 and followed.is_enough():
            raise StopIteration
        original(batch, *arguments)
        if followed is not None:
            followed.ended(batch)


def _saving(tasks: Tasks, original: Callable[..., Any], trainer: Any, *arguments: Any, **keywords: Any) -> None:
    with tasks.executing("saving"):
        original(*arguments, **keywords)
