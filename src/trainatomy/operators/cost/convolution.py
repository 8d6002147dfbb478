"""Convolutions as cuDNN computes them: implicit matrix products, with layout changes around them.

FLOP: 2 x outputs x inputs of each output (channels of a group x kernel positions); backward computes it once for the
gradient of the input and once for that of the weight (torch/utils/flop_counter.py). The products are [images x pixels,
inputs of an output] x [inputs of an output, channels] in forward, and the two transposed ones in backward.

Other kernels, by traces of an H200 (cuDNN 9.19): unless the convolution is 1 x 1 with stride 1, operands in
channels-first order are rewritten to channels-last and the result back, in tiles of 32 x 32; a bias is added, or
summed, by kernels of PyTorch; images of few channels are gathered element by element, far below the rate of tensor
cores. Depthwise convolutions are in ``depthwise.py``, with images of one place; those whose groups take turns in
``algorithms.py``.
Constants: ``catalog/efficiency.yaml``.
"""

from __future__ import annotations

from math import ceil, log2, prod
from typing import NamedTuple

from trainatomy.operators.cost.algorithms import (
    FORWARD,
    INPUT,
    TOGETHER,
    WEIGHT,
    in_turn_seconds,
    kind_of_turns,
    turns_seconds,
    ways_of,
)
from trainatomy.operators.cost.depthwise import (
    depthwise,
    is_of_one_place,
    kind_of,
    kind_of_weight,
    least_seconds,
    one_place_seconds,
)
from trainatomy.operators.cost.elementwise import reordering_seconds
from trainatomy.operators.cost.kernel import (
    HALVES,
    Chip,
    KernelWork,
    constants,
    number,
    passes_to,
    wanted_gradients,
    whole_numbers,
)
from trainatomy.operators.cost.matmul import ProductSizes, product
from trainatomy.operators.cost.plans import plans_of
from trainatomy.results.operations import Array, Call

_LAYOUT_TILE, _GATHER_TILE, _KERNELS_OF_GROUP = 32, 128, 4
_ALIGNED, _LEAST_ALIGNED = 16, 4
_MOST_ALIGNED = 64
_WIDE, _WIDE_GROUP = 4, 16
_SIZE_WEIGHT = 0.5
"""Weight of a convolution's size beside its channels, which say more about its kernel; chosen as ``_likeness`` was."""
_SEQUENCE = 3
"""Dimensions of a batch of sequences."""
_VOLUME = 5
"""Dimensions of a batch of videos or volumes, for which cuDNN has kernels of their own."""


class _Part(NamedTuple):
    """A matrix product: its matrices, and the tensors whose layout is changed around it."""

    m: int
    n: int
    k: int
    rewritten: tuple[Array, ...]


