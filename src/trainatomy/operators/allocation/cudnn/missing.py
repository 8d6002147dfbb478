"""Engines that run on a GPU and are missing from the answers without a driver, on Hopper.

Engines that hand a product to cuBLASLt, those of many depthwise convolutions and those for FFT and Winograd's method
ask the driver whether they can run, so that the list of plans without one lacks them. The heuristics look like a
decision tree: each leaf is one list of plans, and what a GPU runs first is mostly the same for all calls of a leaf.
``catalog/cudnn_plans.json`` holds what an H200 ran, by the first plans of the list without a driver, up to three: the
row with the most plans in common decides, the row without any plan holds for lists that were never seen. Calls of one
leaf that differ in one size, such as the pixels of an image, have the limit in their row. Into how many parts a plan
divides sums follows from the sizes of a call, and is left out. Newer versions of cuDNN name other lists, for which the
row without any plan would hold: the table is used with the versions that it was recorded with
(``catalog.cudnn.has_recorded_engines``). ``benchmarks/cudnn/missing_engines.py`` writes the file.

Products (1x1 filters without strides or padding) that cuBLAS computes.

Convolutions for which cuDNN's library gives another answer without a driver than on a GPU.

Engines that ask the driver or cuBLAS whether they can run are missing from the answers without one: those that hand a
product to cuBLASLt, and those of depthwise convolutions in 16 bits. Of 1,614 operations that cuDNN ran on an H200
(9.19, benchmarks/cudnn/probe.py) some 120 ran in such an engine: nearly all products of forward and the input gradient,
two thirds of those of weight gradients. The plans that are named in their place tell whether one of them runs on
Hopper; where they do not, and on other GPUs, the trees of ``learned`` decide.
"""

from __future__ import annotations

import json
import math
import re
from functools import cache
from typing import TYPE_CHECKING, Any

from trainatomy.allocator.blocks import round_up
from trainatomy.catalog.files import read_text
from trainatomy.operators.allocation.cudnn.unnamed import WINOGRAD_IMAGES, by_tiles, of_whole_images, winograd
from trainatomy.operators.allocation.plan import ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind
    from trainatomy.operators.allocation.cudnn.heuristics import EnginePlan


_OF_PRODUCT, _LARGE_PRODUCT = {4: 400, 2: 272}, 80_000_000
"""Workspace of a product in cuBLAS by bytes of its type, and the bytes it must move to need one."""
_SUM_BYTES, _MOST_SUMS = 4, 2**24
"""Bytes of a sum in fp32, and of the sums of a divided product at most."""
_TILE = 256, 128
"""Rows and columns of a tile, either way round."""
_SHORTEST_HALF = 1300
"""Pixels of the shortest sums in 16 bits."""


def bytes_in_cublas(kind: Kind, one: Convolution) -> int:
    """Return the workspace of a product in cuBLAS; a contiguous weight gradient has fp32 sums of each image."""
    if kind != "weight gradient":
        moved = (math.prod(one.data) + math.prod(one.output)) * one.itemsize
        return _OF_PRODUCT[one.itemsize] if moved > _LARGE_PRODUCT else 0
    sums = math.prod(one.weight) * _SUM_BYTES
    return _divided(one) * sums if one.channels_last else one.data[0] * sums


