"""Workspaces of forward and of the input gradient, for convolutions of one group.

cuDNN does one of:

- *transform*: engines work on channels-last data; contiguous data, weight and output are copied once each (tensors of
  one pixel are the same in both layouts), with 16 bytes more; channels are padded to 16 bytes. The usual case.
- *direct*: a kernel that reads contiguous tensors, without workspace: few channels, short sums, small results.
- *product*: a 1x1 convolution without strides or padding is a matrix product: (next to) nothing.

Engines for many results ("wide") need 131 bytes more. Left out: sums split among multiprocessors, FFT and Winograd,
seen in one of ten random cases, with no rule found for when.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from trainatomy.allocator.sizes import round_up
from trainatomy.operators.allocation.cudnn.convolution import HEADER, OF_WIDE

if TYPE_CHECKING:
    from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind

_OF_PRODUCT, _LARGE_PRODUCT = {4: 400, 2: 272}, 80_000_000
"""Workspace of a product by type, and the bytes it must move to need one."""
# Thresholds between the engines: lengths of sums, entries of tensors, multiplications, results for each multiprocessor.
_SHORT_SUM, _LONG_SUM, _FEW_WEIGHTS, _FEW_RESULTS = 576, 700, 23_000, 97_000
_FEW_PRODUCTS_FORWARD, _FEW_PRODUCTS, _SOME_PRODUCTS = 20_000_000, 50_000_000, 2_000_000_000
_WIDE_FORWARD, _WIDE_GRADIENT, _WIDE_STRIDED, _TAPS_OF_WIDE = 30_000, 22_500, 7_500, 40
_TOO_MANY_PRODUCTS = 20_000_000_000
_UNEVEN_HALF, _UNEVEN, _MANY_BETWEEN, _MORE_BETWEEN = 70_000_000, 240_000_000, 90_000, 240_000
_MOST_BETWEEN, _SOME_PLACES = 2**20, 500
_MANY_IMAGES, _SMALL_HALF_IMAGE, _SMALL_IMAGE = 64, 1.5, 4  # weights for each number that an image has before and after
_LARGE_FILTER, _LARGER_FILTER = 49, 144
_NEAR, _ALIGNED_FILTERS = 2, 8
_STEM_FILTERS, _STEM_PRODUCTS, _OVERLAPPING_STEM = 384, 200_000_000, 5


def forward(one: Convolution) -> int:
    """Return the bytes of workspace."""
    if is_product("forward", one):
        return product_bytes(one)
    if one.is_stem and not one.channels_last and (len(one.data) < 5 or overlaps(one)):
        return _stem(one)
    if not one.channels_last and _is_direct_forward(one):
        return 0
    data, weight, output = _transformed(one)
    without_output = data + weight + HEADER
    wide = OF_WIDE if _is_wide_forward(one) else 0
    if one.channels_last:
        copied = one.is_stem or (not one.is_half and one.taps >= _LARGE_FILTER)
        return without_output if copied else wide
    if math.prod(one.output[2:]) == 1 or (not one.is_half and _writes_output(one)):
        return without_output
    return without_output + output + wide


def input_gradient(one: Convolution) -> int:
    """Return the bytes of workspace."""
    if is_product("input gradient", one):
        return product_bytes(one)
    if not one.channels_last and not one.is_half and _is_direct_gradient(one):
        return 0
    data, weight, output = _transformed(one)
    if one.is_half and math.prod(one.output[2:]) == 1:
        output = 0
    wide = OF_WIDE if _is_wide_gradient(one) else 0
    if one.channels_last:
        if not one.is_half and one.taps >= _LARGER_FILTER:
            return weight + output + HEADER
        return data + weight + output + HEADER if one.is_stem else wide
    return data + weight + output + HEADER + wide


def is_product(kind: Kind, one: Convolution) -> bool:
    """Return whether forward or the input gradient is a matrix product of cuBLAS.

    Not so where rows are unaligned (an odd number of pixels) and there is much to compute between many channels: in
    fp32, if the images are small beside the weights. In 16 bits that holds forward alone; the gradient is none of
    cuBLAS where many images are small beside the weights, in fp32 between the most channels.
    """
    if not one.is_plain_product or one.channels_last:
        return one.is_plain_product
    places, between = math.prod(one.data[2:]), one.channels * one.weight[0]
    weights = between / (places * (one.channels + one.weight[0]))
    if one.is_half and kind == "input gradient":
        return one.data[0] <= _MANY_IMAGES or weights <= _SMALL_HALF_IMAGE
    if kind == "input gradient" and between >= _MOST_BETWEEN and one.places > _SOME_PLACES:
        return False
    if places % 2 == 0 or min(one.data[2:]) == 1:
        return True
    many = between >= (_MANY_BETWEEN if kind == "forward" else _MORE_BETWEEN)
    if one.is_half:
        return not (many and one.products >= _UNEVEN_HALF)
    fits = one.channels % 32 == one.weight[0] % 32 == 0
    return not (many and fits and one.products >= _UNEVEN and weights > _SMALL_IMAGE)


def product_bytes(one: Convolution) -> int:
    """Return the bytes of workspace of a product in cuBLAS."""
    moved = (math.prod(one.data) + math.prod(one.output)) * one.itemsize
    return _OF_PRODUCT[one.itemsize] if moved > _LARGE_PRODUCT else 0


def _transformed(one: Convolution) -> tuple[int, int, int]:
    """Return the bytes of data, weight and output in the other layout, their channels padded.

    A 1x1 weight is the same in both layouts.
    """
    inside, outside = one.filled(one.channels), one.filled(one.weight[0])
    data = one.data[0] * inside * math.prod(one.data[2:])
    weight = outside * inside * one.taps if one.taps > 1 else 0
    output = one.output[0] * outside * math.prod(one.output[2:])
    return data * one.itemsize, weight * one.itemsize, output * one.itemsize


def overlaps(one: Convolution) -> bool:
    """Return whether filters of five positions and more overlap and have a stride."""
    return one.weight[-1] >= _OVERLAPPING_STEM and 1 < max(one.strides) < one.weight[-1]


def _stem(one: Convolution) -> int:
    """Return the bytes for colour images.

    They are transformed by filters that overlap and stride, as in ResNets, and in 16 bits by many filters, as in vision
    transformers; else direct. 16 bits pad the channels, fp16 to 4 where filters overlap. Volumes, and fp16 with steps
    of more than two pixels, do not pad them; fp32 with such steps, volumes in bf16 and those of unaligned filters are
    direct.
    """
    is_volume, far = len(one.data) == 5, max(one.strides) > _NEAR
    if (is_volume and (one.dtype == torch.bfloat16 or one.weight[0] % _ALIGNED_FILTERS)) or (far and _is_single(one)):
        return 0
    many = one.is_half and one.weight[0] >= _STEM_FILTERS and one.products >= _STEM_PRODUCTS
    if not (overlaps(one) or many):
        return 0
    overlapping = one.dtype == torch.float16 and list(one.strides) != list(one.weight[2:])
    inside = round_up(one.channels, 4 if overlapping else one.fill) if one.is_half else one.channels
    if is_volume or (overlapping and far):
        inside = one.channels
    data = one.data[0] * inside * math.prod(one.data[2:])
    return (data + one.weight[0] * inside * one.taps + math.prod(one.output)) * one.itemsize + HEADER


def _is_single(one: Convolution) -> bool:
    """Return whether the type is fp32 and filters overlap."""
    return not one.is_half and overlaps(one)


def _is_direct_forward(one: Convolution) -> bool:
    """Return whether a kernel without workspace runs on contiguous tensors."""
    if one.is_half:
        return one.channels <= 8 and math.prod(one.weight) <= _FEW_WEIGHTS
    return one.length <= _LONG_SUM and one.products < _FEW_PRODUCTS_FORWARD


def _is_direct_gradient(one: Convolution) -> bool:
    """Return whether fp32's gradient runs without workspace."""
    if one.is_stem and len(one.data) < 5:
        return True
    small = math.prod(one.data) <= _FEW_RESULTS and one.products < _SOME_PRODUCTS
    return one.products < _FEW_PRODUCTS or small


