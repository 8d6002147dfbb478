"""Convolutions for which cuDNN's library gives another answer without a driver than on a GPU.

Engines that ask the driver or cuBLAS whether they can run are missing from the answers without one: those that hand a
product to cuBLASLt, and those of depthwise convolutions in 16 bits. Of 1,614 operations that cuDNN ran on an H200
(9.19, benchmarks/cudnn/probe.py) some 120 ran in such an engine: nearly all products of forward and the input gradient,
two thirds of those of weight gradients. The rules decide there, and are wrong about every fourth of these weight
gradients. Engines for Winograd's method and FFT are missing too; 16 operations ran in them. Everything else ran in the
engine that is named without a driver.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trainatomy.operators.allocation.arguments import ceil_div
from trainatomy.operators.allocation.cudnn.heuristics import CLUSTER_KNOB
from trainatomy.operators.allocation.cudnn.ungrouped import is_product
from trainatomy.operators.allocation.cudnn.weight_gradient import is_by_image, weight_gradient

if TYPE_CHECKING:
    from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind
    from trainatomy.operators.allocation.cudnn.heuristics import EnginePlan

_ALIGNED_ANYWAY = 100
"""Pixels from which a weight gradient is summed image by image with unaligned rows, too."""
_DIVIDING, _TILE_KNOB, _SUM = (65, 68), 2, 4
"""Engines of weight gradients on Hopper, ``CUDNN_KNOB_TYPE_TILE_SIZE``, and bytes of a sum."""
_TILES = {0: (128, 128), 1: (128, 64), 3: (128, 256), 4: (64, 256), 5: (64, 64), 7: (64, 128), 9: (256, 64)}
"""Rows and columns of their tiles, read off the sizes of partial sums that were measured on an H200."""
_MOST_PARTS = 20_000_000
"""Partial sums of tiles of 256 x 256 on half of the multiprocessors, bytes."""


def is_unanswered(kind: Kind, one: Convolution) -> bool:
    """Return whether the engine that runs on a GPU is missing from the answers without a driver."""
    if one.groups > 1:
        return one.channels == 1 and one.weight[0] == one.groups and one.is_half and not one.transposed
    return one.is_plain_product and _runs_in_cublas(kind, one)


def missing_parts(kind: Kind, one: Convolution, plan: EnginePlan) -> int:
    """Return the bytes of partial sums that the answer without a driver leaves out.

    How many blocks of a cluster run at once is known to the driver only. Without it, a kernel that divides sums among
    them says that it needs fewer partial sums. Where the size of its tiles is known, the parts follow from it; else the
    rules know them for weight gradients between many channels.
    """
    if kind != "weight gradient" or one.groups > 1 or not plan.divides_sums:
        return 0
    tile = _TILES.get(dict(plan.knobs).get(_TILE_KNOB, -1)) if plan.engine in _DIVIDING else None
    if tile is not None:
        return _parts(one, plan, tile) * math.prod(tile) * _SUM
    missing = weight_gradient(one) - plan.workspace
    return missing if 0 < missing <= _MOST_PARTS else 0


def _parts(one: Convolution, plan: EnginePlan, tile: tuple[int, int]) -> int:
    """Return the number of partial sums of tiles that blocks divide among them.

    Tiles that fill the multiprocessors, or leave less than half of them idle in the last round, are not divided
    (CUTLASS, ``get_num_sk_tiles`` of include/cutlass/gemm/kernel/tile_scheduler_params.h). Others are divided into as
    many parts as fit at once, unless the sums are short.
    """
    knobs = dict(plan.knobs)
    across, along = knobs[CLUSTER_KNOB], knobs[CLUSTER_KNOB + 1]
    at_once = one.multiprocessors // (across * along) * across * along
    rows, columns = ceil_div(one.weight[0], tile[0] * across), ceil_div(one.length, tile[1] * along)
    tiles, most = rows * columns * across * along, one.places // (1024 if one.is_half else 512)
    if at_once == 0 or most < 2 or tiles % at_once == 0 or 2 * (tiles % at_once) >= at_once:
        return 0
    if tiles > at_once:
        return at_once
    parts = min(at_once // tiles, most)
    return parts * tiles if parts > 1 else 0


def _runs_in_cublas(kind: Kind, one: Convolution) -> bool:
    """Return whether cuBLASLt computes a product; it sums a weight gradient image by image if all rows are aligned."""
    if kind != "weight gradient":
        return is_product(kind, one)
    places = math.prod(one.data[2:])
    return one.channels_last or ((places % 2 == 0 or places >= _ALIGNED_ANYWAY) and is_by_image(one))
