"""Algorithms of grouped convolutions: all groups at once, or one after the other.

How cuDNN convolves the groups of images and volumes: all of them in one kernel, or one after the other.

cuDNN's heuristics decide, for the result and for each gradient apart, and neighbouring shapes differ by up to twenty
times.  Where cuDNN's library is installed, the simulation asks it, and the call says the ways; elsewhere decision trees
stand in that were learned from the library's answers (``catalog/cudnn_groups.json``, benchmarks/cudnn/group_ways.py).

- *together*: one kernel for all groups.
- *turns*: about four kernels for each group: copies into channels-last order, a product on tensor cores, a copy back.
- *unsplit*: the same, of a weight's gradient whose sums over all pixels are divided among few multiprocessors or none.
- *cores*: as turns, by a kernel without tensor cores.
- *direct*: one kernel for each group, without tensor cores and copies.

``depthwise.py`` has groups of one channel.

Convolutions whose groups take turns: long filters along a row, and wide groups of small images.

The former are the positional embeddings of wav2vec 2.0, HuBERT and WavLM, the latter in the last stage of a ResNeXt.
cuDNN 9.19 convolves most of them group after group, as kernel names on an H200 show.  A group has few rows and channels
but a depth of thousands (channels x places), which a block of threads walks over alone: its steps take most of the
time, and the rows the rest.  cuDNN has streams of its own for groups, so that those of *cores* overlap in forward.
Which kernels run:

- *together*: all groups at once, where cuDNN has such a kernel: 16 bits, and the depth or the group is small.
- *group*: a product on tensor cores for each group.
- *turns*: the same for small filters in 16 bits: eight groups and more, of more than 48 channels, and few rows. From
  three images on forward computes wider groups than 64 together, and backward others than these if it has no stride.
- *direct*, *engine*: the gradient of the input of sequences with a stride, in TF32, by a kernel without tensor cores;
  that of the weight by a product for each group.  *engine* is for fewer than three sequences of groups of more than 48
  channels, *group* from ten sequences on (nine trainings of SEW with 2 to 12 sequences, and random shapes with 2, 6 and
  16); in 16 bits such gradients are *group*, too.
- *cores*: without tensor cores (``implicit_convolve_sgemm``; gradients add atomically), up to 20 times as slow: 16 bits
  forward from a depth of 6 000 on, but for groups of 64 channels; 16 bits backward for groups above 64 channels, fewer
  than 16 groups, or fewer than four sequences (a WavLM with three on an H100, drawn ones with two and four on an H200);
  TF32 backward from that depth on.
"""

from __future__ import annotations

import json
from functools import cache
from math import ceil, gcd, prod
from typing import Any, NamedTuple

from trainatomy.catalog.files import read_text, read_yaml
from trainatomy.lookup import leaf
from trainatomy.operators.cost.kernel import HALVES, Chip, geometry_of, number, whole_numbers
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


_LONG, _LONG_IN_FP32, _SHALLOW, _DEEP = 32, 16, 2048, 6000
"""Places of a filter from which on groups take turns, and in gradients in TF32; the depth that one kernel still covers,
and the one that is too deep for tensor cores."""
_NARROW, _EASY, _MOST_GROUPS, _FEWEST, _FEWEST_LONG, _MANY = 32, 64, 16, 3, 4, 10
_ROW, _MANY_GROUPS, _WIDE, _FEW_ROWS = 3, 8, 48, 2**14
"""Dimensions of a row; from how many groups, of more than how many channels, groups of small filters take turns."""
_LOAD, _TURN_TILE, _H200_MULTIPROCESSORS = 64, 128, 132
"""Bytes of channels that a step of a product loads; channels of a tile; multiprocessors of the GPU measured."""


class _Steps(NamedTuple):
    """Nanoseconds of each step of the depth: of one block, and for each row."""

    step: float
    row: float


def kind_of_turns(call: Call, tensors: tuple[Array, Array, Array], groups: int, precision: str) -> str:
    """Return how cuDNN convolves groups: together, turns, group or cores; together where it is no such call.

    Args:
        call: ``convolution`` or ``convolution_backward``.
        tensors: Result (or its gradient), input and weight.
        groups: The groups.
        precision: ``half``, or that of ``Chip.precision``.
    """
    out, x, weight = tensors
    backward, width, places = "backward" in call.name, weight.shape[1], prod(weight.shape[2:])
    strided = max(whole_numbers(number(call, "stride", "1")) or (1,)) > 1
    if groups == 1 or width == 1 or places == 1 or len(x.shape) > _ROW or number(call, "transposed") == "True":
        return "together"
    long = _LONG_IN_FP32 if backward and (strided or precision != "half") else _LONG
    if places < long:
        wide = groups >= _MANY_GROUPS and width > _WIDE and out.elements // out.shape[1] < _FEW_ROWS
        usual = width > _EASY if not backward else width <= _EASY and not strided
        together = usual and x.shape[0] >= _FEWEST
        return "turns" if wide and precision == "half" and not together else "together"
    if precision not in ("half", "tf32"):
        return "together"
    if backward and strided:
        few = x.shape[0] < _FEWEST and width > _WIDE
        return "group" if precision == "half" or x.shape[0] >= _MANY else "engine" if few else "direct"
    deep = width * places >= _DEEP
    if precision != "half":
        return "cores" if deep and backward else "group"
    if backward:
        easy = width <= _EASY and groups >= _MOST_GROUPS and x.shape[0] >= _FEWEST_LONG
        return "together" if width <= _NARROW else "group" if easy else "cores"
    if width * places <= _SHALLOW:
        return "together"
    return "cores" if deep and width != _EASY else "group"


def turns_seconds(chip: Chip, call: Call, tensors: tuple[Array, Array, Array], groups: int, kind: str) -> float:
    """Return the time of such a convolution, in backward of both gradients, without its bias.

    Args:
        chip: The GPU.
        call: ``convolution`` or ``convolution_backward``.
        tensors: Result (or its gradient), input and weight.
        groups: The groups.
        kind: As ``kind_of_turns`` returned it: turns, group or cores.
    """
    (out, x, weight), way = tensors, "backward" if "backward" in call.name else "forward"
    if kind in ("direct", "engine"):
        seconds: float = read_yaml("efficiency.yaml")["convolution"]["strided_groups"][kind]
        return out.elements * prod(weight.shape[1:]) * seconds / chip.multiprocessors
    if kind == "cores":
        name, load = x.dtype if way == "backward" and x.dtype in HALVES else _type(x), 1
    else:
        name, load, kind = _type(x), _LOAD // x.itemsize, "group"
    form = _constants()[f"{way}.{kind}.{name}"]
    depth = ceil(weight.shape[1] / load) * load * prod(weight.shape[2:])
    rows = out.elements // out.shape[1] * ceil(weight.shape[1] / _TURN_TILE)
    return groups * depth * 1e-9 * (form.step + form.row * rows * _H200_MULTIPROCESSORS / chip.multiprocessors)


def _type(x: Array) -> str:
    return "half" if x.dtype in HALVES else "tf32"


@cache
def _constants() -> dict[str, _Steps]:
    known = read_yaml("efficiency.yaml")["convolution"]["turns"]
    return {name: _Steps(*each) for name, each in known.items()}
