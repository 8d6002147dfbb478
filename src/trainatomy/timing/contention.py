"""Slow down kernels while collectives run beside them.

A collective holds multiprocessors for itself and takes a part of the memory's bandwidth
(``operators/cost/communication.py``).  A kernel that arithmetic bounds does the same work on the multiprocessors that
are left.  One that moves data takes the memory's time, which grows with the share of the bandwidth that is gone, and
beyond that the multiprocessors' own.

On an H200 (torch 2.11, CUDA 13.0, 2026-11-24; lab/parallel/records/beside-h200.jsonl), beside blocks of threads
that copied on 16 or 24 of 132 multiprocessors, kernels that move data or attend took 1.02 to 1.12 or 1.03 to 1.20 times
as long, products 1.23 to 1.38 times; the multiprocessors that are left say 1.14 or 1.22.  Products did not take two
waves, as in other reports (https://github.com/pytorch/pytorch/issues/143988).

Simplified: the collective itself is not slowed, and does not wait for multiprocessors.

Power that a step would draw at full clocks, and how much longer arithmetic takes where the limit forbids them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from trainatomy.catalog.files import read_yaml
from trainatomy.operators.cost.communication import Taken, taken_by
from trainatomy.operators.traffic import crosses
from trainatomy.results.time import Power

if TYPE_CHECKING:
    from trainatomy.catalog.gpus import PowerRates
    from trainatomy.operators.cost.kernel import Chip, KernelWork
    from trainatomy.results.operations import Call, Operations
    from trainatomy.timing.cost_model import KernelCost


MOST_TAKEN = 0.5
"""Largest share of the multiprocessors, and of the bandwidth, that is taken from a kernel: it gets its half."""


@dataclass(frozen=True, slots=True)
class Contention:
    """Shares of the GPU that the calls of a step take from each other.

    Attributes:
        multiprocessors: Multiprocessors of the GPU.
        bandwidth: Bytes per second that kernels reach.
        taken: What collectives take, by index of the call.
        shares: Of each call's time, the memory's share and the multiprocessors'; none of what crosses PCIe.
    """

    multiprocessors: int
    bandwidth: float
    taken: Mapping[int, Taken]
    shares: Sequence[tuple[float, float]]

    def slowdown(self, call: int, taken: Taken) -> float:
        """Return how many times as long a call's kernels take where so much is taken from them."""
        memory, multiprocessors = self.shares[call]
        scarcer = 1 / (1 - min(taken.bytes_per_second / self.bandwidth, MOST_TAKEN))
        slower = 1 / (1 - min(taken.multiprocessors / self.multiprocessors, MOST_TAKEN))
        return 1 + memory * (scarcer - 1) + multiprocessors * (slower - 1)


def contention_in(operations: Operations, kernels: Sequence[KernelCost], chip: Chip) -> Contention | None:
    """Return the contention of a step's calls; None if no collective takes anything."""
    taken = {
        index: found
        for index, (call, kernel) in enumerate(zip(operations.calls, kernels, strict=True))
        if (found := taken_by(call, kernel.seconds, chip)) is not None
    }
    if not taken:
        return None
    reached = float(read_yaml("efficiency.yaml")["traffic"]["bandwidth"])
    shares = [_shares(call, kernel, reached) for call, kernel in zip(operations.calls, kernels, strict=True)]
    return Contention(chip.multiprocessors, chip.bandwidth * reached, taken, shares)


def _shares(call: Call, kernel: KernelCost, reached: float) -> tuple[float, float]:
    """Return the shares of the memory and of the multiprocessors in a call's time; copies over PCIe need neither."""
    if not kernel.seconds or crosses(call):
        return 0.0, 0.0
    if kernel.flop_seconds > kernel.bytes_seconds:
        return 0.0, 1.0
    memory = min(kernel.bytes_seconds / reached / kernel.seconds, 1.0)
    return memory, 1 - memory


class _Window(NamedTuple):
    """A time in which collectives take the same all the while."""

    begin: float
    end: float
    taken: Taken


class Windows:
    """The times in which collectives run, and when kernels end that run beside them."""

    def __init__(self, contention: Contention) -> None:
        self._contention = contention
        self._windows: list[_Window] = []  # none overlaps another; by time
        self._ends: list[float] = []

    @property
    def until(self) -> float:
        """The end of the last window."""
        return self._ends[-1] if self._ends else 0.0

    def add(self, call: int, begin: float, end: float) -> bool:
        """Add the time of a collective, by the index of its call; return whether it takes anything."""
        taken = self._contention.taken.get(call)
        if taken is None or end <= begin:
            return False
        first = bisect_right(self._ends, begin)
        last, pieces, at = first, list[_Window](), begin
        while last < len(self._windows) and self._windows[last].begin < end:
            one = self._windows[last]
            pieces.append(_Window(at, one.begin, taken))
            pieces.append(_Window(one.begin, begin, one.taken))
            pieces.append(_Window(max(one.begin, begin), min(one.end, end), one.taken + taken))
            pieces.append(_Window(end, one.end, one.taken))
            at = one.end
            last += 1
        pieces.append(_Window(at, end, taken))
        self._windows[first:last] = [piece for piece in pieces if piece.begin < piece.end]
        self._ends[first:last] = [piece.end for piece in pieces if piece.begin < piece.end]
        return True

    def end_of(self, call: int, begin: float, seconds: float) -> float:
        """Return when a kernel ends that begins then and would take ``seconds`` alone."""
        at, left = begin, seconds
        for place in range(bisect_right(self._ends, begin), len(self._windows)):
            one = self._windows[place]
            if one.begin >= at + left:
                break
            if one.begin > at:
                left -= one.begin - at
                at = one.begin
            slowdown = self._contention.slowdown(call, one.taken)
            if left * slowdown <= one.end - at:
                return at + left * slowdown
            left -= (one.end - at) / slowdown
            at = one.end
        return at + left


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
