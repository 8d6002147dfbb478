"""Calibration cases with random convolutions, drawn by kind.

Ranges are those of published networks: groups of ShuffleNet, ResNeXt and RegNet, rates of DeepLab, kernels of
MobileNet, EfficientNet, ConvNeXt and wav2vec 2.0, volumes of R(2+1)D, connections of DenseNet.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from trainatomy.measurement.calibration import published_layers as layers
from trainatomy.measurement.calibration.cases import Case, both_ways, leaf
from trainatomy.measurement.calibration.drawn_images import BATCHES, CHANNELS, DTYPES, LEAST, MOST, square_images

if TYPE_CHECKING:
    from trainatomy.measurement.calibration.cases import Work

MOST_PUBLISHED = 2**30
"""Bytes of the larger side of a layer of a published network."""
MOST_FLOP = 4e11
MOST_GROUPED = 2048
"""Channels of a convolution of wide groups."""


class Shape(NamedTuple):
    """A convolution: weight and image, and what is done with them."""

    image: tuple[int, ...]
    weight: tuple[int, ...]
    stride: int | tuple[int, ...] = 1
    padding: tuple[int, ...] = ()
    dilation: int = 1
    groups: int = 1
    channels_last: bool = False
    bias: bool = False
    transposed: bool = False
    stem: bool = False


def convolution(random: Random, kind: str) -> Case:
    """Draw a convolution of a kind, forward and backward."""
    while True:
        dtype = random.choice(DTYPES)
        shape = _DRAWS[kind](random)
        places = prod(shape.image[2:]) / (1 if shape.transposed else prod(_each(shape.stride, len(shape.image) - 2)))
        flop = 2 * shape.image[0] * places * prod(shape.weight)
        out = shape.image[0] * places * shape.weight[0]
        size = max(prod(shape.image), out) * dtype.itemsize
        most = MOST_PUBLISHED if kind.startswith("published") else MOST
        if LEAST <= size <= most and flop <= MOST_FLOP:
            return Case(partial(convolved, shape, dtype), tf32=True, warm=True, runs=3)


def _each(stride: int | tuple[int, ...], space: int) -> tuple[int, ...]:
    """Return the stride in each dimension of space."""
    return stride if isinstance(stride, tuple) else (stride,) * space


def convolved(shape: Shape, dtype: torch.dtype) -> Work:
    """Return the convolution; the input of a stem (the batch) gets no gradient."""
    x, w = leaf(*shape.image, dtype=dtype), leaf(*shape.weight, dtype=dtype)
    if shape.channels_last and len(shape.image) == 3:
        x = x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    elif shape.channels_last:
        order = torch.channels_last if len(shape.image) == 4 else torch.channels_last_3d
        x, w = (tensor.detach().to(memory_format=order).requires_grad_() for tensor in (x, w))
    x = x.detach() if shape.stem else x
    biases = [leaf(shape.weight[1] if shape.transposed else shape.weight[0], dtype=dtype)] if shape.bias else []
    space = len(shape.image) - 2
    options: dict[str, Any] = {"stride": shape.stride, "padding": shape.padding or 0, "groups": shape.groups}
    if shape.transposed:
        apply: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[space - 1]
    else:
        apply = (F.conv1d, F.conv2d, F.conv3d)[space - 1]
        options["dilation"] = shape.dilation
    return both_ways(lambda x, w, *b: apply(x, w, *b, **options), x, w, *biases)


def _depthwise(random: Random) -> Shape:
    channels, kernel, dilation = random.choice(CHANNELS), random.choice((3, 3, 5, 7)), random.choice((1, 1, 1, 2))
    return Shape(
        square_images(random, channels), (channels, 1, kernel, kernel), random.choice((1, 1, 2)),
        (dilation * (kernel // 2),) * 2, dilation, channels, channels_last=random.random() < 0.4,
        bias=random.random() < 0.3,
    )  # fmt: skip


def _wide_depthwise(random: Random) -> Shape:
    """Draw a depthwise convolution of a large kernel, as ConvNeXt and RepLKNet have them."""
    channels, kernel = (
        random.choice((96, 128, 192, 256, 384, 512, 768, 1024, 1536)),
        random.choice((5, 7, 7, 7, 7, 13, 31)),
    )
    image = (random.choice(BATCHES), channels, *(random.choice((7, 8, 12, 14, 16, 28, 32, 48, 56, 64)),) * 2)
    return Shape(
        image, (channels, 1, kernel, kernel), 1, (kernel // 2,) * 2, groups=channels,
        channels_last=random.random() < 0.3, bias=random.random() < 0.7,
    )  # fmt: skip


def _long_depthwise(random: Random) -> Shape:
    """Draw a depthwise convolution along a sequence, as Nystromformer, Conformer and ConvBERT have them."""
    batch, length = random.choice(BATCHES), random.choice((128, 250, 384, 512, 750, 1024))
    bias = random.random() < 0.3
    if random.random() < 0.5:  # over the sequence of each head
        heads, kernel = random.choice((4, 8, 12, 16)), random.choice((9, 17, 33, 65))
        return Shape(
            (batch, heads, length, 64), (heads, 1, kernel, 1), 1, (kernel // 2, 0), groups=heads, bias=bias
        )  # fmt: skip
    channels, kernel = random.choice((256, 384, 512, 768, 1024)), random.choice((9, 15, 31))
    return Shape((batch, channels, length), (channels, 1, kernel), 1, (kernel // 2,), groups=channels, bias=bias)


def _grouped(random: Random) -> Shape:
    groups, width = random.choice((2, 3, 4, 8, 16, 32, 32, 64)), random.choice((4, 8, 16, 24, 32, 64))
    channels, kernel = groups * width, random.choice((1, 3, 3, 3))
    return Shape(
        square_images(random, channels), (channels, width, kernel, kernel), random.choice((1, 1, 2)),
        (kernel // 2,) * 2, groups=groups, channels_last=random.random() < 0.3,
    )  # fmt: skip


def _wide_groups(random: Random) -> Shape:
    """Draw a convolution of few, wide groups, as RegNet and ResNeXt have them."""
    width = random.choice((8, 16, 24, 40, 48, 56, 64, 112, 120, 168, 232, 264))
    groups = random.choice([groups for groups in (2, 3, 4, 5, 8, 10, 14, 16, 32) if groups * width <= MOST_GROUPED])
    channels = groups * width
    return Shape(
        square_images(random, channels), (channels, width, 3, 3), random.choice((1, 1, 1, 2)), (1, 1),
        groups=groups, channels_last=random.random() < 0.15,
    )  # fmt: skip


def _dilated(random: Random) -> Shape:
    before, after, rate = (
        random.choice(CHANNELS[4:]),
        random.choice(CHANNELS[4:11]),
        random.choice((2, 2, 4, 6, 12, 18)),
    )
    return Shape(square_images(random, before), (after, before, 3, 3), 1, (rate, rate), rate)


def _volume(random: Random) -> Shape:
    before, after = random.choice((3, 16, 32, 64, 64, 128, 256, 512)), random.choice((16, 32, 64, 64, 128, 256, 512))
    kernel = random.choice(((3, 3, 3), (3, 3, 3), (1, 3, 3), (3, 1, 1), (1, 1, 1)))
    side, frames = random.choice((7, 14, 28, 56, 112)), random.choice((4, 8, 16, 32))
    image = (random.choice((1, 2, 4, 8, 16)), before, frames, side, side)
    padding = tuple(size // 2 for size in kernel)
    return Shape(image, (after, before, *kernel), random.choice((1, 1, 2)), padding, stem=before == 3)


def _sequence(random: Random) -> Shape:
    channels, kernel = random.choice((64, 128, 256, 512, 768)), random.choice((1, 2, 3, 3, 5, 10, 31))
    groups = random.choice((1, 1, 1, 16, channels))
    image = (random.choice((1, 2, 4, 8, 16, 32)), channels, random.choice((100, 250, 400, 1000, 1999, 3000, 7999)))
    weight = (channels, channels // groups, kernel)
    stride = random.choice((1, 1, 2)) if groups == 1 else 1
    return Shape(image, weight, stride, (kernel // 2,), groups=groups, bias=random.random() < 0.5)


def _positional(random: Random) -> Shape:
    """Draw a convolution over positions, as wav2vec 2.0 and its kin have one before their layers."""
    channels, groups = random.choice((256, 512, 768, 768, 1024)), random.choice((8, 16, 16))
    kernel = random.choice((19, 64, 95, 128, 128, 128))
    image = (random.choice((2, 4, 6, 8, 16)), channels, random.randint(49, 900))
    weight = (channels, channels // groups, kernel)
    return Shape(image, weight, 1, (kernel // 2,), groups=groups, channels_last=random.random() < 0.7, bias=True)


def _strided_groups(random: Random) -> Shape:
    """Draw a convolution of groups that shortens a sequence, as SEW has it over positions."""
    width, groups = random.choice((16, 24, 32, 48, 48, 64)), random.choice((4, 8, 16, 16))
    kernel, stride = random.choice((3, 9, 19, 31, 64, 128, 128)), random.choice((2, 2, 2, 3, 4))
    image = (random.choice((2, 4, 6, 8, 16)), groups * width, random.randint(49, 900))
    weight = (groups * width, width, kernel)
    return Shape(image, weight, stride, (kernel // 2,), groups=groups, channels_last=random.random() < 0.6, bias=True)


def _published_groups(random: Random) -> Shape:
    """Draw a layer of a published network of groups, for a batch of any size."""
    width, groups, side, stride = random.choice(layers.GROUPS)
    channels = width * groups
    image = (round(2 ** random.uniform(3, 7)), channels, side, side)
    return Shape(image, (channels, width, 3, 3), stride, (1, 1), groups=groups, channels_last=random.random() < 0.1)


def _sound(random: Random) -> Shape:
    """Draw a layer of an encoder of sound, whose strides shorten the sequence."""
    channels, (kernel, stride) = random.choice((32, 128, 512, 512)), random.choice(((10, 5), (3, 2), (3, 2), (2, 2)))
    inside = 1 if stride == 5 else channels
    image = (random.choice((2, 4, 6, 8, 16)), inside, random.randint(400, 160_000 if inside == 1 else 32_000))
    return Shape(image, (channels, inside, kernel), stride, (0,), bias=random.random() < 0.3)


def _channels_last(random: Random) -> Shape:
    before, after, kernel = random.choice(CHANNELS), random.choice(CHANNELS), random.choice((1, 1, 3, 3, 7))
    return Shape(
        square_images(random, before), (after, before, kernel, kernel), random.choice((1, 1, 2)), (kernel // 2,) * 2,
        channels_last=True,
    )  # fmt: skip


def _dense(random: Random) -> Shape:
    growth, before = random.choice((12, 24, 32, 48)), 32 * random.randint(2, 40)
    narrow = random.random() < 0.5
    after, inside = (4 * growth, before) if narrow else (growth, 4 * growth)
    kernel = 1 if narrow else 3
    return Shape(square_images(random, inside), (after, inside, kernel, kernel), 1, (kernel // 2,) * 2)


def _plain(random: Random) -> Shape:
    before, after = random.choice(CHANNELS), random.choice(CHANNELS)
    kernel = random.choice(((1, 1), (1, 1), (3, 3), (3, 3), (3, 3), (5, 5), (1, 7), (7, 1)))
    padding = tuple(size // 2 for size in kernel)
    return Shape(square_images(random, before), (after, before, *kernel), random.choice((1, 1, 1, 2)), padding,
                 bias=random.random() < 0.3)  # fmt: skip


def _stem(random: Random) -> Shape:
    kernel = random.choice((3, 3, 4, 5, 7, 11, 14, 16))
    stride = kernel if kernel in (4, 14, 16) else random.choice((1, 2, 4))
    side = random.choice((64, 128, 160, 224, 256, 299, 384))
    image = (random.choice(BATCHES), random.choice((1, 3, 3, 3)), side, side)
    weight = (random.choice((16, 24, 32, 64, 96, 128, 768)), image[1], kernel, kernel)
    padding = (0 if stride == kernel else kernel // 2,) * 2
    return Shape(image, weight, stride, padding, bias=random.random() < 0.5, stem=True,
                 channels_last=random.random() < 0.3)  # fmt: skip


def _transposed(random: Random) -> Shape:
    before, after = random.choice(CHANNELS[2:]), random.choice(CHANNELS[2:10])
    kernel, stride, padding = random.choice(((2, 2, 0), (4, 2, 1), (3, 2, 1), (3, 1, 1)))
    return Shape(square_images(random, before), (before, after, kernel, kernel), stride, (padding,) * 2,
                 bias=random.random() < 0.5, transposed=True)  # fmt: skip


def _layer(random: Random) -> Shape:
    """Draw a layer of a published network, for a batch of any size."""
    (before, after, *places), kernel, stride = random.choice(layers.LAYERS)
    image = (round(2 ** random.uniform(1, 8)), before, *places)
    padding = tuple(size // 2 for size in kernel)
    return Shape(
        image, (after, before, *kernel), stride, padding, bias=random.random() < 0.3,
        channels_last=len(places) == 2 and random.random() < 0.2,
    )  # fmt: skip


def _product(random: Random) -> Shape:
    """Draw a 1 x 1 convolution of a published network, for a batch of any size."""
    before, after, side = random.choice(layers.PRODUCTS)
    image = (round(2 ** random.uniform(2, 8)), before, side, side)
    return Shape(image, (after, before, 1, 1), 1, (0, 0), bias=random.random() < 0.3)


def _first_layer(random: Random) -> Shape:
    """Draw the first layer of a published network, for a batch of any size."""
    after, kernel, stride, side = random.choice(layers.STEMS)
    image = (round(2 ** random.uniform(3, 9)), 3, side, side)
    return Shape(
        image, (after, 3, kernel, kernel), stride, (kernel // 2,) * 2, bias=random.random() < 0.5,
        stem=random.random() < 0.8, channels_last=random.random() < 0.2,
    )  # fmt: skip


def _first_video_layer(random: Random) -> Shape:
    """Draw the first layer of a published network on videos, for a batch of any size."""
    after, kernel, stride = random.choice(layers.VIDEO_STEMS)
    image = (
        round(2 ** random.uniform(1, 5)),
        3,
        random.choice((8, 16, 32)),
        *(random.choice((112, 112, 160, 224)),) * 2,
    )
    padding = tuple(size // 2 for size in kernel)
    return Shape(image, (after, 3, *kernel), stride, padding, stem=random.random() < 0.8)


def _grown(random: Random) -> Shape:
    """Draw a transposed convolution that doubles the image, as a decoder has them."""
    after, before, side = random.choice(
        ((3, 64, 32), (64, 128, 16), (128, 256, 8), (256, 512, 4), (64, 128, 64), (64, 64, 128))
    )
    kernel, padding = random.choice(((4, 1), (4, 1), (2, 0)))
    image = (round(2 ** random.uniform(3, 8)), before, side, side)
    return Shape(image, (before, after, kernel, kernel), 2, (padding,) * 2, bias=True, transposed=True)


def _other_layer(random: Random) -> Shape:
    """Draw one of ``OTHER_LAYERS``, for a batch of any size."""
    before, after, side, kernel, stride = random.choice(layers.OTHER_LAYERS)
    padding = (0, 0) if kernel == (2, 2) else tuple(size // 2 for size in kernel)
    image = (round(2 ** random.uniform(1, 7)), before, side, side)
    return Shape(
        image, (after, before, *kernel), stride, padding, bias=random.random() < 0.3,
        channels_last=random.random() < 0.1,
    )  # fmt: skip


def _published_dilated(random: Random) -> Shape:
    """Draw a dilated layer of a network on images that keeps their size, or on sequences as WaveNet has them."""
    batch, bias = round(2 ** random.uniform(1, 6)), random.random() < 0.3
    if random.random() < 0.6:
        before, after, rates = random.choice((
            (256, 256, (2,)), (512, 512, (2, 4)), (512, 512, (4,)), (2048, 256, (6, 12, 18)), (2048, 256, (12, 24, 36)),
            (960, 256, (6, 12, 18)), (128, 128, (2, 4)), (64, 64, (2, 4, 8)), (320, 256, (6, 12, 18)),
        ))  # fmt: skip
        side, rate = random.choice((24, 28, 32, 32, 33, 41, 48, 60, 64, 65)), random.choice(rates)
        return Shape((batch, before, side, side), (after, before, 3, 3), 1, (rate, rate), rate, bias=bias)
    before, after = random.choice(((64, 128), (32, 64), (128, 128), (256, 256), (512, 512), (128, 512), (64, 64)))
    kernel, rate, length = random.choice((2, 3, 3, 5)), 2 ** random.randint(1, 9), round(2 ** random.uniform(10, 15))
    padding = (rate * (kernel - 1) // 2,)
    return Shape((batch, before, length), (after, before, kernel), 1, padding, rate, bias=bias)


_DRAWS: dict[str, Callable[[Random], Shape]] = {
    "depthwise": _depthwise,
    "wide depthwise": _wide_depthwise,
    "grouped": _grouped,
    "wide groups": _wide_groups,
    "dilated": _dilated,
    "three-dimensional": _volume,
    "sequence": _sequence,
    "channels-last": _channels_last,
    "dense": _dense,
    "plain": _plain,
    "stem": _stem,
    "transposed": _transposed,
    "positional": _positional,
    "sound": _sound,
    "published": _layer,
    "published first": _first_layer,
    "published video": _first_video_layer,
    "doubling": _grown,
    "long depthwise": _long_depthwise,
    "strided groups": _strided_groups,
    "published groups": _published_groups,
    "published 1 x 1": _product,
    "published others": _other_layer,
    "published dilated": _published_dilated,
}
KINDS = tuple(_DRAWS)
