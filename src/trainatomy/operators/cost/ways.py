"""How cuDNN convolves the groups of images and volumes: all of them in one kernel, or one after the other.

cuDNN's heuristics decide, for the result and for each gradient apart, and neighbouring shapes differ by up to twenty
times.  Where cuDNN's library is installed, the simulation asks it, and the call says the ways; elsewhere decision trees
stand in that were learned from the library's answers (``catalog/cudnn_groups.json``, benchmarks/cudnn/group_ways.py).

- *together*: one kernel for all groups.
- *turns*: about four kernels for each group: copies into channels-last order, a product on tensor cores, a copy back.
- *unsplit*: the same, of a weight's gradient whose sums over all pixels are divided among few multiprocessors or none.
- *cores*: as turns, by a kernel without tensor cores.
- *direct*: one kernel for each group, without tensor cores and copies.

``turns.py`` has groups of sequences, and ``depthwise.py`` groups of one channel.
"""

from __future__ import annotations

import json
from functools import cache
from math import ceil, gcd, prod
from typing import Any, NamedTuple

from trainatomy.catalog.files import read_text, read_yaml
from trainatomy.lookup import leaf
from trainatomy.operators.cost.kernel import HALVES, Chip, geometry_of, number
from trainatomy.results.operations import Array, Call

TOGETHER = "together"
ARGUMENT = "ways"
"""The name under which a call says its ways, with commas between: those of the gradients that it computes in order."""
FORWARD, INPUT, WEIGHT = "forward", "input gradient", "weight gradient"
FILE = "cudnn_groups.json"
_TILE, _H200 = 64, 132
_IMAGES = 4
"""Dimensions of a batch of images."""


class Sizes(NamedTuple):
    """A convolution as cuDNN is asked: shapes with the batch, and settings by dimension.

    That of a transposed convolution is the one of which it is the gradient: ``data`` is its result.
    """

    data: tuple[int, ...]
    weight: tuple[int, ...]
    output: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    dtype: str
    transposed: bool
    last: bool


class _Form(NamedTuple):
    """Seconds of a group: its start, a step of the depth, and a step of each row in tiles of 64 columns."""

    start: float
    step: float
    row: float


def ways_of(call: Call, tensors: tuple[Array, Array, Array], groups: int, kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Return the way of each product of a convolution: of the result, or of the gradients that it computes.

    Args:
        call: ``convolution`` or ``convolution_backward``.
        tensors: Result (or its gradient), input and weight.
        groups: The groups.
        kinds: What is computed: the result, the gradient of the input, that of the weight.
    """
    out, x, weight = tensors
    if groups == 1 or weight.shape[1] == 1 or prod(weight.shape[2:]) == 1 or len(x.shape) < _IMAGES:
        return (TOGETHER,) * len(kinds)
    said = number(call, ARGUMENT)
    if said:
        return tuple(said.split(","))
    if number(call, "transposed") == "True":
        return (TOGETHER,) * len(kinds)
    return tuple(learned_way(kind, _sizes(call, out, x, weight, groups)) for kind in kinds)


def _sizes(call: Call, out: Array, x: Array, weight: Array, groups: int) -> Sizes:
    last = any(tensor.strides[1] == 1 and tensor.shape[1] > 1 for tensor in (x, weight))
    return Sizes(x.shape, weight.shape, out.shape, *geometry_of(call, len(x.shape) - 2), groups, x.dtype, False, last)


@cache
def learned_way(kind: str, one: Sizes) -> str:
    """Return the way of a product by the tree of its kind, dimensions, type and layout."""
    way: str = leaf(_contents()["trees"].get(f"{kind}, {form_of(one)}", TOGETHER), sizes_compared(one))
    return way


def form_of(one: Sizes) -> str:
    """Return the form of a convolution, for which there is a tree."""
    size = 2 if one.dtype in HALVES else 4
    return f"{len(one.data) - 2}d, {size} bytes{', channels last' if one.last else ''}"


def sizes_compared(one: Sizes) -> tuple[float, ...]:
    """Return the sizes that trees compare."""
    images, groups, inside = one.data[0], one.groups, one.weight[1]
    outside, places = one.weight[0] // groups, prod(one.weight[2:])
    after, before = prod(one.output[2:]), prod(one.data[2:])
    return (
        images, groups, inside, outside, one.weight[0], one.data[1], after, before, images * after, images * before,
        places, one.weight[-1], one.weight[2], max(one.strides), max(one.padding), max(one.dilation), one.output[-1],
        one.data[-1], one.output[2], one.data[2], images * after * one.weight[0] * inside * places, inside * places,
        gcd(inside, 64), gcd(outside, 64), gcd(after, 16), gcd(before, 16), prod(one.data), prod(one.output),
        one.dtype == "bfloat16", one.transposed, min(one.padding),
    )  # fmt: skip


def in_turn_seconds(
    chip: Chip, way: str, kind: str, product: tuple[int, int, int], rewritten: tuple[Array, ...], groups: int
) -> tuple[float, int]:
    """Return the time and the number of kernels of groups that are convolved one after the other.

    Args:
        chip: The GPU.
        way: How, other than together.
        kind: What is computed.
        product: Rows, columns and depth of a group's product.
        rewritten: Tensors whose parts are copied for each group.
        groups: The groups.
    """
    rows, columns, depth = product
    half = rewritten[0].dtype in HALVES
    form, known = _forms()[f"{kind}.{way}.{'half' if half else 'tf32'}"], read_yaml("efficiency.yaml")["convolution"]
    rows = ceil(rows / _TILE) * _TILE if kind == WEIGHT else rows
    work = rows * ceil(columns / _TILE) * _H200 / chip.multiprocessors
    copied = sum(2 * tensor.bytes for tensor in rewritten) / groups / (chip.bandwidth * known["layout_bandwidth"])
    kernels = 1 if way == "direct" else 4
    return groups * (form.start + depth * (form.step + form.row * work) + copied), kernels * groups


@cache
def _forms() -> dict[str, _Form]:
    known = read_yaml("efficiency.yaml")["convolution"]["in_turn"]
    return {
        f"{kind}.{way}": _Form(*(each * 1e-9 for each in known[kind][way]))
        for kind in (FORWARD, INPUT, WEIGHT)
        for way in known[kind]
    }


@cache
def _contents() -> Any:
    return json.loads(read_text(FILE))
