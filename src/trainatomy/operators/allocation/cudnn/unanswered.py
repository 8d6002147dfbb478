"""Convolutions for which cuDNN's library gives another answer without a driver than on a GPU.

Engines that ask the driver or cuBLAS whether they can run are missing from the answers without one: those that hand a
product to cuBLASLt, and those of depthwise convolutions in 16 bits. Of 1,614 operations that cuDNN ran on an H200
(9.19, benchmarks/cudnn/probe.py) some 120 ran in such an engine: nearly all products of forward and the input gradient,
two thirds of those of weight gradients. The plans that are named in their place tell whether one of them runs on Hopper
(``missing.py``); where they do not, and on other GPUs, the rules decide.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trainatomy.operators.allocation.cudnn import divided
from trainatomy.operators.allocation.cudnn.ungrouped import is_product
from trainatomy.operators.allocation.cudnn.weight_gradient import ALIGNED_ANYWAY, is_by_image, weight_gradient

if TYPE_CHECKING:
    from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind
    from trainatomy.operators.allocation.cudnn.heuristics import EnginePlan

_MOST_PARTS = 20_000_000
"""Partial sums of tiles of 256 x 256 on half of the multiprocessors, bytes."""


def is_unanswered(kind: Kind, one: Convolution) -> bool:
    """Return whether the engine that runs on a GPU is missing from the answers without a driver."""
    if one.groups > 1:
        return one.channels == 1 and one.weight[0] == one.groups and one.is_half and not one.transposed
    return one.is_plain_product and _runs_in_cublas(kind, one)


def missing_parts(kind: Kind, one: Convolution, plan: EnginePlan) -> int:
    """Return the bytes of partial sums by which a GPU's answer differs from that without a driver; negative: fewer.

    Where the tiles of the plan are known, the partial sums follow from them. Else the rules know them for weight
    gradients between many channels.
    """
    if divided.is_known(one, plan):
        return divided.missing_parts(kind, one, plan)
    if kind != "weight gradient" or one.groups > 1 or not plan.divides_sums:
        return 0
    missing = weight_gradient(one) - plan.workspace
    return missing if 0 < missing <= _MOST_PARTS else 0


def _runs_in_cublas(kind: Kind, one: Convolution) -> bool:
    """Return whether cuBLASLt computes a product; it sums a weight gradient image by image if all rows are aligned."""
    if kind != "weight gradient":
        return is_product(kind, one)
    places = math.prod(one.data[2:])
    return one.channels_last or ((places % 2 == 0 or places >= ALIGNED_ANYWAY) and is_by_image(one))
