"""Inputs of the Trainer's evaluations: the samples and the functions of the user."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

from trainatomy.training import factory
from trainatomy.training.batch import BatchesOfLengths, MakeBatch, SyntheticDataset, build_dataset

if TYPE_CHECKING:
    from torch import nn

    from trainatomy.workload.schema import Workload


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The evaluation of a training.

    Attributes:
        dataset: Its samples.
        compute_metrics: The Trainer's argument of that name.
        preprocess_logits: The Trainer's ``preprocess_logits_for_metrics``.
    """

    dataset: SyntheticDataset
    compute_metrics: Callable[..., Any] | None
    preprocess_logits: Callable[..., Any] | None

    def keywords(self) -> dict[str, Any]:
        """Return the Trainer's arguments for its evaluation."""
        return {
            "eval_dataset": self.dataset,
            "compute_metrics": self.compute_metrics,
            "preprocess_logits_for_metrics": self.preprocess_logits,
        }


def evaluation_of(
    workload: Workload, model: nn.Module, make_batch: MakeBatch | BatchesOfLengths | None
) -> Evaluation | None:
    """Return the evaluation of a training, None without one."""
    if not workload.evaluates:
        return None
    data = workload.data
    dataset = build_dataset(workload, model, workload.eval_samples, make_batch)
    dataset.draw_kept()
    reduces = data.preprocess_logits_for_metrics
    return Evaluation(
        dataset,
        _compute_metrics(workload),
        None if reduces is None else _users(reduces, "data.preprocess_logits_for_metrics"),
    )


def _compute_metrics(workload: Workload) -> Callable[..., Any] | None:
    """Return the function that computes metrics.

    Unless it runs after each batch it gets arrays on the host, so that calling it would change nothing on the GPU.
    """
    reference = workload.data.compute_metrics
    if not reference:
        return None
    if workload.train.batch_eval_metrics and isinstance(reference, str):
        return _users(reference, "data.compute_metrics")
    return no_metrics


def no_metrics(predictions: Any, **keywords: Any) -> dict[str, float]:
    """Return no metrics."""
    return {}


def predicted_ids(logits: Any, labels: Any) -> Any:
    """Return the ids with the largest logits, as ``preprocess_logits_for_metrics`` of many scripts does."""
    first = logits[0] if isinstance(logits, tuple) else logits
    return first.argmax(dim=-1)


def _users(reference: str, key: str) -> Callable[..., Any]:
    """Load a function of the user's, whose errors will name the user's file."""
    function = factory.load(reference, key)

    @wraps(function)  # the Trainer looks at the arguments
    def call(*arguments: Any, **keywords: Any) -> Any:
        with factory.user_code(f"{key}: {reference}"):
            return function(*arguments, **keywords)

    return call
