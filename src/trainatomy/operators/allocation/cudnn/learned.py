"""Workspaces of contiguous convolutions, by decision trees that were learned from an H200's answers.

cuDNN's heuristics choose among few kinds of engines: those that read contiguous tensors, those that work on copies in
channels-last layout, and those that also divide sums. What a kind needs follows from the shapes; which kind is chosen
is looked up in a tree of comparisons of sizes, one for each operation, type and form of filter
(``catalog/cudnn_rules.json``, written by benchmarks/cudnn/learned_rules.py from calls of published networks).
"""

from __future__ import annotations

import json
import math
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from trainatomy.catalog.files import read_text
from trainatomy.operators.allocation.arguments import ceil_div, round_up
from trainatomy.operators.allocation.cudnn.divided import divided_bytes, tiles_and_terms
from trainatomy.operators.allocation.cudnn.unnamed import WINOGRAD_IMAGES, winograd
from trainatomy.operators.allocation.cudnn.weight_gradient import transformed

if TYPE_CHECKING:
    from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind

FILE = "cudnn_rules.json"
_SUM = 4
"""Bytes of a partial sum."""
_OF_TYPE = {torch.float32: 4, torch.float16: 2, torch.bfloat16: 3}
"""Numbers that tell types apart, in place of a size."""


def learned_workspace(kind: Kind, one: Convolution) -> int | None:
    """Return the bytes of workspace; None for calls that no tree was learned for."""
    if not is_learned(kind, one):
        return None
    node: Any = _trees()[kind][group_of(one)]
    values = sizes_of(one)
    while not isinstance(node, str):
        size, limit, below, above = node
        node = below if values[size] <= limit else above
    return bytes_of(node, kind, one)


def is_learned(kind: Kind, one: Convolution) -> bool:
    """Return whether the trees are about such a call: contiguous, one group, types of tensor cores.

    In two dimensions they are about convolutions that are not transposed, in three not about the weight gradient: trees
    for those would miss more than the rules that were written by hand.
    """
    if one.groups > 1 or one.channels_last or one.dtype not in _OF_TYPE:
        return False
    return kind != "weight gradient" if len(one.data) == 5 else not one.transposed


def group_of(one: Convolution) -> str:
    """Return the group of calls that has a tree of its own."""
    form = "product" if one.is_plain_product else "other"
    return f"{form}{' of volumes' if len(one.data) == 5 else ''}, {one.itemsize} bytes"


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
    )  # fmt: skip


def bytes_of(method: str, kind: Kind, one: Convolution) -> int:
    """Return the bytes that a method needs, such as ``copies`` or ``divided 128x64 1x3``."""
    name, *numbers = method.split(" ")
    if name == "divided":
        return transformed(one) + _divided(kind, one, _pair(numbers[0]), _pair(numbers[1]))
    if name == "parts":
        return transformed(one) + _parts(one, _pair(numbers[0]), int(numbers[1]))
    if name == "winograd":
        images = round_up(one.data[0], WINOGRAD_IMAGES) if numbers else one.data[0]
        return winograd(kind, one, images)
    return _SIMPLE[name](one)


def _pair(text: str) -> tuple[int, int]:
    rows, columns = map(int, text.split("x"))
    return rows, columns


def _divided(kind: Kind, one: Convolution, tile: tuple[int, int], cluster: tuple[int, int]) -> int:
    tiles, length = tiles_and_terms(kind, one, tile, cluster)
    return divided_bytes(tiles, length, one, tile, math.prod(cluster))


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
    "data+weight": lambda one: sum(_elements(one)[:2]) * one.itemsize,
    "weight+output": lambda one: sum(_elements(one)[1:]) * one.itemsize,
    "unpadded": lambda one: (math.prod(one.data) + math.prod(one.weight) + math.prod(one.output)) * one.itemsize,
    "unpadded-data": lambda one: math.prod(one.data) * one.itemsize,
    "images": lambda one: one.data[0] * math.prod(one.weight) * _SUM,
}
"""Methods whose bytes are sizes of tensors: copies of some of them, and fp32 sums of each image."""


@cache
def _trees() -> Any:
    return json.loads(read_text(FILE))["trees"]
