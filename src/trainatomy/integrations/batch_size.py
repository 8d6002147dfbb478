"""Batch sizes that are known before the first step, for a script of one's own.

transformers' ``auto_find_batch_size`` and accelerate's ``find_executable_batch_size`` start the training again with a
smaller batch until it no longer runs out of memory.  The effective batch size, and with it what is learnt, shrinks with
the batch.  Here a search without a GPU (``trainatomy.fit``) finds the batch size, and the accumulation steps that keep
the effective batch size.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from trainatomy.errors import WorkloadError
from trainatomy.integrations.best_settings import Model, best_settings
from trainatomy.integrations.training_arguments import (
    Arguments,
    can_hold,
    check_launch,
    train_settings,
    with_candidate,
)

if TYPE_CHECKING:
    from pathlib import Path

    from trainatomy.api import Batch
    from trainatomy.catalog.calibrations import Calibration
    from trainatomy.results.fit import Candidate, Permission

Result = TypeVar("Result")

_BATCH = "per_device_train_batch_size"
_ACCUMULATION = "gradient_accumulation_steps"
_PERMISSIONS = ("precision", "optimizer")


def fit_training_arguments(
    args: Arguments,
    model: nn.Module | str,
    *,
    batch: Batch | None = None,
    sequence_length: int | None = None,
    optimizer: str | type[torch.optim.Optimizer] | None = None,
    gpu: str | None = None,
    allow: Sequence[Permission] = (),
    headroom: float = 0.05,
    keep: Sequence[str] = (),
    calibration: Calibration | Path | str | None = None,
    trust_remote_code: bool = False,
    print: bool = True,
) -> Arguments:
    """Return a copy of ``TrainingArguments`` with the settings that fit the GPU and train fastest.

    It takes the place of ``auto_find_batch_size``, which is off in the copy.  The copy has another
    ``per_device_train_batch_size``, ``gradient_accumulation_steps``, ``gradient_checkpointing`` and implementation of
    the optimizer if these are faster; their product, the effective batch size, is that of ``args``.  Settings that the
    prediction does not simulate are refused by name, or named in a warning.

    Args:
        args: The arguments; they stay as they are.
        model: The model, on any device, which is neither changed nor moved; or its name on the hub, for the class that
            its configuration names.
        batch: A batch as the collator makes it, or a function of the batch size that returns one.  A transformers
            model needs none, but the prediction is then for batches of full length without a mask.
        sequence_length: Tokens of the longest samples, in place of ``batch``.
        optimizer: The class of the optimizer, if the Trainer is given one.
        gpu: The GPU; by default this machine's, without the memory that other processes hold.
        allow: Changes of what is trained that may be made: "precision", "optimizer".  A warning says what is learnt
            differently.
        headroom: Share of the GPU's memory that must stay free.
        keep: Settings that may not be varied, such as "gradient_checkpointing"; see ``trainatomy.fit``.
        calibration: See ``trainatomy.predict``.
        trust_remote_code: See ``trainatomy.predict``.
        print: Print the settings with their predicted throughput and memory, in one line.

    Raises:
        DoesNotFit: No setting fits; the message says what would make it fit.
        WorkloadError: A setting cannot be simulated, or the arguments contradict each other.
        TrainatomyError: The errors of ``trainatomy.fit``.
    """
    check_launch(args)
    if refused := [name for name in allow if name not in _PERMISSIONS]:
        raise WorkloadError(
            f"allow: {refused[0]} cannot be set by TrainingArguments; they can set {' and '.join(_PERMISSIONS)}"
        )
    settings, notes = train_settings(args)
    best = best_settings(
        model,
        {**settings, "loop": "trainer"},
        notes,
        batch=batch,
        sequence_length=sequence_length,
        optimizer=optimizer,
        gpu=gpu,
        allow=allow,
        headroom=headroom,
        keep=keep,
        calibration=calibration,
        trust_remote_code=trust_remote_code,
        can_apply=can_hold,
        print=print,
    )
    return with_candidate(args, best)


def predicted_batch_size(
    function: Callable[..., Result] | None = None,
    *,
    model: Model,
    effective_batch_size: int,
    batch: Batch | None = None,
    sequence_length: int | None = None,
    optimizer: str | type[torch.optim.Optimizer] | None = None,
    gpu: str | None = None,
    headroom: float = 0.05,
    calibration: Calibration | Path | str | None = None,
    trust_remote_code: bool = False,
    print: bool = True,
    **settings: Any,
) -> Any:
    """Decorate a training function, which is then called once, with a batch size that fits and accumulation steps.

    It takes the place of accelerate's ``find_executable_batch_size``.  The function gets the two numbers as its first
    arguments; their product is the effective batch size.  The search runs when the function is first called.

        @predicted_batch_size(model=model, effective_batch_size=64, optimizer=torch.optim.AdamW, bf16=True)
        def train(batch_size, accumulation_steps, epochs): ...

        train(epochs=3)

    Args:
        function: The training function, where this is not used as a decorator.
        model: The model, on any device, which is neither changed nor moved; its name on the hub; a function without
            arguments that makes it; or a workload.
        effective_batch_size: Samples per optimizer step.
        batch: See ``fit_training_arguments``.
        sequence_length: See ``fit_training_arguments``.
        optimizer: The class of the optimizer, or a name of ``TrainingArguments.optim``.
        gpu: See ``fit_training_arguments``.
        headroom: See ``fit_training_arguments``.
        calibration: See ``trainatomy.predict``.
        trust_remote_code: See ``trainatomy.predict``.
        print: See ``fit_training_arguments``.
        **settings: What else the training function does, as in ``trainatomy.predict``: ``bf16=True``,
            ``gradient_checkpointing=True``, ``loop="trainer"``.  The search keeps all of it.

    Raises:
        DoesNotFit: No batch size fits; raised when the function is called, like the others.
        TrainatomyError: The errors of ``trainatomy.fit``.
        TypeError: The function is called with other arguments than those behind the first two.
    """
    if given := [name for name in (_BATCH, _ACCUMULATION) if name in settings]:
        raise WorkloadError(f"{given[0]}: predicted_batch_size finds it; give effective_batch_size", key=given[0])

    search = functools.partial(
        best_settings,
        model,
        settings,
        effective_batch_size=effective_batch_size,
        batch=batch,
        sequence_length=sequence_length,
        optimizer=optimizer,
        gpu=gpu,
        headroom=headroom,
        calibration=calibration,
        trust_remote_code=trust_remote_code,
        can_apply=_sets_batch,
        print=print,
    )
    decorate = functools.partial(_called_with_sizes, functools.cache(search))
    return decorate if function is None else decorate(function)


def _called_with_sizes(search: Callable[[], Candidate], function: Callable[..., Result]) -> Callable[..., Result]:
    """Return a function that puts the sizes that a search finds before the arguments of ``function``."""

    @functools.wraps(function)
    def train(*arguments: Any, **keywords: Any) -> Result:
        _check_call(function, arguments, keywords)
        best = search()
        sizes = best.per_device_train_batch_size, best.gradient_accumulation_steps
        return function(*sizes, *arguments, **keywords)

    return train


def _sets_batch(settings: Mapping[str, object]) -> bool:
    """Return whether settings are a batch size with its accumulation steps, all that a training function is given."""
    return set(settings) <= {f"train.{_BATCH}", f"train.{_ACCUMULATION}"}


def _check_call(function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Raise ``TypeError`` if a call does not go with the two numbers that are put before its arguments."""
    try:
        inspect.signature(function).bind(1, 1, *arguments, **keywords)
    except TypeError as error:
        name = getattr(function, "__name__", "the function")
        raise TypeError(
            f"{name}: {error}. predicted_batch_size passes the batch size and the accumulation steps as its first two "
            "arguments; call it with the others only"
        ) from None
