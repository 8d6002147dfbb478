"""Known values that collectives deliver.

Every rank runs the same code on a batch of the same size, so where this rank's values are known (sizes, counts of
tokens, flags), the others are taken to hold the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from trainatomy.simulator.parallel.collectives import Collective
from trainatomy.simulator.values import Values

_MOST_ELEMENTS = 1 << 16
"""Elements of the largest tensor whose values are followed."""
_REDUCED: Mapping[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "sum": lambda value, ranks: value * ranks,
    "product": lambda value, ranks: value**ranks,
    **dict.fromkeys(("avg", "max", "min", "band", "bor"), lambda value, ranks: value),
}
"""Result of a reduction of one value of all ranks, by the name of the operation in lower case."""


def known(values: Values, tensors: Sequence[torch.Tensor], kind: str) -> dict[int, torch.Tensor]:
    """Return the values that are known of small strided tensors, by the identity of each.

    For an all-to-all, ``kind``, those count that follow from a router's assumed choices: with it, ranks tell each other
    how many tokens they send to each expert.
    """
    small = [one for one in tensors if one.is_meta and one.layout == torch.strided and one.numel() <= _MOST_ELEMENTS]
    counts = kind == "all_to_all"
    found = ((id(one), values.of(one, with_data=counts and not one.is_floating_point())) for one in small)
    return {key: value for key, value in found if value is not None}


def learn(values: Values, collective: Collective, sent: Mapping[int, torch.Tensor], reduction: str) -> None:
    """Remember what a collective delivers, and forget what its outputs held.

    Args:
        values: Known values.
        collective: The collective, which has run.
        sent: What was known of its tensors before (see ``known``).
        reduction: Name of the operation that it reduces with; empty where unknown.
    """
    if collective.kind in ("send", "barrier"):
        return
    inputs, outputs = collective.inputs, collective.outputs
    for index, output in enumerate(outputs):
        value = sent.get(id(inputs[index * len(inputs) // len(outputs)])) if inputs else None
        found = None if value is None else _delivered(collective, value, output, reduction)
        values.forget(output)
        if found is not None:
            values.learn(output, found)


def _delivered(
    collective: Collective, value: torch.Tensor, output: torch.Tensor, reduction: str
) -> torch.Tensor | None:
    """Return the values of an output, given those of its input; None if they do not follow."""
    ranks = len(collective.ranks)
    if collective.kind == "all_gather" and value.numel() and output.numel() % value.numel() == 0:
        return value.flatten().repeat(output.numel() // value.numel()).view(output.shape)
    if collective.kind in ("all_reduce", "reduce") and reduction in _REDUCED:
        return _REDUCED[reduction](value, ranks).to(output.dtype)
    if collective.kind == "all_to_all" and value.numel() == output.numel() and value.numel() % ranks == 0:
        to_this_rank = value.flatten().chunk(ranks)[collective.ranks.index(dist.get_rank())]
        return to_this_rank.repeat(ranks).view(output.shape)
    if collective.kind == "broadcast":
        return value
    return None


def reduction_of(arguments: Sequence[Any]) -> str:
    """Return the name of the operation among the arguments of a reduction by ``ProcessGroup``, in lower case."""
    kinds = dist.ReduceOp.RedOpType.__members__.items()
    for one in arguments:
        named = getattr(one, "reduceOp", one)  # options have it as an attribute
        for name, kind in kinds:
            if isinstance(named, (dist.ReduceOp, dist.ReduceOp.RedOpType)) and named == kind:
                return name.lower()
    return "" if arguments else "sum"
