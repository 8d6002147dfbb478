"""Workspaces of plans that cuDNN's library names only on a GPU, and which ``cudnn.benchmark`` tries there.

Engines for FFT and Winograd's method in fp32 are slow beside tensor cores, so that the heuristics rank them low, but
their workspaces are by far the largest. The sizes follow from the methods: each image and each filter of the
transformed tensors takes a plane of complex numbers, or all tiles of it. The last plan of each list is compiled when it
is made, and works on copies in channels-last layout.

Read off the plans that an H200's handle offered (cuDNN 9.19; lab/records/cudnn); assumed for other GPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainatomy.allocator.sizes import round_up
from trainatomy.operators.allocation.arguments import ceil_div

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind
    from trainatomy.operators.allocation.cudnn.heuristics import EnginePlan

_COMPLEX, _REAL = 8, 4
"""Bytes of a number in fp32."""
_SMALLEST, _LARGEST, _TILE = 16, 256, 32
"""Rows of the smallest and the largest FFT of a whole image, and of one of tiles."""
_GROUPS_AT_ONCE, _SMALLEST_OF_TILES = 8, 3
"""Groups that are transformed at once, and rows of the smallest filter of an FFT of tiles."""
_WINOGRAD_TILE, _WINOGRAD_ROWS = 4, 6
"""Rows of a tile of the result and of its transform, for filters of 3 x 3."""
WINOGRAD_IMAGES = 16
"""Images that Winograd's method in 16 bits fills up to, of forward and of the input gradient."""
_BESIDE = {2: {56, 76}}
"""Engines that cuDNN names for an input gradient where it also names an FFT, by the stride."""
_BESIDE_OF_OTHERS = {56}
_HEADER, _ALIGNED, _OF_COPY = 16, 64, 128
"""Bytes: added to a workspace with copies in another layout, alignment of buffers, added to a copy."""


@dataclass(frozen=True, slots=True)
class _Planes:
    """Images and filters that are transformed at once: those of at most eight groups."""

    filters: int
    inputs: int
    outputs: int

    @classmethod
    def of(cls, one: Convolution, channels: int | None = None, images: int | None = None) -> _Planes:
        """Count them; ``channels`` of the input of one group and ``images``, if not the convolution's own."""
        at_once = min(one.groups, _GROUPS_AT_ONCE)
        channels, outside = channels or one.channels, one.weight[0] // one.groups
        images = (images or one.data[0]) * at_once
        return cls(channels * outside * at_once, images * channels, images * outside)


def unnamed_workspaces(
    kind: Kind, one: Convolution, named: Sequence[EnginePlan], *, tf32: bool = True
) -> tuple[int, ...]:
    """Return the workspaces of the plans that cuDNN's library names on a GPU only, where it may name them.

    Whether it does is up to its heuristics, which leave out what they find slow. On an H200 they named an FFT for 81 of
    100 forward passes, 172 of 197 weight gradients and 87 of 94 input gradients without strides; with a stride of 2,
    for all 22 input gradients where they also named certain other engines (``named``) and for one of 10 others.

    Args:
        kind: The operation.
        one: The convolution.
        named: What the library names without a GPU; empty where it is not installed.
        tf32: Whether tensor cores may compute in fp32, as the plan that is compiled does.
    """
    sizes = [_generated(one)] if tf32 or one.dtype != torch.float32 else []
    beside = _BESIDE.get(max(one.strides), _BESIDE_OF_OTHERS)
    unfolds = not named or beside <= {plan.engine for plan in named if not plan.last}
    if one.dtype == torch.float32 and len(one.data) == 4 and max(one.dilation) == 1:
        if kind != "input gradient":
            sizes.append(of_whole_images(kind, one))
        elif unfolds or max(one.strides) == 1:
            sizes.append(by_tiles(one))
        if kind == "weight gradient":
            sizes.append(winograd(kind, one))
    return tuple(size for size in sizes if size)


def _generated(one: Convolution) -> int:
    """Return the workspace of the engine that is compiled when its plan is made: copies in channels-last layout."""
    if one.channels_last:
        return 0
    copied = [shape for shape in (one.data, one.weight, one.output) if math.prod(shape[2:]) > 1]
    return sum(math.prod(shape) * one.itemsize + _OF_COPY for shape in copied)


