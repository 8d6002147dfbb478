"""Power that a step would draw at full clocks, and how much longer arithmetic takes where the limit forbids them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainatomy.results.time import Power

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainatomy.catalog.power import PowerRates
    from trainatomy.operators.cost.kernel import KernelWork
    from trainatomy.results.operations import Call, Operations
    from trainatomy.timing.cost_model import KernelCost


def joules_of(call: Call, work: KernelWork, seconds: float, rates: PowerRates) -> float:
    """Return the energy of a call's kernels beyond that of an idle GPU, at full clocks."""
    per_flop = rates.joules_per_flop.get(work.rate, rates.joules_per_flop["bf16"])
    arithmetic = work.flop * per_flop * (rates.attention if "attention" in call.name else 1.0)
    return arithmetic + work.bytes * rates.joules_per_byte + (0.0 if arithmetic else rates.kernel_watts * seconds)


def power_in(operations: Operations, kernels: Sequence[KernelCost], seconds: float, rates: PowerRates) -> Power:
    """Return the mean power of a step that takes ``seconds`` at full clocks."""
    joules = sum(kernels[one.call].joules * one.repeats for one in operations.operations)
    watts = rates.idle_watts + joules / seconds
    slowdown = max(watts / rates.limit_watts, 1.0) ** rates.exponent
    return Power(min(watts, rates.limit_watts), watts, rates.limit_watts, slowdown)


def slowed(kernels: Sequence[KernelCost], slowdown: float) -> list[KernelCost]:
    """Return the costs at lower clocks: what is bound by arithmetic takes longer, memory keeps its clock."""
    return [
        one._replace(seconds=one.seconds * slowdown) if one.flop_seconds > one.bytes_seconds else one for one in kernels
    ]
