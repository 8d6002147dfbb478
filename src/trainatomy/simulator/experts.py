"""Mixtures of experts: products on GPUs without a grouped one, and experts that ranks share.

Before compute capability 8.0, transformers runs one product for each expert in a custom operator
(``transformers::grouped_mm_fallback``, integrations/moe.py).  The CPU reads how many rows each expert gets, which
depends on the router's values; rows are assumed to be spread evenly.  Memory does not depend on it: the products write
into slices of one output.

Find the experts of a mixture of experts, and how many of them a token passes.

transformers has one module for the experts of a layer, whose class is called ``...Experts`` and has ``num_experts``;
the configuration says how many a token passes.  Shared experts are other modules.

Source: transformers 5.17-5.23, models/*/modeling_*.py and configuration_*.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from trainatomy.results.operations import Operations
from trainatomy.results.tasks import Experts
from trainatomy.training.model import unwrap
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


_PRODUCTS = frozenset({"aten::_grouped_mm"})


class _GroupedProducts(torch.autograd.Function):
    """Compute one product for each expert, written into slices of the result; operands are saved for backward."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return [S, N] from rows [S, K], sorted by expert, and weights [G, K, N]."""
        ctx.save_for_backward(rows, weight)
        ctx.offsets = offsets
        offsets.cpu()
        output = torch.zeros(rows.size(0), weight.size(2), device=rows.device, dtype=rows.dtype)
        for expert, part in _even_parts(rows.size(0), weight.size(0)):
            torch.mm(rows[part], weight[expert], out=output[part])
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Return the gradients of rows and weights."""
        rows, weight = ctx.saved_tensors
        ctx.offsets.cpu()
        of_rows, of_weight = torch.zeros_like(rows), torch.zeros_like(weight)
        for expert, part in _even_parts(rows.size(0), weight.size(0)):
            torch.mm(gradients[0][part], weight[expert].T, out=of_rows[part])
            torch.mm(rows[part].T, gradients[0][part], out=of_weight[expert])
        return of_rows, of_weight, None


def _even_parts(rows: int, experts: int) -> Iterator[tuple[int, slice]]:
    """Yield each expert that gets rows, and its slice of them."""
    for expert in range(experts):
        part = slice(rows * expert // experts, rows * (expert + 1) // experts)
        if part.start < part.stop:
            yield expert, part


def grouped_mm_fallback() -> dict[Any, Callable[..., torch.Tensor]]:
    """Return the replacement for the custom operator, by the operator, where transformers defines it."""
    if "transformers.integrations.moe" not in sys.modules:
        return {}
    operator = getattr(torch.ops.transformers, "grouped_mm_fallback", None)

    def products(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", enabled=False):  # the operator runs below autocast
            output: torch.Tensor = _GroupedProducts.apply(input, weight, offs)
            return output

    return {} if operator is None else {operator: products, operator.default: products}


def masks_rows(model: nn.Module) -> bool:
    """Return whether ranks that share experts have all rows and mask those of other ranks' experts.

    transformers does so up to 5.18; 5.23 and later send each rank the rows of its experts.
    """
    return not hasattr(unwrap(model), "_expand_parallel_plan")


def share_rows(operations: Operations, ranks: int) -> None:
    """Note on each product of experts that ``ranks`` share them, so that one computes its part of the rows.

    For releases that mask rows (``masks_rows``).  transformers sorts the rows of other ranks' experts behind those of
    its own (``grouped_mm_experts_forward``), where no group is.  Rows are assumed to be spread evenly.
    """
    for index, call in enumerate(operations.calls):
        if call.name in _PRODUCTS:
            flop = None if call.flop is None else call.flop // ranks
            operations.calls[index] = call._replace(numbers=(*call.numbers, ("shared_by", str(ranks))), flop=flop)
