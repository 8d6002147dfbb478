"""Samples and tokens in a second."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from trainatomy.training.model import unwrap
from trainatomy.training.positions import lengths
from trainatomy.training.shape import shape_of

if TYPE_CHECKING:
    from torch import nn

    from trainatomy.workload.schema import Workload


class Throughput(NamedTuple):
    """``None``: no step was timed; tokens also where samples are no text."""

    samples_per_second: float | None
    tokens_per_second: float | None


def samples_per_step(workload: Workload) -> int:
    """Samples that one optimizer step sees; in inference, one forward."""
    micro_steps = 1 if workload.mode == "inference" else workload.train.gradient_accumulation_steps
    return workload.batch_size * micro_steps


def tokens_per_sample(workload: Workload, model: nn.Module) -> int | None:
    """Tokens of the text, and of the decoder where there is one; ``None`` where a sample is no text, or a function of
    the user's makes it."""
    if workload.data.factory is not None or not hasattr(unwrap(model), "config"):
        return None
    shape = shape_of(model, lengths(workload.data, unwrap(model)))
    if shape.main_input != "input_ids":
        return None
    return shape.choices * (shape.image_tokens + shape.lengths.sequence) + (
        shape.lengths.target if shape.is_encoder_decoder else 0
    )


def throughput(workload: Workload, tokens: int | None, step_seconds: float | None) -> Throughput:
    """Of a training whose step takes ``step_seconds`` and whose samples have ``tokens`` tokens each."""
    if not step_seconds:
        return Throughput(None, None)
    samples = samples_per_step(workload) / step_seconds
    return Throughput(samples, None if tokens is None else samples * tokens)
