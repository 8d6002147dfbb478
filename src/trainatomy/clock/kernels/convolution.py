"""Convolutions as cuDNN computes them: products of implicit matrices, with changes of layout where images come in
channel-first order.

FLOP: 2 x outputs x inputs of each (channels of a group x kernel's places); backward computes it once for the input's
gradient and once for the weight's (torch/utils/flop_counter.py).
"""

from __future__ import annotations

from math import log2, prod

from trainatomy.clock.kernels.reach import reach_of
from trainatomy.clock.kernels.work import HALVES, Chip, Work, number
from trainatomy.results.operations import Array, Call


def convolution(call: Call, chip: Chip) -> Work:
    """``convolution`` and ``convolution_backward``."""
    backward = "backward" in call.name
    out, x, weight = call.inputs[:3] if backward else (call.outputs[0], *call.inputs[:2])
    times, wanted = _wanted(call, backward)
    groups = int(number(call, "groups", "1"))
    flop = 2.0 * out.elements * prod(weight.shape[1:]) * times
    depthwise = groups > 1 and weight.shape[1] == 1
    rate = "fp32" if depthwise else chip.precision(x.dtype, chip.cudnn_tf32)
    traffic = _traffic(out, x, weight, wanted)
    kind = "depthwise" if depthwise else "pointwise" if prod(weight.shape[2:]) == 1 else "spatial"
    way = "backward" if backward else "forward"
    precision = "half" if x.dtype in HALVES else rate
    family = f"convolution.{way}.{precision}.{kind}.{len(weight.shape) - 2}d"
    reach = reach_of(family)
    seconds = reach.kernel_seconds * times + flop / (chip.rate(rate) * reach.share) + traffic / chip.bandwidth
    features = (log2(max(flop, 1)), log2(traffic), log2(x.shape[1]), log2(weight.shape[0]))
    return Work(family, features, flop, rate, traffic, 3 * max(times, 1) + 1, seconds)


def _wanted(call: Call, backward: bool) -> tuple[int, list[bool]]:
    """How many products, and which of input and weight get a gradient."""
    if not backward:
        return 1, []
    mask = [part.strip(" []") == "True" for part in number(call, "output_mask", "[True, True, True]").split(",")]
    return sum(mask[:2]), mask


def _traffic(out: Array, x: Array, weight: Array, wanted: list[bool]) -> float:
    if not wanted:
        return out.bytes + x.bytes + weight.bytes
    for_input = out.bytes + weight.bytes + x.bytes if wanted[0] else 0
    for_weight = out.bytes + x.bytes + weight.bytes if wanted[1] else 0
    return for_input + for_weight + (out.bytes if wanted[2:3] == [True] else 0)
