"""What one operation costs the GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from trainatomy.operators.cost.table import is_known, work_of
from trainatomy.operators.cost.work import Chip, Work
from trainatomy.results.operations import Call

if TYPE_CHECKING:
    from trainatomy.timing.cost_model import CostModel

__all__ = ["Chip", "KernelCost", "Work", "general_rule_only", "kernel_seconds", "precision_of", "work_of"]


class KernelCost(NamedTuple):
    """``seconds``: sum of the durations of a call's kernels, as a profiler sees them, without the gaps between kernels
    (``Prices.busy_seconds`` adds one for each of ``launches``); ``flop_seconds`` and ``bytes_seconds``: its arithmetic
    at the card's peak and its traffic at the card's bandwidth, which say what bounds it."""

    seconds: float
    flop_seconds: float
    bytes_seconds: float
    launches: int


def kernel_seconds(call: Call, prices: CostModel) -> KernelCost:
    """What the GPU needs for one call, when nothing keeps it waiting. Remembered for each distinct call."""
    known = prices.known.get(call)
    if known is None:
        known = prices.known[call] = _priced(work_of(call, prices.chip), prices)
    return known


def _priced(work: Work, prices: CostModel) -> KernelCost:
    if not work.launches:
        return KernelCost(0.0, 0.0, 0.0, 0)
    chip = prices.chip
    flop, traffic = work.flop / chip.rate(work.rate), work.bytes / chip.bandwidth
    return KernelCost(prices.physical(work) * prices.efficiency(work), flop, traffic, prices.launches(work))


def precision_of(call: Call, chip: Chip) -> str:
    """The key of ``Chip.rates`` whose peak bounds a call's arithmetic: of a product by its factors' type (TF32 where it
    is allowed for matrices, or for convolutions), whatever the type of a bias or of indices."""
    return work_of(call, chip).rate


def general_rule_only(calls: Iterable[Call]) -> frozenset[str]:
    """Names of operators that nothing is known of: priced by their traffic."""
    return frozenset(call.name for call in calls if not is_known(call))