def convolution(call: Call, chip: Chip) -> KernelWork:
    """Return the work of ``convolution`` or ``convolution_backward``."""
    backward = "backward" in call.name
    out, x, weight = call.inputs[:3] if backward else (call.outputs[0], *call.inputs[:2])
    mask = wanted_gradients(call) if backward else [False, False, len(call.inputs) > 2]
    groups = int(number(call, "groups", "1"))
    times = sum(mask[:2]) if backward else 1
    flop = 2.0 * _outputs(call, out, x) * prod(weight.shape[1:]) * times
    deep = groups > 1 and weight.shape[1] == 1
    rate = "fp32" if deep else chip.precision(x.dtype, chip.cudnn_tf32)
    ways = ways_of(call, (out, x, weight), groups, _kinds(mask, backward))
    in_turn = set(ways) != {TOGETHER}
    one = is_of_one_place(out, x, weight, groups)
    kind = "depthwise" if deep else "spatial" if in_turn else "place" if one else _kind(call, weight)
    precision = "half" if x.dtype in HALVES else rate
    seconds = launches = 0.0
    turns = kind_of_turns(call, (out, x, weight), groups, precision)
    if turns != "together":
        share = times / 2 if backward else 1.0
        seconds = turns_seconds(chip, call, (out, x, weight), groups, turns) * share
        launches = _KERNELS_OF_GROUP * groups * max(times, 1)
    elif one:
        transposed = number(call, "transposed") == "True"
        seconds, launches = one_place_seconds(x, weight, mask, backward=backward, transposed=transposed)
    elif deep:
        seconds, launches = depthwise(chip, call, (out, x, weight), mask, backward), max(sum(mask[:2]), 1)
    else:
        parts = _parts(out, x, weight, mask, groups, backward)
        for part, computed, way in zip(parts, _kinds(mask, backward), ways, strict=True):
            if way == TOGETHER:
                more, kernels = _product(chip, call, part, kind, groups, x, computed)
            else:
                more, kernels = in_turn_seconds(chip, way, computed, part[:3], part.rewritten, groups)
            seconds, launches = seconds + more, launches + kernels
    copied = [tensor for tensor in ((x, out) if backward else (x,)) if not is_last(tensor) and _is_reordered(tensor)]
    beside, launches = sum((reordering_seconds(chip, tensor) for tensor in copied), 0.0), launches + len(copied)
    adds_bias = one or (deep and not backward and kind_of(call, x, weight) == "own")
    if mask[2] and not adds_bias:
        seconds, launches = seconds + _bias_seconds(chip, out, backward), launches + 1
    way, form = "backward" if backward else "forward", _form(call, x, weight, groups, turns, ways, deep=deep)
    form = f"{form} stem" if kind == "few" and backward and not mask[0] else form
    family = f"convolution.{way}.{kind}.{form}.{precision}"
    if turns in ("direct", "engine"):  # of which there are too few to compare others with
        family = f"strided groups.{turns}"
    moved = (out.bytes + x.bytes + weight.bytes) * max(times, 1)
    if one:
        family, seconds = f"convolution.{way}.{kind}.{precision}", max(seconds, least_seconds(chip, flop, rate, moved))
    sizes = (_SIZE_WEIGHT * log2(max(size, 1)) for size in (flop, moved))
    features = (*sizes, log2(x.shape[1]), log2(weight.shape[0]), *_likeness(call, x, weight))
    passes = passes_to(call, moved, "operands of each product")
    at_once = _groups_at_once(turns, precision, backward=backward)
    work = KernelWork(family, features, flop, rate, moved, int(launches), seconds, passes, at_once, beside=beside)
    return work._replace(plans=plans_of(call))


def _groups_at_once(turns: str, precision: str, *, backward: bool) -> float:
    """Return how many groups of sequences run at a time; gradients do where each takes long enough."""
    if (turns in ("cores", "group") and not backward) or (turns, precision) == ("group", "tf32"):
        return constants("convolution").groups_at_once
    return constants("convolution").gradients_at_once if (turns, precision) == ("cores", "half") else 1.0


def launches_of_groups(call: Call) -> int:
    """Return the kernels of a convolution whose groups are computed one after the other, with TF32 in fp32; else 0.

    Forward products of one place are taken to be so from ``_WIDE_GROUP`` channels on, as most random ones on an H200.
    """
    groups = int(number(call, "groups", "1"))
    if groups == 1:
        return 0
    backward = "backward" in call.name
    out, x, weight = call.inputs[:3] if backward else (call.outputs[0], *call.inputs[:2])
    if weight.shape[1] == 1:
        return 0
    times = max(sum(wanted_gradients(call)[:2]), 1) if backward else 1
    turns = kind_of_turns(call, (out, x, weight), groups, "half" if x.dtype in HALVES else "tf32")
    ways = ways_of(call, (out, x, weight), groups, _kinds(wanted_gradients(call), backward))
    if in_turn := sum(way != TOGETHER for way in ways):
        return _KERNELS_OF_GROUP * groups * in_turn
    by_group = prod(weight.shape[2:]) == 1 and (backward or weight.shape[1] >= _WIDE_GROUP)
    return _KERNELS_OF_GROUP * groups * times if by_group or turns != "together" else 0


def _kind(call: Call, weight: Array) -> str:
    """Return the kind of a convolution that is not depthwise: few, pointwise or spatial."""
    return "few" if _few(weight) else "pointwise" if _plain(call, weight) else "spatial"


def _likeness(call: Call, x: Array, weight: Array) -> tuple[float, ...]:
    """Return what decides cuDNN's kernel besides sizes: places of the weight, stride, the channels' alignment, bf16.

    The weights (2 for a stride, 0.7 for a power of two that divides the channels, 0.4 for bf16 beside fp16) were chosen
    by leaving points out.
    """
    stride = max(whole_numbers(number(call, "stride", "1")) or (1,))
    aligned = (log2(min(channels & -channels, _MOST_ALIGNED)) for channels in (x.shape[1], weight.shape[0]))
    return (
        log2(prod(weight.shape[2:])),
        2 * log2(stride),
        *(0.7 * each for each in aligned),
        0.4 * (x.dtype == "bfloat16"),
    )