def of_whole_images(kind: Kind, one: Convolution) -> int:
    """Return the workspace of an FFT of padded images, 0 where there is none."""
    rows = max(places + 2 * padding for places, padding in zip(one.data[2:], one.padding, strict=True))
    size = max(_SMALLEST, 1 << (rows - 1).bit_length())
    if max(one.strides) > 1 or size > _LARGEST:
        return 0
    planes = _Planes.of(one)
    if kind == "forward":
        buffers, plain = max(planes.filters + planes.inputs, planes.outputs), planes.filters * one.taps
    else:
        buffers, plain = max(planes.filters, planes.inputs + planes.outputs), planes.outputs * math.prod(one.output[2:])
    return 2 * buffers * _plane(size) + round_up(plain * _REAL, _ALIGNED) + _copies(one, planes)


def by_tiles(one: Convolution) -> int:
    """Return the workspace of an FFT of tiles for the input gradient, 0 where there is none.

    Two rows of tiles are in work at once. With strides, the pixels between two steps become channels.
    """
    if one.weight[2] != one.weight[3] or one.weight[2] < _SMALLEST_OF_TILES or min(one.data[2:]) == 1:
        return 0
    folds = [_folded(one, dimension) for dimension in range(len(one.strides))]
    if all(fold.taps == 1 for fold in folds):  # a product of patches
        return 0
    strided = max(one.strides) > 1
    planes = _Planes.of(one, _unfolded_channels(one) if strided else None)
    at_once = 1 if all(fold.places + fold.taps - 1 <= _TILE for fold in folds) else 2
    transformed = (planes.filters + at_once * (planes.inputs + planes.outputs)) * _plane(_TILE)
    return transformed + (_unfolded(one, folds) if strided else _copies(one, planes))


@dataclass(frozen=True, slots=True)
class _Fold:
    """One dimension of a convolution with strides, written as one without: places, taps and places of the output."""

    places: int
    taps: int
    output: int


def _folded(one: Convolution, dimension: int) -> _Fold:
    stride, padding = one.strides[dimension], one.padding[dimension]
    places = ceil_div(one.data[2 + dimension], stride)
    taps = ceil_div(one.weight[2 + dimension] + -padding % stride, stride)
    return _Fold(places, taps, places + 2 * ceil_div(padding, stride) - taps + 1)


def _unfolded(one: Convolution, folds: Iterable[_Fold]) -> int:
    """Return the bytes of data, weight and output as those of a convolution without strides, channels-last."""
    places, taps, output = (
        math.prod(each) for each in zip(*((f.places, f.taps, f.output) for f in folds), strict=True)
    )
    inside = _unfolded_channels(one)
    data, weight = one.data[0] * one.groups * inside * places, one.weight[0] * inside * taps
    return (data + weight + one.output[0] * one.weight[0] * output) * _REAL + _HEADER


def _unfolded_channels(one: Convolution) -> int:
    """Return the channels of one group with the pixels between two steps."""
    return (one.filled(one.channels) if one.groups == 1 else one.channels) * math.prod(one.strides)


def winograd(kind: Kind, one: Convolution, images: int | None = None) -> int:
    """Return the workspace of Winograd's method, 0 where there is none.

    Args:
        kind: The operation; an input gradient has tiles of its result, others of the output.
        one: The convolution.
        images: The images that are transformed, if not those of the input.
    """
    if tuple(one.weight[2:]) != (3, 3) or max(one.strides) > 1 or one.channels_last:
        return 0
    tiled = one.data if kind == "input gradient" else one.output
    tiles = math.prod(ceil_div(places, _WINOGRAD_TILE) for places in tiled[2:])
    planes = _Planes.of(one, images=images)
    return (planes.filters + (planes.inputs + planes.outputs) * tiles) * _WINOGRAD_ROWS**2 * _REAL


def _copies(one: Convolution, planes: _Planes) -> int:
    """Return the bytes of copies in the layout that an FFT reads: groups apart, channels before places."""
    data, output = planes.inputs * math.prod(one.data[2:]), planes.outputs * math.prod(one.output[2:])
    if one.groups > 1:
        return sum(round_up(size * _REAL, _ALIGNED) + _ALIGNED for size in (data, output)) if one.data[0] > 1 else 0
    weight = planes.filters * one.taps if one.taps > 1 else 0
    return (data + weight + output) * _REAL + _HEADER if one.channels_last else 0


def _plane(rows: int) -> int:
    """Return the bytes of the transform of a square of real numbers."""
    return rows * (rows // 2 + 1) * _COMPLEX
