"""The published layer: its shares as others measured them, and why ours differ."""

from __future__ import annotations

from collections.abc import Sequence

from trainatomy.analysis.operation_table import Step, Timed
from trainatomy.analysis.operations import Scope
from trainatomy.catalog.published import operator_shares
from trainatomy.operators.groups import GROUPS
from trainatomy.results.operation_breakdown import PublishedShares
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


def shares_as_published(operations: Operations, times: Sequence[Timed | None] | None = None) -> dict[str, float]:
    """Percent of FLOP (or of ``times``, where they are given) with the operators grouped as the paper fuses them: the
    attention's scaling and dropout belong to its softmax."""
    step = Step(operations, keep=SCOPE.keeps(operations))
    parts = dict.fromkeys(GROUPS, 0.0)
    for index, operation, work in step.kernels():
        moved = operation.module == _ATTENTION and operations.calls[operation.call].name in _IN_ITS_SOFTMAX
        group = "normalisation" if moved else work.group
        assert group is not None
        timed = times[index] if times is not None else None
        amount = float(work.flop or 0) if times is None else timed.seconds if timed is not None else 0.0
        parts[group] += amount * operation.repeats
    whole = sum(parts.values())
    return {group: 100 * part / whole for group, part in parts.items()}


def published_notes(operations: Operations, times: Sequence[Timed | None] | None = None) -> tuple[str, ...]:
    """Why the shares differ from the published ones."""
    flop = " / ".join(f"{share:.2f}" for share in shares_as_published(operations).values())
    counted = (
        f"the paper counts the attention's scaling and dropout as parts of its softmax; counted so, FLOP are {flop} %"
    )
    if times is not None:
        shares = " / ".join(f"{share:.1f}" for share in shares_as_published(operations, times).values())
        counted += f" and predicted times {shares} %"
    return (
        "forward and backward of the layer alone: the loss that hands it a gradient, the copy of the batch and the "
        "optimizer, which the paper does not have, are left out",
        counted,
        "copies that bring heads into the order that a batched product takes are element-wise operators here; the "
        "paper's list of operators has none",
        "the published times are of PyTorch in 2020 on a V100; today's kernels differ, and so do other cards",
    )