def _form(call: Call, x: Array, weight: Array, groups: int, turns: str, ways: tuple[str, ...], *, deep: bool) -> str:
    """Return what else decides the kernel: the images' order, groups, dilation, transposition, the weight's size."""
    places, width = prod(weight.shape[2:]), weight.shape[1]
    of_products = groups > 1 and not deep and places == 1
    parts = ["last" if is_last(x) or (of_products and _is_reordered(x)) else "first"]
    parts += ["volume"] if len(x.shape) == _VOLUME and not deep else []
    if deep:
        kinds = (kind_of(call, x, weight), kind_of_weight(call, x, weight))
        parts += [kind for kind in ("shared", "many", "direct", "products") if kind == kinds["backward" in call.name]]
    if set(ways) != {TOGETHER}:
        return f"{' '.join(parts)} groups.{' '.join(ways)}"
    if groups > 1 and not deep:
        parts.append("of products" if of_products else "grouped" if width & -width == width else "padded")
    if set(whole_numbers(number(call, "dilation", "1"))) - {1}:
        parts.append("dilated sequence" if len(x.shape) == _SEQUENCE else "dilated")
    if number(call, "transposed") == "True":
        parts.append("transposed")
    if not deep and _plain(call, weight) and (rows := _rows(x)) != "aligned":
        parts.append(rows)
    if deep or _plain(call, weight):
        return " ".join(parts)
    if _few(weight):
        patches = set(whole_numbers(number(call, "stride", "1"))) == set(weight.shape[2:])
        return " ".join((*parts, "patches")) if patches else " ".join(parts)
    if turns != "together":
        return f"{' '.join(parts)}.{turns}"
    size = "one" if places == 1 else "wide" if max(weight.shape[2:]) > _WIDE else "small"
    return f"{' '.join(parts)}.{size}"


def is_last(x: Array) -> bool:
    """Return whether cuDNN gets images channels-last; sequences are made contiguous first."""
    return len(x.shape) > _SEQUENCE and _is_reordered(x)


def _is_reordered(x: Array) -> bool:
    """Return whether the channels of a place lie beside each other."""
    return x.strides[1] == 1 and prod(x.shape[2:]) > 1


def _bias_seconds(chip: Chip, out: Array, backward: bool) -> float:
    """Return the time of adding the bias, or of summing its gradient over images and pixels."""
    form = constants("convolution")
    if backward:
        return form.bias_sum_seconds + out.bytes / (chip.bandwidth * form.bias_sum_bandwidth)
    indexing = out.elements * form.bias_element_seconds / chip.multiprocessors
    return form.bias_seconds + max(2 * out.bytes / (chip.bandwidth * form.bias_bandwidth), indexing)


def _kinds(mask: list[bool], backward: bool) -> tuple[str, ...]:
    """Return what is computed: the result, or which of the gradients of input and weight."""
    return (
        tuple(kind for kind, wanted in zip((INPUT, WEIGHT), mask, strict=False) if wanted) if backward else (FORWARD,)
    )


def _outputs(call: Call, out: Array, x: Array) -> int:
    """Return the elements that meet the whole kernel: of the result, or of the input of a transposed convolution."""
    return x.elements if number(call, "transposed") == "True" else out.elements


def _few(weight: Array) -> bool:
    """Return whether the input channels fill less than one load of tensor cores."""
    return weight.shape[1] * weight.itemsize < _ALIGNED


def _plain(call: Call, weight: Array) -> bool:
    """Return whether it is a product of the matrices as they are: a 1 x 1 kernel with stride 1."""
    return prod(weight.shape[2:]) == 1 and set(whole_numbers(number(call, "stride", "1"))) <= {1}


def _rows(x: Array) -> str:
    """Return where the pixels of a channel begin, which are the rows of a 1 x 1 convolution's matrix.

    *aligned*: at multiples of 16 bytes; *misaligned*: of 4, so that kernels with loads of 16 bytes do not take them;
    *odd*: at any address.
    """
    size = prod(x.shape[2:]) * x.itemsize
    if is_last(x) or size % _ALIGNED == 0:
        return "aligned"
    return "odd" if size % _LEAST_ALIGNED else "misaligned"