def _divided(one: Convolution) -> int:
    """Return into how many parts cuBLAS divides the sums of a channels-last weight gradient, 0 where it does not.

    The tiles fill the multiprocessors once. Of 93 such products on an H200 about half of the bytes are met; the tiles
    that cuBLAS chooses are not known.
    """
    long, short = _TILE
    rows, columns = one.weight[0], one.channels
    tiles = min(ceil_div(rows, long) * ceil_div(columns, short), ceil_div(rows, short) * ceil_div(columns, long))
    parts = min(one.multiprocessors // tiles, _MOST_SUMS // (math.prod(one.weight) * _SUM_BYTES))
    if one.is_half:
        parts = min(parts, one.places // _SHORTEST_HALF)
    return parts if parts > 1 else 0


FILE = "cudnn_plans.json"
NAMED = 0
"""In place of an engine: none is missing, the plan that is named first runs."""
_SIZED = re.compile(r" (0|12|17)=-?\d+")
"""``CUDNN_KNOB_TYPE_SPLIT_K``, ``SPLIT_K_BUF`` and ``SPLIT_K_SLC``: into how many parts a sum is divided."""
_THREADS, _CHANNELS, _SUM = 256, 32, 4
"""Threads of a block and the most channels that share it, of a sum of 16-bit depthwise gradients; bytes of a sum."""
SIZES: dict[str, Callable[[Convolution], int]] = {
    "pixels of an image": lambda one: math.prod(one.output[2:]),
    "images": lambda one: one.data[0],
    "pixels": lambda one: one.places,
    "filters": lambda one: one.weight[0],
    "channels": lambda one: one.channels,
    "taps": lambda one: one.taps,
    "products": lambda one: one.products,
}
"""Sizes of a call that tell engines apart where the plans do not."""

Row = tuple[str, str, tuple[str, ...]]
"""Operation, group of calls, first plans."""
Engine = int | tuple[str, int, int, int]
"""An engine, or a size, its limit, the engine below the limit, and that from the limit on."""


def group_of(one: Convolution) -> str:
    """Return the group of calls that the rows of one table hold for."""
    size = f"{one.itemsize} bytes{', channels last' if one.channels_last else ''}"
    if one.groups > 1:
        return f"depthwise, {size}" if one.channels == 1 else f"groups, {size}"
    if not one.is_plain_product:
        return f"other, {size}"
    form = "product of volumes" if len(one.data) == 5 else "product of rows" if one.data[2] == 1 else "product"
    is_aligned = one.channels % one.fill == 0 == one.weight[0] % one.fill
    return f"{form}, {size}" if is_aligned else f"{form}, unaligned, {size}"


def missing_engine(kind: Kind, one: Convolution, plan: EnginePlan) -> int | None:
    """Return the engine that runs before a plan is reached, ``NAMED`` where none does, None where it is not known."""
    if str(plan.engine) in _contents()["methods"][kind]:  # beside a driver, the list lacks no engine
        return NAMED
    group, table = group_of(one), _table()
    found = next((table[kind, group, key] for key in keys_of(plan.listed) if (kind, group, key) in table), None)
    return None if found is None else engine_of(found, one)


def keys_of(listed: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the first plans of a list as they may be in the table: all of them first, none at last."""
    plain = tuple(_SIZED.sub("", plan) for plan in listed)
    yield from (plain[:count] for count in range(len(plain), -1, -1))


def engine_of(entry: Engine, one: Convolution) -> int:
    """Return the engine that a row of the table has for a call."""
    if isinstance(entry, int):
        return entry
    size, limit, below, beyond = entry
    return below if SIZES[size](one) < limit else beyond


def missing_workspace(kind: Kind, one: Convolution, engine: int) -> int | None:
    """Return the workspace of an engine that is missing without a driver; None where it is not known."""
    method = _contents()["methods"][kind].get(str(engine))
    if method == "cuBLAS":
        return bytes_in_cublas(kind, one)
    if method == "direct":
        return 0
    if method == "Winograd":
        return winograd(kind, one) or None
    if method == "Winograd of 16 images":
        return winograd(kind, one, round_up(one.data[0], WINOGRAD_IMAGES)) or None
    if method == "FFT of tiles":
        return by_tiles(one) or None
    if method == "FFT":
        return of_whole_images(kind, one) or None
    if method == "sums of images":
        return _sums_of_images(one)
    return None


def _sums_of_images(one: Convolution) -> int:
    """Return the bytes of a 16-bit weight gradient without copies: channels-last depthwise ones sum image by image."""
    if one.channels > 1 or not one.channels_last:
        return 0
    parts = one.data[0] * (_THREADS // min(_CHANNELS, one.groups))
    return parts * math.prod(one.weight) * _SUM


def _contents() -> dict[str, Any]:
    return _read()[0]


def _table() -> dict[Row, Engine]:
    return _read()[1]


@cache
def _read() -> tuple[dict[str, Any], dict[Row, Engine]]:
    contents = json.loads(read_text(FILE))
    table = {
        (kind, group, tuple(plans.split(" | ")) if plans else ()): tuple(entry) if isinstance(entry, list) else entry
        for kind, groups in contents["engines"].items()
        for group, rows in groups.items()
        for plans, entry in rows.items()
    }
    return contents, table


def is_unanswered(one: Convolution) -> bool:
    """Return whether the engine that runs on a GPU is often missing from the answers without a driver."""
    if one.groups > 1:
        return one.channels == 1 and one.weight[0] == one.groups and one.is_half and not one.transposed
    return one.is_plain_product
