"""Convolutions as cuDNN computes them: products of implicit matrices, and changes of layout around them where images
come channel by channel.

FLOP: 2 x outputs x inputs of each (channels of a group x kernel's places); backward computes it once for the input's
gradient and once for the weight's (torch/utils/flop_counter.py).  The products are [images x places, inputs of an
output] x [inputs of an output, channels] in forward, and the two transposed ones in backward.  What else runs, by
traces of an H200 (cuDNN 9.19): unless the kernel has one place and a step of one, operands in channel-first order are
rewritten to channels-last and the result back, in tiles of 32 x 32; a bias is added, or summed, by kernels of PyTorch;
images of few channels are gathered number by number, far below the rate of tensor cores.  Depthwise ones are PyTorch's
own kernels (aten/src/ATen/native/cuda/DepthwiseConv2d.cu).  Constants: ``facts/efficiency.yaml``.
"""

from __future__ import annotations

from functools import cache
from math import ceil, log2, prod
from typing import NamedTuple

from trainatomy.catalog.files import read_yaml
from trainatomy.operators.cost.matmul import product
from trainatomy.operators.cost.work import HALVES, Chip, Work, number, whole_numbers
from trainatomy.results.operations import Array, Call

_LAYOUT_TILE, _GATHER_TILE, _ALIGNED = 32, 128, 16


class Form(NamedTuple):
    """Constants of convolutions, as in ``facts/efficiency.yaml``."""

    product: float
    product_weight: float
    product_seconds: float
    layout_bandwidth: float
    layout_rate: float
    layout_seconds: float
    gather_seconds: float
    gather_backward: float
    bias_bandwidth: float
    bias_seconds: float
    bias_sum_bandwidth: float
    bias_sum_seconds: float
    depthwise: float
    depthwise_weight: float
    depthwise_place_seconds: float


class _Part(NamedTuple):
    """One product: its matrices, and what is rewritten around it."""

    m: int
    n: int
    k: int
    rewritten: tuple[Array, ...]


def convolution(call: Call, chip: Chip) -> Work:
    """``convolution`` and ``convolution_backward``."""
    backward = "backward" in call.name
    out, x, weight = call.inputs[:3] if backward else (call.outputs[0], *call.inputs[:2])
    mask = _mask(call) if backward else [False, False, len(call.inputs) > 2]
    groups = int(number(call, "groups", "1"))
    times = sum(mask[:2]) if backward else 1
    flop = 2.0 * _outputs(call, out, x) * prod(weight.shape[1:]) * times
    depthwise = groups > 1 and weight.shape[1] == 1
    rate = "fp32" if depthwise else chip.precision(x.dtype, chip.cudnn_tf32)
    kind = "depthwise" if depthwise else "few" if _few(weight) else "pointwise" if _plain(call, weight) else "spatial"
    precision = "half" if x.dtype in HALVES else rate
    seconds = launches = 0.0
    if depthwise:
        seconds, launches = _depthwise(chip, call, (out, weight), mask, backward)
    else:
        for place, part in enumerate(_parts(out, x, weight, mask, groups, backward)):
            to_weight = backward and bool(place or not mask[0])
            more, kernels = _product(chip, part, kind, groups, x, backward=backward, to_weight=to_weight)
            seconds, launches = seconds + more, launches + kernels
    if mask[2]:
        seconds, launches = seconds + _bias(chip, out, backward), launches + 1
    family = f"convolution.{'backward' if backward else 'forward'}.{precision}.{kind}.{len(weight.shape) - 2}d"
    traffic = (out.bytes + x.bytes + weight.bytes) * max(times, 1)
    features = (log2(max(flop, 1)), log2(traffic), log2(x.shape[1]), log2(weight.shape[0]))
    return Work(family, features, flop, rate, traffic, int(launches), seconds)


def _bias(chip: Chip, out: Array, backward: bool) -> float:
    """Added to what is there, or its gradient summed over images and places."""
    form = _form()
    if backward:
        return form.bias_sum_seconds + out.bytes / (chip.bandwidth * form.bias_sum_bandwidth)
    return form.bias_seconds + 2 * out.bytes / (chip.bandwidth * form.bias_bandwidth)


