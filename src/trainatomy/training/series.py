"""Time series of a batch: the past, what is known about its times, and what follows."""

from __future__ import annotations

import torch
from torch import Tensor

from trainatomy.training.shape import Shape, cannot_make


def draw_series(shape: Shape, generator: torch.Generator) -> Tensor:
    """Return the past of time series as float32.

    ``[context, channels]``; for TimesFM ``[context]``; for models that look back by lags (Informer, Autoformer),
    ``[context + longest lag]`` of one series or ``[…, series]`` of several.
    """
    config = shape.config
    if "TimesFm" in shape.class_name:
        return torch.rand(config.context_length, generator=generator)
    if _looks_back(shape):
        length = config.context_length + max(config.lags_sequence)
        return torch.rand((length, *_several(config.input_size)), generator=generator)
    if not hasattr(config, "context_length") or not hasattr(config, "num_input_channels"):
        raise cannot_make(shape, "past_values")
    return torch.rand((config.context_length, config.num_input_channels), generator=generator)


def draw_future(shape: Shape, past: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Return what follows ``past``, and for models that look back by lags the features of its times."""
    config = shape.config
    if "TimesFm" in shape.class_name:
        return {"future_values": torch.rand(int(config.horizon_length), generator=generator)}
    length = int(config.prediction_length)
    future = {"future_values": torch.rand((length, *past.shape[1:]), generator=generator)}
    if _looks_back(shape):
        future["future_time_features"] = torch.rand((length, config.num_time_features), generator=generator)
    return future


def draw_times(shape: Shape, drawn: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Return the features of the past's times, its mask of ones, and the features of each series, as float32."""
    if "past_values" not in drawn or not _looks_back(shape):
        return {}
    config, past = shape.config, drawn["past_values"]
    found = {
        "past_time_features": torch.rand((len(past), config.num_time_features), generator=generator),
        "past_observed_mask": torch.ones_like(past),
    }
    if config.num_static_categorical_features:
        kinds = [torch.randint(0, count, (1,), generator=generator) for count in config.cardinality]
        found["static_categorical_features"] = torch.cat(kinds)
    if config.num_static_real_features:
        found["static_real_features"] = torch.rand(config.num_static_real_features, generator=generator)
    return found


def _looks_back(shape: Shape) -> bool:
    """Return whether a model is given the values at certain lags, and the features of each time."""
    return hasattr(shape.config, "lags_sequence") and isinstance(shape.config.context_length, int)


def _several(count: int) -> tuple[int, ...]:
    return (count,) if count > 1 else ()
