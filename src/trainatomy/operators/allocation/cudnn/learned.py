"""Workspaces of convolutions, by decision trees that were learned from cuDNN's own answers.

What each of cuDNN's methods needs follows from the shapes (``methods``). Which one its heuristics choose is looked up
in a tree of comparisons of sizes, one for each operation, type, layout and form of filter. cuDNN compares not only the
sizes, but also what is left over where tiles do not divide a matrix, so that a choice changes from one batch to the
next. The trees are in ``catalog/cudnn_rules.json``, written by benchmarks/cudnn/learned_rules.py.

Bytes of workspace of each of cuDNN's methods for a convolution, by the method's name.

cuDNN's heuristics choose among few kinds of engines: those that read tensors as they are, those that work on copies in
channels-last layout, and those that also divide sums, into parts of the result or among multiprocessors. What a kind
needs follows from the shapes; names say what they divide into:

========================= ======================================================================================
``none``                  nothing
``copies``                data, weight and output in channels-last layout; ``copies wide``: of engines with wide tiles
``copies twice``          two such copies of each
``data+weight``, ...      copies of some of the tensors
``divided 128x64 1x3``    copies, and sums of tiles divided among multiprocessors: tile, and blocks of a cluster
``split 8``               copies, and as many fp32 sums of the whole gradient of the weight
``sums 8 64x64``          copies, and as many fp32 sums of the result, in tiles of that size
``stem 8``                copies of colour images with four channels, and as many sums of the weight's type
``images``                an fp32 sum of the weight's gradient for each image
``parts 64x64 1``         fp32 sums that fill the multiprocessors so many times
``padded``, ``by group``  copies of groups (see ``copies``)
``engine 7``              what an engine needs that is missing without a driver (see ``missing``)
========================= ======================================================================================
"""

from __future__ import annotations

import json
import math
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from trainatomy.allocator.blocks import round_up
from trainatomy.catalog.files import read_text
from trainatomy.lookup import leaf
from trainatomy.operators.allocation.cudnn.copies import (
    HEADER,
    copied_by_group,
    copies,
    padded,
    padded_width,
    transformed,
)
from trainatomy.operators.allocation.cudnn.missing import missing_workspace
from trainatomy.operators.allocation.cudnn.unnamed import divided_bytes, has_tiles, tiles_and_terms
from trainatomy.operators.allocation.plan import ceil_div

if TYPE_CHECKING:
    from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind


_OF_WIDE = 131
"""Additional bytes of engines with wide tiles."""
_SUM = 4
"""Bytes of a partial sum."""
_OF_SPLIT, _OF_STEM = 128, 159
"""Bytes that sums of the whole weight need besides."""
_STEM_CHANNELS = 4
"""Channels that colour images are padded to."""
_OF_COPIES_TWICE = 115


def bytes_of(method: str, kind: Kind, one: Convolution) -> int | None:
    """Return the bytes that a method needs; None where it cannot run the call."""
    name, *numbers = method.split(" ")
    if name == "divided":
        return _divided(kind, one, _pair(numbers[0]), _pair(numbers[1]))
    if name == "split":
        return copies(one) + int(numbers[0]) * _padded_weight(one) * _SUM + _OF_SPLIT
    if name == "sums":
        return copies(one) + int(numbers[0]) * _result_in_tiles(kind, one, _pair(numbers[1])) * _SUM
    if name == "stem":
        return _stem(one, int(numbers[0]))
    if name == "parts":
        return transformed(one) + _parts(one, _pair(numbers[0]), int(numbers[1]))
    if name == "engine":
        return missing_workspace(kind, one, int(numbers[0]))
    if method == "by group":
        return copied_by_group(kind, one)
    return _SIMPLE[method](one)


def _pair(text: str) -> tuple[int, int]:
    rows, columns = map(int, text.split("x"))
    return rows, columns


def _divided(kind: Kind, one: Convolution, tile: tuple[int, int], cluster: tuple[int, int]) -> int | None:
    if not has_tiles(one, tile):
        return None
    tiles, length = tiles_and_terms(kind, one, tile, cluster)
    return copies(one) + divided_bytes(tiles, length, one, tile, math.prod(cluster))


def _padded_weight(one: Convolution) -> int:
    """Return the elements of the weight with padded channels."""
    if one.groups > 1:
        return one.groups * padded_width(one) ** 2 * one.taps
    return one.filled(one.channels) * one.filled(one.weight[0]) * one.taps


def _result_in_tiles(kind: Kind, one: Convolution, tile: tuple[int, int]) -> int:
    """Return the elements of the result as a matrix of whole tiles."""
    rows, columns = one.weight[0], one.length
    if kind == "forward":
        rows, columns = one.places, one.weight[0]
    elif kind == "input gradient":
        rows, columns = one.data[0] * math.prod(one.data[2:]), one.channels
    return round_up(rows, tile[0]) * round_up(columns, tile[1])


def _stem(one: Convolution, parts: int) -> int:
    """Return the bytes for colour images in 16 bits."""
    weight = one.weight[0] * _STEM_CHANNELS * one.taps
    data = one.data[0] * _STEM_CHANNELS * math.prod(one.data[2:])
    return (data + weight + math.prod(one.output) + parts * weight) * one.itemsize + HEADER + _OF_STEM