def _parts(out: Array, x: Array, weight: Array, mask: list[bool], groups: int, backward: bool) -> list[_Part]:
    rows, inputs, channels = out.elements // out.shape[1], prod(weight.shape[1:]), weight.shape[0] // groups
    if not backward:
        return [_Part(rows, channels, inputs, (x, weight, out))]
    places = prod(weight.shape[2:])
    found = []
    if mask[0]:
        pixels = x.elements // x.shape[1]
        stride = max(pixels // max(rows, 1), 1)  # leaves out places of the kernel for each pixel
        depth = max(channels * places // stride, channels)
        found.append(_Part(pixels, weight.shape[1], depth, (out, weight, x)))
    if mask[1]:
        found.append(_Part(channels, inputs, rows, (out, x, weight)))
    return found


def _product(chip: Chip, call: Call, part: _Part, kind: str, groups: int, x: Array, computed: str) -> tuple[float, int]:
    """Return the time and the number of kernels of one product with the layout changes around it."""
    form, backward, to_weight = constants("convolution"), computed != FORWARD, computed == WEIGHT
    if groups > 1 and _is_by_group(part, backward=backward):
        return _by_group(chip, part, groups), _KERNELS_OF_GROUP * groups
    tf32 = chip._replace(tf32=chip.cudnn_tf32)
    name = "half" if x.dtype in HALVES else "tf32" if tf32.precision(x.dtype) == "tf32" else "fp32"
    if kind == "few" and backward:
        rate = chip.half_of_16_bits if name == "half" else chip.rate(name)
        seconds = 2.0 * groups * part.m * part.n * part.k / (rate * form.gather_backward)
    elif kind == "few":
        tiles = groups * ceil(part.m / _GATHER_TILE) * ceil(part.n / _GATHER_TILE)
        share = min(ceil(part.n / (_GATHER_TILE // 2)) / 2, 1.0)
        gathering = ceil(tiles / chip.multiprocessors) * part.k * form.gather_seconds * share
        seconds = max(gathering, 2.0 * groups * part.m * part.n * part.k / tf32.rate(tf32.precision(x.dtype)))
    else:
        rows = _rows(x) if kind == "pointwise" else "aligned"
        padded = kind == "spatial" and _is_padded(call, x)
        # gradients of weights are sums over pixels, whose channels lie beside each other in channels-last order
        adjacent = (part.m, part.n) if to_weight and (is_last(x) or kind == "spatial") else (part.n, part.k)
        if rows == "aligned" and not padded and any(size * x.itemsize % _ALIGNED for size in adjacent):
            rows = "misaligned"
        rated = name if name == "fp32" or rows == "aligned" else f"{name}_{rows}"
        stored = sum(tensor.bytes for tensor in part.rewritten)
        work = product(tf32, rated, x.dtype, ProductSizes(groups, *part[:3]), "plain.nn", stored=stored)
        seconds = form.product_seconds + work.seconds / (form.product_weight if to_weight else form.product)
    if kind == "pointwise" or is_last(x) or prod(x.shape[2:]) == 1:
        return seconds, 2 if to_weight else 1
    rewritten = [tensor for tensor in part.rewritten if prod(tensor.shape[2:]) > 1]
    return seconds + sum(_layout_seconds(chip, tensor) for tensor in rewritten), 1 + len(rewritten)


def _is_padded(call: Call, x: Array) -> bool:
    """Return whether the change to channels-last pads the channels, so that products load 16 bytes at a time.

    Volumes, dilated and transposed filters keep the kernels of short loads, by left-out points of an H200.
    """
    dilated = set(whole_numbers(number(call, "dilation", "1"))) - {1}
    return len(x.shape) != _VOLUME and not dilated and number(call, "transposed") != "True" and not is_last(x)


def _is_by_group(part: _Part, *, backward: bool) -> bool:
    """Return whether cuDNN convolves group after group: products of matrices (one place) in backward.

    By kernel names on an H200, as ``allocation/cudnn/grouped.py`` has it for workspaces.
    """
    return backward and min(prod(tensor.shape[2:]) for tensor in part.rewritten) == 1


def _by_group(chip: Chip, part: _Part, groups: int) -> float:
    """Return the time of copying, multiplying and copying back each group."""
    form = constants("convolution")
    moved = 4 * sum(tensor.bytes for tensor in part.rewritten) / chip.bandwidth
    return _KERNELS_OF_GROUP * groups * form.group_kernel_seconds + moved


def _layout_seconds(chip: Chip, tensor: Array) -> float:
    """Return the time of a change between channels-first and channels-last, by tiles or by bandwidth."""
    form = constants("convolution")
    channels, places = tensor.shape[1], prod(tensor.shape[2:])
    tiles = tensor.shape[0] * ceil(channels / _LAYOUT_TILE) * ceil(places / _LAYOUT_TILE)
    by_tiles = tiles * _LAYOUT_TILE**2 / (form.layout_rate * chip.multiprocessors)
    return form.layout_seconds + max(by_tiles, 2 * tensor.bytes / (chip.bandwidth * form.layout_bandwidth))
