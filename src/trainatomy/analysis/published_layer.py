"""Compare an encoder layer with the shares that Ivanov et al. published (arXiv 2007.00072)."""

from __future__ import annotations

from collections.abc import Sequence

from trainatomy.analysis.operation_table import OperationTable, PredictedTime
from trainatomy.analysis.operations import Scope
from trainatomy.catalog.published import operator_shares
from trainatomy.operators.operator import GROUPS
from trainatomy.results.operation_breakdown import PublishedShares
from trainatomy.results.operations import Operations
from trainatomy.workload.encoder_layer import MODULE, PHASES

SCOPE = Scope(PHASES, MODULE)
_ATTENTION = f"{MODULE}.attention"
_FUSED_WITH_SOFTMAX = frozenset({"aten::mul", "aten::native_dropout", "aten::native_dropout_backward"})


def published_shares() -> PublishedShares:
    """Return the published shares of the three groups (``GROUPS`` is in the paper's order)."""
    source, shares = operator_shares()
    named = dict(zip(GROUPS, shares, strict=True))
    return PublishedShares(
        source,
        {group: share.flop_percent for group, share in named.items()},
        {group: share.time_percent for group, share in named.items()},
    )


def shares_as_published(
    operations: Operations, times: Sequence[PredictedTime | None] | None = None
) -> dict[str, float]:
    """Return percent of FLOP (or of ``times``, if given) by group, with operators grouped as the paper fuses them.

    There the attention's scaling and dropout belong to its softmax.
    """
    table = OperationTable(operations, keep=SCOPE.selects(operations))
    parts = dict.fromkeys(GROUPS, 0.0)
    for index, operation, work in table.kernels():
        moved = operation.module == _ATTENTION and operations.calls[operation.call].name in _FUSED_WITH_SOFTMAX
        group = "normalisation" if moved else work.group
        assert group is not None
        timed = times[index] if times is not None else None
        amount = float(work.flop or 0) if times is None else timed.seconds if timed is not None else 0.0
        parts[group] += amount * operation.repeats
    whole = sum(parts.values())
    return {group: 100 * part / whole for group, part in parts.items()}


def published_notes(operations: Operations, times: Sequence[PredictedTime | None] | None = None) -> tuple[str, ...]:
    """Explain why the shares differ from the published ones."""
    flop = " / ".join(f"{share:.2f}" for share in shares_as_published(operations).values())
    counted = (
        "the paper counts the attention's scaling and dropout as part of its softmax; counted that way, FLOP are "
        f"{flop} %"
    )
    if times is not None:
        shares = " / ".join(f"{share:.1f}" for share in shares_as_published(operations, times).values())
        counted += f" and predicted times {shares} %"
    return (
        "forward and backward of the layer alone: the loss, the copy of the batch and the optimizer, which are not in "
        "the paper, are left out",
        counted,
        "copies that reorder attention heads for a batched product count as element-wise operators here; the paper's "
        "list of operators has none",
        "the published times are of PyTorch in 2020 on a V100; today's kernels and other GPUs differ",
    )
