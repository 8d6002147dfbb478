"""Engines that run on a GPU and are missing from the answers without a driver, on Hopper.

Engines that hand a product to cuBLASLt, those of many depthwise convolutions and those for FFT and Winograd's method
ask the driver whether they can run, so that the list of plans without one lacks them. The heuristics look like a
decision tree: each leaf is one list of plans, and what a GPU runs first is the same for all calls of a leaf. So the
plans that are named first tell which engine came before them. ``catalog/cudnn_plans.json`` holds what an H200 ran,
written by ``benchmarks/cudnn/missing_engines.py``. Lists of two plans were enough for nearly all leaves; three tell the
rest apart. For products, the first plan alone is used where all calls with it agreed. Into how many parts a plan
divides sums follows from the sizes of a call, and is left out where the rest of the plans tells the engine.
"""

from __future__ import annotations

import json
import math
import re
from functools import cache
from typing import TYPE_CHECKING

from trainatomy.catalog.files import read_text
from trainatomy.operators.allocation.arguments import round_up
from trainatomy.operators.allocation.cudnn.products import bytes_in_cublas
from trainatomy.operators.allocation.cudnn.unnamed import WINOGRAD_IMAGES, by_tiles, of_whole_images, winograd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind
    from trainatomy.operators.allocation.cudnn.heuristics import EnginePlan

FILE = "cudnn_plans.json"
NAMED = 0
"""In place of an engine: none is missing, the plan that is named first runs."""
PLANS = 3
"""Plans that tell a leaf from others, at most."""
_SIZED = re.compile(r" (0|12|17)=-?\d+")
"""``CUDNN_KNOB_TYPE_SPLIT_K``, ``SPLIT_K_BUF`` and ``SPLIT_K_SLC``: into how many parts a sum is divided."""
_THREADS, _CHANNELS, _SUM = 256, 32, 4
"""Threads of a block and the most channels that share it, of a sum of 16-bit depthwise gradients; bytes of a sum."""

Key = tuple[str, str, tuple[str, ...]]


def group_of(one: Convolution) -> str | None:
    """Return the group of calls that one table holds for; None: rows and products of volumes are not in the table."""
    size = f"{one.itemsize} bytes{', channels last' if one.channels_last else ''}"
    if one.groups > 1:
        return f"depthwise, {size}" if one.channels == 1 else f"groups, {size}"
    if not one.is_plain_product:
        return f"other, {size}"
    if len(one.data) != 4 or one.data[2] == 1:
        return None
    is_aligned = one.channels % one.fill == 0 == one.weight[0] % one.fill
    return f"product, {size}" if is_aligned else f"product, unaligned, {size}"


def missing_engine(kind: Kind, one: Convolution, plan: EnginePlan) -> int | None:
    """Return the engine that runs before a plan is reached, ``NAMED`` where none does, None where it is not known."""
    group, table = group_of(one), _table()
    if group is None:
        return None
    return next((table[kind, group, key] for key in keys_of(plan.listed) if (kind, group, key) in table), None)


def keys_of(listed: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the first plans of a list as they may be in the table: fewer first, the parts of sums last."""
    plain = tuple(_SIZED.sub("", plan) for plan in listed)
    yield from (plain[:count] for count in range(1, PLANS + 1))
    yield from (listed[:count] for count in range(2, PLANS + 1) if listed[:count] != plain[:count])


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


def _contents() -> dict[str, dict[str, dict[str, str]]]:
    return _read()[0]


def _table() -> dict[Key, int]:
    return _read()[1]


@cache
def _read() -> tuple[dict[str, dict[str, dict[str, str]]], dict[Key, int]]:
    contents = json.loads(read_text(FILE))
    table = {
        (kind, group, tuple(plans.split(" | "))): engine
        for kind, groups in contents["plans"].items()
        for group, rows in groups.items()
        for plans, engine in rows.items()
    }
    return contents, table
