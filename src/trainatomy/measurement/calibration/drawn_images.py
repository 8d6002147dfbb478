"""Calibration cases with random feature maps: norms, activations, pooling, resampling, concatenation.

Each function draws one case.  Ranges are those of published networks on images, video and sound.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from random import Random
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from trainatomy.measurement.calibration.cases import BF16, F16, F32, Case, both_ways, leaf

if TYPE_CHECKING:
    from trainatomy.measurement.calibration.cases import Work

DTYPES = (F32, BF16, F16)
CHANNELS = (16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512, 768, 1024)
SIDES = (7, 10, 14, 20, 28, 32, 40, 56, 64, 80, 112)
BATCHES = (2, 4, 8, 16, 24, 32, 64, 128)
LEAST, MOST = 2**18, 2**28
"""Bytes of the larger side of a case."""


def square_images(random: Random, channels: int) -> tuple[int, ...]:
    """Draw the shape of a batch of square images."""
    side = random.choice(SIDES)
    return random.choice(BATCHES), channels, side, side


def maps(random: Random, *, volume: float = 0.0, least: int = 2**16) -> tuple[tuple[int, ...], torch.dtype, bool]:
    """Draw the shape and dtype of feature maps, and whether they are channels-last."""
    while True:
        dtype, shape = random.choice(DTYPES), square_images(random, random.choice(CHANNELS))
        if random.random() < volume:
            shape = (shape[0], shape[1], random.choice((4, 8, 16)), *shape[2:])
        if least <= prod(shape) * dtype.itemsize <= MOST:
            return shape, dtype, len(shape) == 4 and random.random() < 0.3


def feature_maps(shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool) -> torch.Tensor:
    """Return feature maps that require a gradient."""
    x = leaf(*shape, dtype=dtype)
    return x.detach().to(memory_format=torch.channels_last).requires_grad_() if channels_last else x


def of_maps(function: Callable[[torch.Tensor], torch.Tensor], *drawn: Any) -> Work:
    """Return a function of feature maps, forward and backward."""
    return both_ways(function, feature_maps(*drawn))


def norm(random: Random) -> Case:
    """Draw a batch norm or group norm of feature maps."""
    drawn = maps(random, volume=0.2)
    if random.random() < 0.5:
        return Case(partial(batch_norm, *drawn), runs=3)
    groups = random.choice([size for size in (1, 8, 16, 32) if drawn[0][1] % size == 0])
    return Case(partial(group_norm, groups, *drawn), runs=3)


def norm_of_channels_last(random: Random) -> Case:
    """Draw a batch norm of feature maps that are channels-last."""
    shape, dtype, _ = maps(random, least=LEAST)
    return Case(partial(batch_norm, shape, dtype, True), runs=3)


def published_norm(random: Random) -> Case:
    """Draw a batch norm of a published network for a batch of any size, mostly in bfloat16 (PyTorch's own kernels)."""
    while True:
        channels = random.choice(
            (16, 24, 32, 48, 64, 80, 96, 128, 144, 192, 240, 256, 384, 512, 576, 768, 960, 1024, 2048)
        )
        side, batch = (
            random.choice((4, 7, 8, 14, 17, 20, 28, 32, 35, 56, 64, 73, 112, 149)),
            round(2 ** random.uniform(1, 8)),
        )
        dtype = random.choice((BF16, BF16, BF16, F16, F32))
        if LEAST <= batch * channels * side**2 * dtype.itemsize <= MOST:
            break
    shape: tuple[int, ...] = (batch, channels, side, side)
    last = random.random() < 0.25
    return Case(partial(batch_norm, shape, dtype, last), runs=3)


def batch_norm(*drawn: Any) -> Work:
    """Return batch norm in training, with fp32 weights as under autocast."""
    x = feature_maps(*drawn)
    channels = x.shape[1]
    mean, variance = torch.zeros(channels, device="cuda"), torch.ones(channels, device="cuda")
    return both_ways(lambda x, w, b: F.batch_norm(x, mean, variance, w, b, True), x, leaf(channels), leaf(channels))


def group_norm(groups: int, *drawn: Any) -> Work:
    """Return group norm."""
    x = feature_maps(*drawn)
    weights = leaf(x.shape[1], dtype=x.dtype), leaf(x.shape[1], dtype=x.dtype)
    return both_ways(lambda x, w, b: F.group_norm(x, groups, w, b), x, *weights)


ACTIVATIONS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    F.hardswish, F.silu, F.relu, F.relu6, F.leaky_relu, F.elu, F.hardsigmoid, torch.sigmoid, F.mish, F.softplus,
    lambda x: F.glu(x, 1), lambda x: F.dropout2d(x, 0.1),
)  # fmt: skip


def activation(random: Random) -> Case:
    """Draw an activation of feature maps."""
    return Case(partial(of_maps, random.choice(ACTIVATIONS), *maps(random)), runs=3)


