"""Workspaces of forward and of the input gradient, for convolutions of one group.

cuDNN does one of:

- *transform*: engines work on channels-last data; contiguous data, weight and output are copied once each (tensors of
  one pixel are the same in both layouts), with 16 bytes more; channels are padded to 16 bytes. The usual case.
- *direct*: a kernel that reads contiguous tensors, without workspace: few channels, short sums, small results.
- *product*: a 1x1 convolution without strides or padding is a matrix product: (next to) nothing.

Engines for many results ("wide") need 131 bytes more. Left out: sums split among multiprocessors, FFT and Winograd,
seen in one of ten random cases, with no rule found for when.

Workspace of the weight gradient, for convolutions of one group.

The gradient is a matrix product: K rows by C·taps columns, each summed over all pixels of the output. Layouts are
transformed as for the other operations; long sums are split into parts on multiprocessors that would be idle, with fp32
sums of their own. The copies are exact; the number of parts is known for 3x3 filters between channels in multiples of
64 and for colour images, and a typical number elsewhere.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from trainatomy.allocator.blocks import round_up
from trainatomy.operators.allocation.cudnn.convolution import HEADER, OF_WIDE
from trainatomy.operators.allocation.plan import ceil_div

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


_SUM = 4
"""Bytes of a partial sum, of any type."""
_MEBI = 2**20
_TILE, _OF_PARTS, _BYTES_PER_PART = 64, 159, 4
_OF_PADDED_PARTS = 128
_PARTS_OF_STEM, _PADDED_STEM = 8, 4
_THIN, _LARGE_IMAGE = 40, 3000
"""Channels of the input, and pixels, that fp32 and volumes are transformed for."""
_THIN_ROWS, _MANY_SUMMED_IMAGES = 16, 64
_LITTLE_WASTE, _WASTE = 2, 2.8
"""Largest ratio of the bytes of all images' sums to those of a copy: in 16 bits, and in fp32."""
_SMALL_SUMMED_IMAGE, _WASTE_OF_SMALL = 49, 25
"""Pixels of images with more of such sums, and their bytes for each element that is read."""
ALIGNED_ANYWAY = 100
"""Pixels from which a weight gradient is summed image by image with unaligned rows, too."""
_SMALL_FILTER = 16
"""Positions up to which fp32 colour images are read in place."""
_WIDELY_DILATED, _DILATED_PARTS = 8, 8
"""Dilations of 12 to 36 run in another engine in fp32 (seen in one network)."""
_MOST_SPLIT_ROWS, _MANY_PLACES = 256, 3000


def weight_gradient(one: Convolution) -> int:
    """Return the bytes of workspace."""
    sums = math.prod(one.weight) * _SUM
    if one.channels_last:
        turned = not one.is_half and one.taps >= 25 and one.places > 100 and one.products > 10**9
        unfilled = one.channels % one.fill != 0
        if not turned and (not one.is_half or one.taps == 1 or unfilled):
            return 0
        moved = _both(one) + HEADER if turned else 0
    else:
        if one.is_plain_product and is_by_image(one):
            return one.data[0] * sums
        if not one.is_half and _is_winograds(one) and not _is_known(one):
            tiles = one.data[0] * math.prod(ceil_div(size, 4) for size in one.output[2:])
            rows, columns = one.weight[0], one.channels
            return 6 * 6 * _SUM * (rows * columns + tiles * (rows + columns))
        if not one.is_half and one.is_plain_product and len(one.data) == 4 and _is_thin(one):
            return _thin_product(one)
        if one.is_stem:
            return _stem_gradient(one)
        if _is_in_place(one):
            counters = 8 * ceil_div(one.weight[0], 32) * ceil_div(one.length, 32)
            return counters if not one.is_half and counters >= 8 * 120 and one.products < 10**8 else 0
        moved = transformed(one)
        if one.is_plain_product and len(one.data) == 5 and 4 < min(one.channels, one.weight[0]) <= 44:
            moved += _both(one)  # volumes of few channels are turned twice
    if one.is_half and one.taps >= 49 and min(one.channels, one.weight[0]) >= 300:
        # One engine reads every layout; its fp32 sums are rounded at the end.
        return sums + 8 * ceil_div(one.weight[0], 32) * ceil_div(one.length, 32) + HEADER
    return moved + _parts(one, sums)


