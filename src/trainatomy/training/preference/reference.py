"""Reference models that DeepSpeed runs."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

from trainatomy.libraries import import_library

if TYPE_CHECKING:
    from torch import nn


def engine_of(model: Any, accelerator: Any) -> nn.Module:
    """Return DeepSpeed's engine for a reference model: sharded with ZeRO-3, and whole otherwise.

    Source: TRL 0.24, models/utils.py (``prepare_deepspeed``).
    """
    deepspeed = import_library("deepspeed", "train.deepspeed")
    settings = deepcopy(accelerator.state.deepspeed_plugin.deepspeed_config)
    if settings["zero_optimization"]["stage"] != 3:
        settings["zero_optimization"]["stage"] = 0
    elif hidden_size := getattr(model.config, "hidden_size", None):
        settings |= {
            "zero_optimization.reduce_bucket_size": hidden_size * hidden_size,
            "zero_optimization.stage3_param_persistence_threshold": 10 * hidden_size,
            "zero_optimization.stage3_prefetch_bucket_size": 0.9 * hidden_size * hidden_size,
        }
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    engine.eval()
    found: nn.Module = engine
    return found
