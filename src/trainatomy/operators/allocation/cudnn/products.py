"""Products (1x1 filters without strides or padding) that cuBLAS computes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trainatomy.operators.allocation.arguments import ceil_div
from trainatomy.operators.allocation.cudnn.ungrouped import product_bytes

if TYPE_CHECKING:
    from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind

_SUM, _MOST_SUMS = 4, 2**24
"""Bytes of a sum in fp32, and of the sums of a divided product at most."""
_TILE = 256, 128
"""Rows and columns of a tile, either way round."""
_SHORTEST_HALF = 1300
"""Pixels of the shortest sums in 16 bits."""


def bytes_in_cublas(kind: Kind, one: Convolution) -> int:
    """Return the workspace of a product in cuBLAS; a contiguous weight gradient has fp32 sums of each image."""
    if kind != "weight gradient":
        return product_bytes(one)
    sums = math.prod(one.weight) * _SUM
    return _divided(one) * sums if one.channels_last else one.data[0] * sums


def _divided(one: Convolution) -> int:
    """Return into how many parts cuBLAS divides the sums of a channels-last weight gradient, 0 where it does not.

    The tiles fill the multiprocessors once. Of 93 such products on an H200 about half of the bytes are met; the tiles
    that cuBLAS chooses are not known.
    """
    long, short = _TILE
    rows, columns = one.weight[0], one.channels
    tiles = min(ceil_div(rows, long) * ceil_div(columns, short), ceil_div(rows, short) * ceil_div(columns, long))
    parts = min(one.multiprocessors // tiles, _MOST_SUMS // (math.prod(one.weight) * _SUM))
    if one.is_half:
        parts = min(parts, one.places // _SHORTEST_HALF)
    return parts if parts > 1 else 0
