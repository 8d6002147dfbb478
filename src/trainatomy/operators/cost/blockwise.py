"""bitsandbytes' optimizers: a launch for each parameter.

With states in 8 bits, a block of 256 threads has 256 numbers, which share a scale for each state.  It reads what it
needs one after the other with barriers between (states, gradient, code books), finds the new scales by a reduction,
reads and writes the parameter, and looks each new state up in a code book of 256 by halving, in shared memory.  That is
a chain of waits; what a multiprocessor gets done follows from how many blocks it holds at a time, which the kernel's
registers limit.  The traffic alone would be a third of the time.

Sources: csrc/kernels.cu of bitsandbytes 0.45 to 0.50 (``kOptimizerStatic8bit2StateBlockwise``, ``quantize_2D``);
latencies: Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture"
(arXiv 2402.13499).  Not timed on a card.
"""

from __future__ import annotations

from math import ceil, log2

from trainatomy.operators.cost.traffic import moved, sized
from trainatomy.operators.cost.work import NOTHING, Chip, Work
from trainatomy.results.operations import Call

_BLOCK = 256
_BLOCKS_HELD = 4
"""Of 256 threads, at 64 registers each; the launch bounds promise 3 at least."""
_MEMORY_CYCLES, _SHARED_CYCLES, _REDUCTION_CYCLES = 600, 30, 150
_READS_IN_TURN = 3
"""Of memory: states and gradient, the parameter, and the barrier-separated rest of the loads."""
_HALVINGS = 6
"""Of the code book in shared memory; the first two are kept in registers."""
_CLOCK = 1.7e9
"""Cycles per second of cards since 2020 under load, roughly."""


def in_8_bits(call: Call, chip: Chip) -> Work:
    """Gradient, parameter, one or two states of a byte a number, code books, scales."""
    gradient = call.inputs[0]
    if gradient.on_host or not gradient.elements:
        return NOTHING
    states = max(sum(tensor.dtype == "uint8" for tensor in call.inputs), 1)
    of_each = 2 * _HALVINGS * _SHARED_CYCLES + _REDUCTION_CYCLES
    cycles = _READS_IN_TURN * _MEMORY_CYCLES + states * of_each
    rounds = ceil(ceil(gradient.elements / _BLOCK) / (chip.multiprocessors * _BLOCKS_HELD))
    traffic = moved(call)
    seconds = max(rounds * cycles / _CLOCK, traffic / (chip.bandwidth * 0.8))
    return Work("bitsandbytes.8", (log2(gradient.elements),), 0.0, "fp32", traffic, 1, seconds)


def in_32_bits(call: Call, chip: Chip) -> Work:
    """Nothing but traffic, as an element-wise kernel's."""
    traffic = moved(call)
    return sized("traffic.plain.32.bitsandbytes", chip, traffic) if traffic else NOTHING
