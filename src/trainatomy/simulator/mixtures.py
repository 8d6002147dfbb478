"""Find the experts of a mixture of experts, and how many of them a token passes.

transformers has one module for the experts of a layer, whose class is called ``...Experts`` and has ``num_experts``;
the configuration says how many a token passes.  Shared experts are other modules.

Source: transformers 5.17-5.23, models/*/modeling_*.py and configuration_*.py.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from trainatomy.results.experts import Experts
from trainatomy.training.quantization import parameter_count

_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
_ONE_PER_TOKEN = ("switch_transformers",)
"""Types of models whose router picks one expert, which no field of their configuration says."""


def experts_of(model: nn.Module, tokens: int | None) -> Experts | None:
    """Return the experts of a model; ``None`` without any, or where the configuration does not say how many are used.

    Args:
        model: The model.
        tokens: Tokens of a batch, or ``None`` if samples are not text.
    """
    found = [module for module in model.modules() if _is_experts(module)]
    each = _per_token(model)
    if not found or each is None:
        return None
    counts = [sum(parameter_count(one) for one in module.parameters()) for module in found]
    numbers = [int(module.num_experts) for module in found]  # type: ignore[arg-type]
    total = sum(parameter_count(parameter) for parameter in model.parameters())
    idle = sum(count * (1 - min(each, number) / number) for count, number in zip(counts, numbers, strict=True))
    most = max(numbers)
    return Experts(
        layers=len(found),
        experts=most,
        experts_per_token=each,
        parameters=total,
        active_parameters=total - round(idle),
        expert_parameters=sum(counts),
        rows_per_expert=None if tokens is None else tokens * each / most,
    )


def _is_experts(module: nn.Module) -> bool:
    number = getattr(module, "num_experts", None)
    return type(module).__name__.endswith("Experts") and isinstance(number, int) and number > 1


def _per_token(model: nn.Module) -> int | None:
    """Return how many experts a token passes, by the first configuration in the model that says it."""
    configurations: list[Any] = []
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and not any(config is each for each in configurations):
            configurations.append(config)
    for config in configurations:
        for name in _PER_TOKEN:
            value = getattr(config, name, None)
            if isinstance(value, int) and value > 0:
                return value
        if getattr(config, "model_type", "") in _ONE_PER_TOKEN:
            return 1
    return None