def _both(one: Convolution) -> int:
    return (math.prod(one.data) + math.prod(one.output)) * one.itemsize


def is_by_image(one: Convolution) -> bool:
    """Return whether a contiguous product is one per image, with fp32 sums, unless that is wasteful."""
    places = math.prod(one.data[2:])
    images, inside, outside = one.data[0], one.channels, one.weight[0]
    sums, moved = images * inside * outside * _SUM, images * (inside + outside) * places * one.itemsize
    if not one.is_half:
        return sums <= _WASTE * moved and not (_is_thin(one) and images < _MANY_SUMMED_IMAGES)
    if places == 1 or (_is_thin(one) and len(one.data) == 5):
        return False
    if places < _SMALL_SUMMED_IMAGE:
        return sums <= _WASTE_OF_SMALL * images * (inside + outside) * places
    return sums <= _LITTLE_WASTE * moved


def _is_thin(one: Convolution) -> bool:
    """Return whether the images are large and have few channels."""
    return one.channels <= _THIN and math.prod(one.data[2:]) >= _LARGE_IMAGE


def _thin_product(one: Convolution) -> int:
    """Return the bytes in fp32: input and output are copied, and the sum is divided in tiles of 16 x 64.

    The parts of up to 9 tiles were 17 to 67; half of the multiprocessors for one tile, and all of them for more, are
    typical.
    """
    tiles = ceil_div(one.weight[0], _THIN_ROWS) * ceil_div(one.channels, _TILE)
    parts = max(1, min(one.multiprocessors // 2, one.multiprocessors // tiles))
    sums = parts * tiles * _THIN_ROWS * _TILE * _SUM
    return _both(one) + HEADER + sums + _OF_PARTS + _BYTES_PER_PART * (parts + 1) * tiles


def _is_winograds(one: Convolution) -> bool:
    """Return whether Winograd's method runs, on tiles of 4x4: small fp32 images under a 3x3 filter."""
    usual = tuple(one.weight[2:]) == (3, 3) and max(one.strides) == max(one.dilation) == 1
    small = min(one.output[2:]) >= 8 and max(one.output[2:]) <= 20 and one.places <= 4096
    return usual and small and min(one.channels, one.weight[0]) >= 32


def _is_in_place(one: Convolution) -> bool:
    """Return whether there is too little work for a change of layout: NCHW is read as it is."""
    size, read, written = math.prod(one.weight), math.prod(one.data), math.prod(one.output)
    if not one.is_half:
        thin = one.length <= 26 or (written <= 18_000 and read <= 4_000_000)
        return one.products < 18_000_000 or thin
    return read + written + size <= 150_000 and ceil_div(one.weight[0], 64) * ceil_div(one.length, 64) <= 4


def transformed(one: Convolution) -> int:
    """Return the bytes of data, weight and output in channels-last layout, channels padded to 16 bytes."""
    inside, outside, total = one.filled(one.channels), one.filled(one.weight[0]), 0
    shapes = ((one.data, one.data[0] * inside), (one.weight, outside * inside), (one.output, one.output[0] * outside))
    for shape, padded in shapes:
        places = math.prod(shape[2:])
        is_same = places == 1 and math.prod(shape) == padded  # of one place, both layouts are the same
        total += 0 if is_same else padded * places
    return total * one.itemsize + HEADER


def _stem_gradient(one: Convolution) -> int:
    """Return the bytes for colour images.

    Data, weight and output are padded, and the sum is split into parts of the weight's type; in fp16, where filters
    overlap and stride, padded to 4 channels, those of volumes to 8, with typically eight parts in fp32. Small filters
    of fp32 images are computed in place.
    """
    if one.dtype == torch.float16 and overlaps(one):
        parts = _PARTS_OF_STEM * one.weight[0] * _PADDED_STEM * one.taps * _SUM
        inside = _PADDED_STEM if len(one.data) < 5 else one.fill
        elements = one.data[0] * inside * math.prod(one.data[2:]) + one.weight[0] * inside * one.taps
        copies = (elements + math.prod(one.output)) * one.itemsize + HEADER
        return copies + parts + _OF_PARTS + _BYTES_PER_PART * one.multiprocessors
    if not one.is_half and len(one.data) == 4 and one.taps <= _SMALL_FILTER:
        return 0
    inside = one.filled(one.channels)
    weight = one.weight[0] * inside * one.taps * one.itemsize
    data, output = one.data[0] * inside * math.prod(one.data[2:]), math.prod(one.output)
    moved = (data + output) * one.itemsize + (weight if one.taps > 1 else 0) + HEADER
    tiles = ceil_div(one.weight[0], _TILE) * ceil_div(weight // one.weight[0], 512)
    parts = one.multiprocessors // tiles
    if parts <= 1:
        return moved + (0 if one.is_half else _OF_PADDED_PARTS)
    return moved + parts * weight + _OF_PADDED_PARTS


def _parts(one: Convolution, sums: int) -> int:
    """Return the bytes of the parts of a split sum, or of the tile counters of an unsplit one."""
    if _is_known(one) and (one.is_half or max(one.dilation) <= _WIDELY_DILATED):
        return _known_parts(one, sums)
    if one.taps == 1 and not one.is_half and not one.is_plain_product:
        parts = one.multiprocessors // (ceil_div(one.weight[0], 128) * ceil_div(one.length, _TILE))
        return parts * sums if parts > 1 else 0
    return _typical_parts(one, sums) or _counters(one)


def _is_known(one: Convolution) -> bool:
    """Return whether it is a 3x3 filter between channels in multiples of 64, over many pixels."""
    in_tiles = one.channels % _TILE == one.weight[0] % _TILE == 0
    return tuple(one.weight[2:]) == (3, 3) and in_tiles and one.places > _MANY_PLACES


def _known_parts(one: Convolution, sums: int) -> int:
    """Return as many parts as fit on the multiprocessors at once; more than 256 rows are not split."""
    if one.weight[0] > _MOST_SPLIT_ROWS:
        return OF_WIDE if math.prod(one.weight) > 2_000_000 else 0
    tiles = ceil_div(one.length, _TILE)
    parts = one.multiprocessors // tiles
    kept = parts - 1 if one.is_half else parts
    return kept * sums + _OF_PARTS + _BYTES_PER_PART * parts * tiles if parts > 1 else 0


def _typical_parts(one: Convolution, sums: int) -> int:
    if one.taps >= 49:
        split = one.is_half and one.weight[0] <= 72 and one.places > 4000
        return min(16, 128 * _MEBI // sums) * sums if split else 0
    if not one.is_half and max(one.dilation) > _WIDELY_DILATED:
        return _DILATED_PARTS * sums
    if not one.is_half:
        tiles = ceil_div(one.weight[0], 128) * ceil_div(one.length, 128)
        parts = min(one.multiprocessors // tiles, one.places // 700)
        return parts * sums + 128 if parts > 1 else 0
    few = ceil_div(one.weight[0], _TILE) * ceil_div(one.length, _TILE) <= 36
    return 2 * _MEBI if one.places > 10_000 and few else 0


def _counters(one: Convolution) -> int:
    """Return the bytes of the counters of an unsplit sum's tiles (256 rows by 64 columns)."""
    rows = one.weight[0]
    if one.taps < 30:
        return OF_WIDE if math.prod(one.weight) > 3_800_000 else 0
    if one.is_half and (rows <= 112 or one.products < 460_000_000):
        return 0
    return 128 + 4 * ceil_div(rows, 256) * ceil_div(one.length, 64 if rows > 64 else 128)
