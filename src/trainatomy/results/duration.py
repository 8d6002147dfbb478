"""How long a whole training takes: its steps and the evaluations between them; and what it costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from trainatomy.results.prediction import Prediction

_DEFAULT_PERIOD = 500
"""Steps between two evaluations or checkpoints unless the training says otherwise (transformers)."""
_DEFAULT_EPOCHS = 3.0
"""Epochs of a training that does not say how many it has (transformers)."""

LeftOut = Literal["starting up", "waiting for data", "compiling", "writing checkpoints", "evaluations"]
"""Parts of a training's time that are not predicted. Starting up is importing, and loading model and kernels."""


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """Cost of a whole training: the price of its GPUs or its machines, and what that comes to with its interval."""

    per_hour: float
    total: float
    interval: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Duration:
    """Predicted duration of a training.

    Attributes:
        steps: Optimizer steps.
        evaluations: Evaluations; None where it is not known how many there are.
        seconds: Duration of the steps and the evaluations.
        interval_seconds: The same with the ends of the step's interval.
        epochs: Epochs; None where ``max_steps`` says the length, or the samples of an epoch are not known.
        samples: Samples of an epoch; None where they are not known.
        first_steps_seconds: Part of ``seconds`` by which steps take longer whose shapes occur for the first time,
            because libraries plan operators for them.
        evaluation_seconds: Part of ``seconds`` that evaluations take.
        evaluation_samples: Samples of an evaluation; None where nobody said how many it has, and it takes as long as
            the executed batches.
        checkpoints: Checkpoints that are saved, with ``save_strategy: best`` at most; None where it is not known how
            many.
        made_up_samples: Whether rows were made up in place of a script's data set, from which the steps follow unless
            the script says how many it takes.
        left_out: Parts of the training's time that are not in ``seconds``.
    """

    steps: int
    evaluations: int | None
    seconds: float
    interval_seconds: tuple[float, float]
    epochs: float | None = None
    samples: int | None = None
    first_steps_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    evaluation_samples: int | None = None
    checkpoints: int | None = 0
    made_up_samples: bool = False
    left_out: tuple[LeftOut, ...] = ()

    def cost(self, per_hour: float) -> TrainingCost:
        """Return what the training costs at a price per hour."""
        total, low, high = (seconds * per_hour / 3600 for seconds in (self.seconds, *self.interval_seconds))
        return TrainingCost(per_hour, total, (low, high))


@dataclass(frozen=True, slots=True)
class _Schedule:
    """Steps of a training; its settings are those of ``TrainingArguments``."""

    train: Mapping[str, Any]
    steps: int
    per_epoch: int | None

    def times_of(self, strategy: str, period: float | None) -> int | None:
        """Return how often something comes that the Trainer does after epochs or steps, the last of which counts."""
        if strategy == "epoch":
            return None if self.per_epoch is None else math.ceil(self.steps / self.per_epoch)
        every = period or _DEFAULT_PERIOD
        return math.ceil(self.steps / math.ceil(every if every >= 1 else every * self.steps))

    @property
    def evaluations(self) -> int | None:
        """Return how often the Trainer evaluates."""
        strategy = self.train.get("eval_strategy", "no")
        at_start = int(bool(self.train.get("eval_on_start")))
        if strategy == "no":
            return at_start + int(bool(self.train.get("do_eval")))
        times = self.times_of(strategy, self.train.get("eval_steps"))
        return None if times is None else at_start + times

    @property
    def checkpoints(self) -> int | None:
        """Return how many checkpoints the Trainer saves, at most."""
        evaluating = self.train.get("eval_strategy", "no")
        strategy = self.train.get("save_strategy") or (evaluating if self.train.get("load_best_model_at_end") else "no")
        if strategy == "best":
            return self.times_of(evaluating, self.train.get("eval_steps")) if evaluating != "no" else 0
        return 0 if strategy == "no" else self.times_of(strategy, self.train.get("save_steps"))


def duration_of(prediction: Prediction, data_parallel_size: int = 1) -> Duration | None:
    """Return how long the whole training takes, None where its steps or the time of a step are not known.

    Steps are ``max_steps``, those of the epochs by ``data.train_samples`` or ``data.lengths``, or what the
    configuration of a script's framework says.
    """
    train: Any = prediction.workload.get("train", {})
    time, script = prediction.time, prediction.script
    samples, per_epoch = _epoch_of(prediction, data_parallel_size)
    epochs = None if train.get("max_steps") or per_epoch is None else train.get("num_train_epochs") or _DEFAULT_EPOCHS
    steps = train.get("max_steps") or (None if epochs is None or per_epoch is None else math.ceil(epochs * per_epoch))
    steps = script.total_steps if script is not None else steps
    if time is None or not steps:
        return None
    schedule, evaluation = _Schedule(train, int(steps), per_epoch), prediction.evaluation
    evaluations = schedule.evaluations if evaluation is not None else 0
    first = time.first_step_extra_seconds + time.first_epoch_extra_seconds * min(steps, per_epoch or steps)
    evaluating = 0.0
    if evaluation is not None and evaluations:
        evaluating = evaluations * (evaluation.seconds or 0.0) + (evaluation.first_extra_seconds or 0.0)
    low, high = (steps * end + first + evaluating for end in time.interval_seconds)
    data: Any = prediction.workload.get("data", {})
    return Duration(
        steps=int(steps),
        evaluations=evaluations,
        seconds=steps * time.step_seconds + first + evaluating,
        interval_seconds=(low, high),
        epochs=epochs,
        samples=samples,
        first_steps_seconds=first,
        evaluation_seconds=evaluating,
        evaluation_samples=data.get("eval_samples") if evaluation is not None else None,
        checkpoints=schedule.checkpoints if prediction.checkpoint is not None else 0,
        made_up_samples=script is not None and any(one.kind == "data set" for one in script.stand_ins),
        left_out=tuple(_left_out(prediction, evaluations)),
    )


def _epoch_of(prediction: Prediction, data_parallel_size: int) -> tuple[int | None, int | None]:
    """Return the samples and the optimizer steps of an epoch, as the Trainer counts them: the last may be smaller."""
    if prediction.lengths is not None:
        return prediction.lengths.samples.count, prediction.lengths.steps
    train: Any = prediction.workload.get("train", {})
    data: Any = prediction.workload.get("data", {})
    samples = data.get("train_samples")
    if samples is None:
        return None, None
    batches = math.ceil(samples / (int(train.get("per_device_train_batch_size", 8)) * data_parallel_size))
    return samples, math.ceil(batches / int(train.get("gradient_accumulation_steps", 1)))


def _left_out(prediction: Prediction, evaluations: int | None) -> Iterator[LeftOut]:
    """Yield the parts of the training's time that are not predicted."""
    train: Any = prediction.workload.get("train", {})
    script = prediction.script
    tasks = () if script is None else tuple(task.kind for task in script.tasks)
    yield "starting up"
    yield "waiting for data"
    if train.get("torch_compile") or train.get("torch_compile_backend") or train.get("torch_compile_mode"):
        yield "compiling"
    if prediction.checkpoint is not None or "saving" in tasks:
        yield "writing checkpoints"
    if evaluations is None or "evaluation" in tasks:
        yield "evaluations"