def pooling(random: Random) -> Case:
    """Draw a pooling: maximum or mean, over windows, over everything, over volumes."""
    shape, dtype, last = maps(random, volume=0.2, least=LEAST)
    kernel, stride, padding = random.choice(((2, 2, 0), (3, 2, 1), (3, 1, 1)))
    volume = len(shape) == 5
    kind = random.choice(("max", "max", "mean", "adaptive"))
    if kind == "adaptive":
        size = random.choice((1, 1, 1, 7))
        adaptive: Any = F.adaptive_avg_pool3d if volume else F.adaptive_avg_pool2d
        return Case(partial(of_maps, lambda x: adaptive(x, size), shape, dtype, last), runs=3)
    pool: Any = {"max": (F.max_pool2d, F.max_pool3d), "mean": (F.avg_pool2d, F.avg_pool3d)}[kind][volume]
    return Case(partial(of_maps, lambda x: pool(x, kernel, stride, padding), shape, dtype, last), runs=3)


def pooling_of_volumes(random: Random) -> Case:
    """Draw a maximum over windows of a volume, as in networks for video."""
    shape, dtype, _ = maps(random, volume=1.0, least=LEAST)
    kernel, stride, padding = random.choice((
        (3, 1, 1), (3, 2, 1), (2, 2, 0), ((1, 3, 3), (1, 2, 2), (0, 1, 1)), ((2, 2, 2), (2, 1, 1), 0)
    ))  # fmt: skip
    pool: Any = partial(F.max_pool3d, kernel_size=kernel, stride=stride, padding=padding)
    return Case(partial(of_maps, pool, shape, dtype, False), runs=3)


def interpolation(random: Random) -> Case:
    """Draw an interpolation to a larger image."""
    while True:
        shape, dtype, last = maps(random, volume=0.15)
        scale = random.choice((2, 2, 4, 8))
        if prod(shape) * dtype.itemsize * scale ** (len(shape) - 2) <= MOST:
            break
    flat = len(shape) == 4
    mode = random.choice(("nearest", "bilinear", "bilinear", "bicubic") if flat else ("nearest", "trilinear"))
    corners = None if mode == "nearest" else random.random() < 0.3
    enlarge = partial(F.interpolate, scale_factor=scale, mode=mode, align_corners=corners)
    return Case(partial(of_maps, enlarge, shape, dtype, last), runs=3)


def enlarged_images(random: Random) -> Case:
    """Draw a linear interpolation as heads of segmenters have it: to a size of any ratio, also from a single pixel."""
    while True:
        before = random.choice((1, 1, 4, 7, 8, 14, 16, 28, 32, 33, 56, 64))
        after = random.choice((7, 14, 28, 32, 33, 56, 64, 65, 128, 224, 256, 320, 512))
        batch, channels = round(2 ** random.uniform(1, 5)), random.choice((1, 3, 19, 20, 21, 64, 128, 256, 512))
        if before < after and 2**18 <= batch * channels * after**2 <= 2**26:
            break
    dtype, last = random.choice((F32, F32, F32, BF16, F16)), random.random() < 0.2
    mode = "nearest" if random.random() < 0.1 else "bilinear"
    corners = None if mode == "nearest" else random.random() < 0.3
    enlarge = partial(F.interpolate, size=(after, after), mode=mode, align_corners=corners)
    return Case(partial(of_maps, enlarge, (batch, channels, before, before), dtype, last), runs=3)


def cubic_interpolation(random: Random) -> Case:
    """Draw a cubic interpolation: of the embeddings of positions, as vision transformers have it, or of images."""
    dtype = random.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
    if random.random() < 0.6:
        before = random.choice((7, 14, 16, 24, 27, 32))
        after = tuple(random.choice((10, 14, 16, 20, 24, 32, 37, 48, 64)) for _ in range(2))
        shape: tuple[int, ...] = (1, random.choice((192, 384, 768, 1024)), before, before)
    else:
        side, scale = random.choice((16, 32, 64, 128)), random.choice((2, 3, 4))
        shape, after = (random.choice((2, 4, 8, 16)), random.choice((3, 16, 64)), side, side), (side * scale,) * 2
    enlarge = partial(F.interpolate, size=after, mode="bicubic", align_corners=random.random() < 0.2)
    return Case(partial(of_maps, enlarge, shape, dtype, False), runs=3)


def connection(random: Random) -> Case:
    """Draw a concatenation of many feature maps, as in dense blocks."""
    while True:
        dtype, growth, count = random.choice(DTYPES), random.choice((12, 24, 32, 48)), random.randint(2, 24)
        batch, _, side, _ = square_images(random, 1)
        if LEAST <= batch * side**2 * growth * (count + 2) * dtype.itemsize <= MOST:
            return Case(partial(connected, (batch, side), growth, count, dtype), runs=3)


def connected(size: tuple[int, int], growth: int, count: int, dtype: torch.dtype) -> Work:
    """Return the concatenation of ``count`` feature maps of ``growth`` channels to one of twice as many."""
    batch, side = size
    parts = [leaf(batch, channels, side, side, dtype=dtype) for channels in (2 * growth, *(growth,) * count)]
    return both_ways(lambda *parts: torch.cat(parts, 1), *parts)


def excitation(random: Random) -> Case:
    """Draw a squeeze and excitation: the mean of each channel, and a product with a factor for each."""
    return Case(partial(excited, *maps(random)), runs=3)


def excited(*drawn: Any) -> Work:
    """Return the mean of each channel and the product of each channel with a number."""
    x = feature_maps(*drawn)
    factor = leaf(x.shape[0], x.shape[1], 1, 1, dtype=x.dtype)
    return both_ways(lambda x, factor: x * factor + x.mean((2, 3), keepdim=True), x, factor)
