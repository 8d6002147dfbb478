"""Workspaces of plans that cuDNN's library names only on a GPU, and which ``cudnn.benchmark`` tries there.

Engines for FFT and Winograd's method in fp32 are slow beside tensor cores, so that the heuristics rank them low, but
their workspaces are by far the largest. The sizes follow from the methods: each image and each filter of the
transformed tensors takes a plane of complex numbers, or all tiles of it. The last plan of each list is compiled when it
is made, and works on copies in channels-last layout.

Read off the plans that an H200's handle offered (cuDNN 9.19; benchmarks/cudnn/records); assumed for other GPUs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from trainatomy.operators.allocation.arguments import ceil_div, round_up
from trainatomy.operators.allocation.cudnn.weight_gradient import transformed

if TYPE_CHECKING:
    from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind

_COMPLEX, _REAL = 8, 4
"""Bytes of a number in fp32."""
_SMALLEST, _LARGEST, _TILE = 16, 256, 32
"""Rows of the smallest and the largest FFT of a whole image, and of one of tiles."""
_WINOGRAD_TILE, _WINOGRAD_NUMBERS = 4, 36
"""Pixels in a row of a tile of the result, and numbers of a transformed tile (6 x 6)."""
_ALIGNED = 64
_OF_COPY = 128
"""Additional bytes of a copy in channels-last layout."""


def unnamed_workspaces(kind: Kind, one: Convolution) -> tuple[int, ...]:
    """Return the workspaces of the plans that cuDNN's library names on a GPU only."""
    sizes = [_generated(one)]
    if one.dtype == torch.float32 and len(one.data) == 4 and not one.channels_last and max(one.dilation) == 1:
        sizes.append(_by_tiles(one) if kind == "input gradient" else _of_whole_images(kind, one))
        if kind == "weight gradient":
            sizes.append(_winograd(one))
    return tuple(size for size in sizes if size)


def _generated(one: Convolution) -> int:
    """Return the workspace of the engine that is compiled when its plan is made: copies in channels-last layout."""
    if one.channels_last:
        return 0
    copied = [shape for shape in (one.data, one.weight, one.output) if math.prod(shape[2:]) > 1]
    return sum(math.prod(shape) * one.itemsize + _OF_COPY for shape in copied)


def _of_whole_images(kind: Kind, one: Convolution) -> int:
    """Return the workspace of an FFT of padded images, 0 where cuDNN offers none."""
    rows = max(places + 2 * padding for places, padding in zip(one.data[2:], one.padding, strict=True))
    size = max(_SMALLEST, 1 << (rows - 1).bit_length())
    if max(one.strides) > 1 or one.taps == 1 or size > _LARGEST:
        return 0
    filters, inputs, outputs = math.prod(one.weight[:2]), math.prod(one.data[:2]), math.prod(one.output[:2])
    if kind == "forward":
        planes, plain = max(filters + inputs, outputs), math.prod(one.weight)
    else:
        planes, plain = max(filters, inputs + outputs), math.prod(one.output)
    return 2 * planes * _plane(size) + round_up(plain * _REAL, _ALIGNED)


def _by_tiles(one: Convolution) -> int:
    """Return the workspace of an FFT of tiles for the input gradient.

    Strides turn the pixels between two steps into channels (``_unfolded``); two rows of tiles are in work at once.
    """
    strided = max(one.strides) > 1
    if one.taps == 1 or one.groups > 1 or len(set(one.strides)) > 1 or max(one.strides) > 2:
        return 0
    channels = one.filled(one.channels) * math.prod(one.strides) if strided else one.channels
    kernel = max(ceil_div(size - 1, stride) + 1 for size, stride in zip(one.weight[2:], one.strides, strict=True))
    side = max(ceil_div(places, stride) for places, stride in zip(one.data[2:], one.strides, strict=True))
    at_once = 1 if side + kernel - 1 <= _TILE else 2
    images = one.data[0] * (channels + one.weight[0])
    extra = _unfolded(one, channels) if strided else 0
    return (channels * one.weight[0] + at_once * images) * _plane(_TILE) + extra


def _unfolded(one: Convolution, channels: int) -> int:
    """Return the bytes of the tensors in channels-last layout with the pixels of a stride as channels."""
    taps = math.prod(ceil_div(size - 1, stride) + 1 for size, stride in zip(one.weight[2:], one.strides, strict=True))
    filters = one.weight[0] * (channels * taps - one.filled(one.channels) * one.taps) * _REAL
    return transformed(one) + filters


def _winograd(one: Convolution) -> int:
    """Return the workspace of Winograd's method for the weight gradient of a 3 x 3 filter."""
    if tuple(one.weight[2:]) != (3, 3) or max(one.strides) > 1 or one.groups > 1:
        return 0
    tiles = math.prod(ceil_div(places, _WINOGRAD_TILE) for places in one.output[2:])
    images = one.data[0] * (one.channels + one.weight[0])
    return (math.prod(one.weight[:2]) + images * tiles) * _WINOGRAD_NUMBERS * _REAL


def _plane(rows: int) -> int:
    """Return the bytes of the transform of a square of real numbers."""
    return rows * (rows // 2 + 1) * _COMPLEX
