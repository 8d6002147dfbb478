"""Samples and tokens per second."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from trainatomy.training.lengths import sample_lengths
from trainatomy.training.model import unwrap
from trainatomy.training.positions import lengths
from trainatomy.training.shape import shape_of
from trainatomy.workload.batching import batching_of
from trainatomy.workload.loops import loop_of

if TYPE_CHECKING:
    from torch import nn

    from trainatomy.workload.schema import Workload


class Throughput(NamedTuple):
    """Rates of a training; ``None`` if no step was timed, tokens also if samples are not text."""

    samples_per_second: float | None
    tokens_per_second: float | None


def samples_per_step(workload: Workload) -> int:
    """Return the samples of one optimizer step, or of one forward in inference."""
    micro_steps = 1 if workload.mode != "training" else workload.train.gradient_accumulation_steps
    return workload.batch_size * micro_steps


def tokens_per_sample(workload: Workload, model: nn.Module) -> int | None:
    """Return the tokens of the text and of the decoder, if there is one; of samples that differ in length, the mean.

    A pair of answers counts twice.
    ``None`` if samples are not text or come from a function of the user's.
    """
    if workload.data.factory is not None or not hasattr(unwrap(model), "config"):
        return None
    shape = shape_of(model, lengths(workload, unwrap(model)), workload.data)
    sequences = loop_of(workload).sequences
    if shape.main_input != "input_ids":
        return None
    if workload.data.lengths is not None and not workload.data.packing:
        mean = round(fmean(sample_lengths(workload)))
        return sequences * shape.choices * mean + (shape.lengths.target if shape.is_encoder_decoder else 0)
    length = batching_of(workload).tokens_of_row(shape.lengths.sequence)
    return sequences * shape.choices * (shape.lengths.placeholders + length) + (
        shape.lengths.target if shape.is_encoder_decoder else 0
    )


def throughput(workload: Workload, tokens: int | None, step_seconds: float | None) -> Throughput:
    """Return the rates of a training whose steps take ``step_seconds`` and whose samples have ``tokens`` tokens."""
    if not step_seconds:
        return Throughput(None, None)
    samples = samples_per_step(workload) / step_seconds
    return Throughput(samples, None if tokens is None else samples * tokens)
