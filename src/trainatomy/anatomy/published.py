"""The published layer: its shares as others measured them, and why ours differ."""

from __future__ import annotations

from trainatomy.anatomy.anatomy import Scope
from trainatomy.anatomy.groups import GROUPS
from trainatomy.anatomy.table import Step
from trainatomy.facts.published import operator_shares
from trainatomy.results.anatomy import PublishedShares
from trainatomy.results.operations import Operations
from trainatomy.workload.encoder_layer import MODULE, PHASES

SCOPE = Scope(PHASES, MODULE)
_ATTENTION = f"{MODULE}.attention"
_IN_ITS_SOFTMAX = frozenset({"aten::mul", "aten::native_dropout", "aten::native_dropout_backward"})


def published_shares() -> PublishedShares:
    """Of the three groups, in the paper's order, which is ours."""
    source, shares = operator_shares()
    named = dict(zip(GROUPS, shares, strict=True))
    return PublishedShares(
        source,
        {group: share.flop_percent for group, share in named.items()},
        {group: share.time_percent for group, share in named.items()},
    )


def shares_as_published(operations: Operations) -> dict[str, float]:
    """Percent of FLOP with the operators grouped as the paper fuses them: the attention's scaling and dropout belong
    to its softmax."""
    step = Step(operations, keep=SCOPE.keeps(operations))
    flop = dict.fromkeys(GROUPS, 0)
    for _, operation, work in step.kernels():
        moved = operation.module == _ATTENTION and operations.calls[operation.call].name in _IN_ITS_SOFTMAX
        group = "normalisation" if moved else work.group
        assert group is not None
        flop[group] += (work.flop or 0) * operation.repeats
    whole = sum(flop.values())
    return {group: 100 * part / whole for group, part in flop.items()}


def published_notes(operations: Operations) -> tuple[str, ...]:
    """Why the shares differ from the published ones."""
    shares = " / ".join(f"{share:.2f}" for share in shares_as_published(operations).values())
    return (
        "forward and backward of the layer alone: the loss that hands it a gradient, the copy of the batch and the "
        "optimizer, which the paper does not have, are left out",
        f"the paper counts the attention's scaling and dropout as parts of its softmax; counted so, the shares of FLOP "
        f"are {shares} %",
        "the published times are of PyTorch in 2020 on a V100; today's kernels differ, and so do other cards",
    )