def _mask(call: Call) -> list[bool]:
    """Which of input, weight and bias get a gradient."""
    text = number(call, "output_mask", "[True, True, True]")
    return [part.strip(" []") == "True" for part in text.split(",")]


def _outputs(call: Call, out: Array, x: Array) -> int:
    """Numbers that meet the whole kernel: of the result, or of the input where it is transposed."""
    return x.elements if number(call, "transposed") == "True" else out.elements


def _few(weight: Array) -> bool:
    """Fewer input channels than a load of tensor cores has, and not one of those that can be padded cheaply."""
    return weight.shape[1] * weight.itemsize < _ALIGNED


def _plain(call: Call, weight: Array) -> bool:
    """A product of the matrices as they lie: one place, one step."""
    return prod(weight.shape[2:]) == 1 and set(whole_numbers(number(call, "stride", "1"))) <= {1}


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


def _product(
    chip: Chip, part: _Part, kind: str, groups: int, x: Array, *, backward: bool, to_weight: bool
) -> tuple[float, int]:
    """Seconds and kernels of one product with what is rewritten around it."""
    form = _form()
    tf32 = chip._replace(tf32=chip.cudnn_tf32)
    name = "half" if x.dtype in HALVES else "tf32" if tf32.precision(x.dtype) == "tf32" else "fp32"
    if kind == "few" and backward:
        rate = chip.rate("tf32" if name == "half" else name)
        seconds = 2.0 * groups * part.m * part.n * part.k / (rate * form.gather_backward)
    elif kind == "few":
        tiles = groups * ceil(part.m / _GATHER_TILE) * ceil(part.n / _GATHER_TILE)
        share = min(ceil(part.n / (_GATHER_TILE // 2)) / 2, 1.0)
        gathering = ceil(tiles / chip.multiprocessors) * part.k * form.gather_seconds * share
        seconds = max(gathering, 2.0 * groups * part.m * part.n * part.k / tf32.rate(tf32.precision(x.dtype)))
    else:
        uneven = name != "fp32" and any(size * x.itemsize % _ALIGNED for size in (part.n, part.k))
        work = product(tf32, f"{name}_misaligned" if uneven else name, x.dtype, "nn", groups, *part[:3], "plain")
        seconds = form.product_seconds + work.seconds / (form.product_weight if to_weight else form.product)
    if kind == "pointwise" or x.strides[1] == 1:
        return seconds, 2 if to_weight else 1
    rewritten = [tensor for tensor in part.rewritten if prod(tensor.shape[2:]) > 1]
    return seconds + sum(_rewriting(chip, tensor) for tensor in rewritten), 1 + len(rewritten)


def _rewriting(chip: Chip, tensor: Array) -> float:
    """From channel-first order to channels-last or back: by tiles of channels x places, or by bandwidth."""
    form = _form()
    channels, places = tensor.shape[1], prod(tensor.shape[2:])
    tiles = tensor.shape[0] * ceil(channels / _LAYOUT_TILE) * ceil(places / _LAYOUT_TILE)
    by_tiles = tiles * _LAYOUT_TILE**2 / (form.layout_rate * chip.multiprocessors)
    return form.layout_seconds + max(by_tiles, 2 * tensor.bytes / (chip.bandwidth * form.layout_bandwidth))


def _depthwise(
    chip: Chip, call: Call, tensors: tuple[Array, Array], mask: list[bool], backward: bool
) -> tuple[float, int]:
    """A thread for each result, that reads its places; the weight's gradient has a block of threads for each of its
    numbers."""
    form = _form()
    out, weight = tensors
    flop = 2.0 * out.elements * prod(weight.shape[2:])
    seconds = flop / (chip.rate("fp32") * form.depthwise) * (1 if not backward else mask[0])
    if backward and mask[1]:
        blocks = form.depthwise_place_seconds * weight.elements * 132 / chip.multiprocessors
        seconds += flop / (chip.rate("fp32") * form.depthwise_weight) + blocks
    return seconds, max(sum(mask[:2]), 1)


@cache
def _form() -> Form:
    known = read_yaml("efficiency.yaml")["convolution"]
    return Form(**{name: known[name] for name in Form._fields})
