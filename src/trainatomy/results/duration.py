"""How long a whole training takes: its steps and the evaluations between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainatomy.results.prediction import Prediction

_DEFAULT_EVAL_STEPS = 500
"""Steps between two evaluations unless ``eval_steps`` or ``logging_steps`` says otherwise (transformers)."""


@dataclass(frozen=True, slots=True)
class Duration:
    """Predicted duration of a training, without loading the model and saving checkpoints.

    Attributes:
        steps: Optimizer steps.
        evaluations: Evaluations; None where it is not known after how many steps one runs.
        seconds: Duration of the steps and the evaluations.
        interval_seconds: The same with the ends of the step's interval.
    """

    steps: int
    evaluations: int | None
    seconds: float
    interval_seconds: tuple[float, float]


def duration_of(prediction: Prediction) -> Duration | None:
    """Return how long the training takes, None where its steps or the time of a step are not known.

    Steps are ``max_steps``, or as many as the epochs have by ``data.lengths``.
    """
    train: Any = prediction.workload.get("train", {})
    time, lengths = prediction.time, prediction.lengths
    per_epoch = lengths.steps if lengths is not None else None
    steps = _steps(train, per_epoch)
    if time is None or steps is None:
        return None
    evaluations = _evaluations(train, steps, per_epoch) if prediction.evaluation is not None else 0
    extra = time.first_epoch_extra_seconds * min(steps, per_epoch or steps)
    if prediction.evaluation is not None and evaluations:
        evaluation = prediction.evaluation
        extra += evaluations * (evaluation.seconds or 0.0) + (evaluation.first_extra_seconds or 0.0)
    low, high = (steps * end + extra for end in time.interval_seconds)
    return Duration(steps, evaluations, steps * time.step_seconds + extra, (low, high))


def _steps(train: Mapping[str, Any], per_epoch: int | None) -> int | None:
    if train.get("max_steps"):
        return int(train["max_steps"])
    epochs = train.get("num_train_epochs")
    return None if epochs is None or per_epoch is None else math.ceil(epochs * per_epoch)


def _evaluations(train: Mapping[str, Any], steps: int, per_epoch: int | None) -> int | None:
    """Return how often the Trainer evaluates."""
    at_start = int(bool(train.get("eval_on_start")))
    strategy = train.get("eval_strategy", "no")
    if strategy == "epoch":
        return None if per_epoch is None else at_start + math.ceil(steps / per_epoch)
    if strategy == "steps":
        every = train.get("eval_steps") or _DEFAULT_EVAL_STEPS
        return at_start + steps // math.ceil(every if every >= 1 else every * steps)
    return at_start