def _parts(one: Convolution, tile: tuple[int, int], rounds: int) -> int:
    """Return the bytes of a weight gradient's sums of parts, of which ``rounds`` fill the multiprocessors."""
    inside, outside = one.filled(one.channels), one.filled(one.weight[0])
    tiles = ceil_div(one.weight[0], tile[0]) * ceil_div(inside * one.taps, tile[1])
    parts = one.multiprocessors * rounds // tiles
    return parts * inside * outside * one.taps * _SUM if parts > 1 else 0


def _elements(one: Convolution) -> tuple[int, int, int]:
    """Return the elements of data, weight and output with padded channels."""
    inside, outside = one.filled(one.channels), one.filled(one.weight[0])
    data = one.data[0] * inside * math.prod(one.data[2:])
    return data, inside * outside * one.taps, one.output[0] * outside * math.prod(one.output[2:])


_SIMPLE = {
    "none": lambda one: 0,
    "copies": transformed,
    "copies wide": lambda one: transformed(one) + _OF_WIDE,
    "copies twice": lambda one: 2 * transformed(one) + _OF_COPIES_TWICE,
    "data+weight": lambda one: sum(_elements(one)[:2]) * one.itemsize,
    "weight+output": lambda one: sum(_elements(one)[1:]) * one.itemsize,
    "unpadded": lambda one: (math.prod(one.data) + math.prod(one.weight) + math.prod(one.output)) * one.itemsize,
    "unpadded-data": lambda one: math.prod(one.data) * one.itemsize,
    "images": lambda one: one.data[0] * math.prod(one.weight) * _SUM,
    "padded": padded,
    "padded wide": lambda one: padded(one) + _OF_WIDE,
}
"""Methods whose bytes are sizes of tensors."""


FILE = "cudnn_rules.json"
_OF_TYPE = {torch.float32: 4, torch.float16: 2, torch.bfloat16: 3}
"""Numbers that tell types apart, in place of a size."""
_PATCH = 64
"""Pixels of a patch at least."""
_OF_OUTPUT, _OF_DATA, _OF_CHANNELS = (64, 128, 192, 256, 320, 384, 512, 576), (64, 128, 256, 512), (64, 128)
"""Rows of tiles, which the pixels of all images, or the channels, leave a rest of."""


def workspace(kind: Kind, one: Convolution) -> int:
    """Return the bytes of workspace of one operation of a convolution.

    For a transposed convolution, ``kind`` is the operation of the convolution that it is the gradient of. Where no tree
    tells the method, products and depthwise convolutions need nothing, and others copies.
    """
    if _cuts_patches(one):
        return transformed(one) if one.is_half or kind == "weight gradient" else 0
    tree = _trees()[kind].get(group_of(one)) if one.dtype in _OF_TYPE else None
    size = None if tree is None else bytes_of(_methods()[leaf(tree, sizes_of(one))], kind, one)
    if size is not None:
        return size
    is_plain = one.channels == 1 if one.groups > 1 else one.is_plain_product
    return 0 if is_plain else copies(one)


def _cuts_patches(one: Convolution) -> bool:
    """Return whether images are cut into patches, as for transformers: no such calls were learned from.

    Patches may overlap by up to a half, as those of spectrograms do.
    """
    is_large = one.groups == 1 and one.is_stem and one.taps >= _PATCH
    return is_large and 2 * min(one.strides) >= max(one.weight[2:])


def group_of(one: Convolution) -> str:
    """Return the group of calls that has a tree of its own."""
    form = "product" if one.is_plain_product else "other"
    if one.groups > 1:
        form = "depthwise" if one.channels == 1 else "groups"
    layout = ", channels last" if one.channels_last else ""
    return f"{form}{' of volumes' if len(one.data) == 5 else ''}, {one.itemsize} bytes{layout}"


def sizes_of(one: Convolution) -> tuple[float, ...]:
    """Return the sizes that trees compare."""
    inside, outside, images = one.channels, one.weight[0], one.data[0]
    before, after = math.prod(one.data[2:]), math.prod(one.output[2:])
    return (
        images, inside, outside, after, before, one.places, images * before, one.taps, one.weight[-1],
        max(one.strides), max(one.padding), max(one.dilation), one.output[-1], one.data[-1], one.products, one.length,
        inside * outside, inside * outside / (before * (inside + outside)), math.prod(one.data), math.prod(one.output),
        math.gcd(inside, 64), math.gcd(outside, 64), math.gcd(after, 16), math.gcd(before, 16),
        math.gcd(one.places, 64), ceil_div(one.places, 128) * ceil_div(outside, 128),
        ceil_div(outside, 128) * ceil_div(one.length, 128), ceil_div(images * before, 128) * ceil_div(inside, 128),
        _OF_TYPE[one.dtype],
        *(one.places % rows for rows in _OF_OUTPUT), *(images * before % rows for rows in _OF_DATA),
        *(channels % rows for rows in _OF_CHANNELS for channels in (inside, outside)),
        after / before, one.weight[2], one.output[2], one.data[2],
    )  # fmt: skip


def _trees() -> Any:
    return _contents()["trees"]


def _methods() -> Any:
    return _contents()["methods"]


@cache
def _contents() -> Any:
    return json.loads(read_text(FILE))