def _writes_output(one: Convolution) -> bool:
    """Return whether an fp32 engine writes contiguous output directly.

    Short sums along one dimension, of channels that no tile fits, or of just one tile for few filters; little work.
    """
    of_tile = one.channels == 64 and one.weight[0] in (64, 128) and one.products < _TOO_MANY_PRODUCTS
    unfit = (one.channels % 16 != 0 and one.weight[0] >= 128) or of_tile
    is_row = len(one.data) == 4 and one.data[2] == 1
    if len(one.data) == 5 and min(one.weight[2:]) < max(one.weight[2:]):  # filters of a plane or a line
        return True
    return ((unfit or is_row) and one.length <= _SHORT_SUM) or one.products < _FEW_PRODUCTS


def _is_wide_forward(one: Convolution) -> bool:
    """Return whether there are enough results per multiprocessor for the engines with wide tiles."""
    results = math.prod(one.output) / one.multiprocessors
    fits = one.is_half or one.filled(one.channels) % 16 == 0
    return results > _WIDE_FORWARD and fits and one.taps < _TAPS_OF_WIDE


def _is_wide_gradient(one: Convolution) -> bool:
    inside = one.filled(one.channels)
    results = math.prod(one.data) // one.channels * inside / one.multiprocessors
    if max(one.strides) == 1:
        return results > _WIDE_GRADIENT
    return max(one.strides) == 2 and (not one.is_half or results > _WIDE_STRIDED)
