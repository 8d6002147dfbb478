"""Calibration cases with random shapes of kernels that other groups do not draw, or hardly.

Reductions of reordered tensors, scans, the loss of CTC, Fourier transforms, patches, samples of images by a grid,
distances, rarer activations and losses.
"""

from __future__ import annotations

from functools import partial
from math import prod
from random import Random
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from trainatomy.measurement.calibration.cases import BF16, F16, F32, Case, both_ways, leaf
from trainatomy.measurement.calibration.drawn_convolutions import Shape, convolved
from trainatomy.measurement.calibration.drawn_rows import between

if TYPE_CHECKING:
    from trainatomy.measurement.calibration.cases import Work

SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 100, 128, 197, 256, 300, 512, 1024)
LEAST, MOST, MOST_SCANNED = 2**19, 2**26, 2**24
"""Numbers of a tensor; of one that is scanned at most."""
WIDTHS = (4, 4, 8, 8, 8, 16, 16, 16, 24, 24, 32, 32, 40, 48, 56, 56, 64, 112)
"""Channels of a group of ResNeXts and RegNets, as often as they are drawn."""
MOST_GROUPED, MOST_INSIDE = 2600, 1.2e8
"""Channels of a convolution of groups, and numbers of its input."""


def reordered(random: Random) -> Case:
    """Draw a reduction of a tensor whose dimensions lie in another order than its shape says."""
    while True:
        shape = tuple(random.choice(SIZES) for _ in range(random.choice((3, 4, 4, 5, 6))))
        if LEAST <= prod(shape) <= MOST:
            break
    rank = len(shape)
    order = random.sample(range(rank), rank) if random.random() < 0.8 else list(range(rank))
    dims = tuple(sorted(random.sample(range(rank), random.choice((1, 1, 1, 2, 2, min(3, rank - 1))))))
    dtype = random.choice((F32, F32, F32, BF16, F16))
    kind = random.choice(("sum", "sum", "sum", "sum32", "mean", "amax"))
    keep = random.random() < 0.5
    return Case(partial(reordering, kind, shape, tuple(order), dims, keep, dtype), runs=3)


def reordering(
    kind: str, shape: tuple[int, ...], order: tuple[int, ...], dims: tuple[int, ...], keep: bool, dtype: torch.dtype
) -> Work:
    """Return the reduction."""
    stored = torch.randn([shape[d] for d in order], device="cuda", dtype=dtype)
    back = [order.index(d) for d in range(len(order))]
    x = stored.permute(back)
    if kind == "sum32":
        return lambda: x.sum(dims, keepdim=keep, dtype=F32)
    return lambda: getattr(x, kind)(dims, keepdim=keep)


def scan(random: Random) -> Case:
    """Draw a cumulative sum, product, logarithm of sums or extremum along any dimension."""
    while True:
        shape = tuple(random.choice((*SIZES, 2048, 4096)) for _ in range(random.choice((1, 2, 2, 3, 3, 4, 5))))
        if prod(shape) <= MOST_SCANNED:
            break
    kind = random.choice(("cumsum", "cumsum", "cumsum", "logcumsumexp", "cummax"))
    dtype = random.choice((F32, F32, BF16, F16, torch.int64))
    return Case(partial(scanning, kind, shape, random.randrange(len(shape)), dtype), runs=3)


def scanning(kind: str, shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> Work:
    """Return the scan, of numbers with its gradient, of integers alone."""
    if dtype == torch.int64:
        ids = torch.randint(0, 2, shape, device="cuda")
        return lambda: ids.cumsum(dim)
    x = leaf(*shape, dtype=dtype)
    if kind == "cummax":
        return both_ways(lambda x: x.cummax(dim).values, x)
    return both_ways(lambda x: getattr(torch, kind)(x, dim), x)


def ctc(random: Random) -> Case:
    """Draw a loss of CTC, as PyTorch computes it."""
    batch, steps, classes = between(random, 2, 64), between(random, 40, 1600), between(random, 28, 4000)
    if batch * steps * classes > 2**26:
        classes = 32
    return Case(partial(aligned, batch, steps, classes, between(random, 5, max(steps // 3, 6))), runs=3)


def aligned(batch: int, steps: int, classes: int, longest: int) -> Work:
    """Return the loss of CTC and its gradient."""
    x = torch.randn(steps, batch, classes, device="cuda").log_softmax(-1).requires_grad_()
    lengths = torch.randint(max(longest // 2, 1), longest + 1, (batch,), device="cuda")
    targets = torch.randint(1, classes, (batch, longest), device="cuda")
    whole = torch.full((batch,), steps, device="cuda")

    def work() -> None:
        with torch.backends.cudnn.flags(enabled=False):
            torch.autograd.grad(F.ctc_loss(x, targets, whole, lengths), x)

    return work


def usual_groups(random: Random) -> Case:
    """Draw a 3 x 3 convolution of groups, as ResNeXts and RegNets have them, for a batch of any size."""
    while True:
        width, stage = random.choice(WIDTHS), random.randrange(4)
        channels = between(random, 48, 480) * 2**stage
        groups = max(round(channels / width), 2)
        if random.random() < 0.35:
            groups = random.choice((32, 32, 16, 64))
        side, stride = (56, 28, 14, 7)[stage], random.choice((1, 1, 1, 2))
        image = (between(random, 6, 192), width * groups, side * stride, side * stride)
        if prod(image) <= MOST_INSIDE and width * groups <= MOST_GROUPED:
            break
    dtype, last = random.choice((F32, F32, BF16, F16)), random.random() < 0.1
    shape = Shape(image, (width * groups, width, 3, 3), stride, (1, 1), groups=groups, channels_last=last)
    return Case(partial(convolved, shape, dtype), tf32=True, warm=True, runs=3)


def other(random: Random) -> Case:
    """Draw a kernel of which few shapes were measured."""
    dtype = random.choice((F32, F32, F16, BF16))
    kind = random.choice((
        "fft", "fft", "unfold", "fold", "grid", "grid", "shuffle", "unshuffle", "smooth", "distance", "volume up",
        "volume up", "cubic", "cubic", "hardswish", "hardsigmoid", "prelu", "mish", "linear up", "linear up",
        "linear up", "linear up", "safe softmax", "norm last", "norm last", "index_add", "scatter_add", "gather",
        "hardtanh", "softplus", "logsigmoid", "glu", "sort", "topk", "huber", "kl",
    ))  # fmt: skip
    numbers = tuple(random.random() for _ in range(8))
    return Case(partial(others, kind, numbers, dtype), runs=3)


def others(kind: str, u: tuple[float, ...], dtype: torch.dtype) -> Work:
    """Return a kernel of a kind, whose sizes follow from numbers between 0 and 1."""

    def pick(number: int, least: float, most: float) -> int:
        return round(least * (most / least) ** u[number])

    if kind == "fft":
        x = torch.randn(pick(0, 2, 32), pick(1, 64, 1024), pick(2, 128, 1024), device="cuda", requires_grad=True)
        return both_ways(lambda x: torch.fft.fft2(x, dim=(-2, -1)).real, x)
    if kind in ("unfold", "fold"):
        side, k = 4 * pick(0, 4, 24), (2, 3, 4)[int(u[1] * 3)]
        c, n = 8 * pick(2, 1, 24), pick(3, 2, 32)
        if kind == "unfold":
            return both_ways(lambda x: F.unfold(x, k, padding=k // 2, stride=2), leaf(n, c, side, side, dtype=dtype))
        count = ((side + 2 * (k // 2) - k) // 2 + 1) ** 2
        x = leaf(n, c * k * k, count, dtype=dtype)
        return both_ways(lambda x: F.fold(x, (side, side), k, padding=k // 2, stride=2), x)
    if kind == "grid":
        n, c, a, b = pick(0, 2, 32), pick(1, 3, 128), pick(2, 8, 96), pick(3, 8, 96)
        grid = (torch.rand(n, b, b, 2, device="cuda", dtype=dtype) * 2 - 1).requires_grad_()
        return both_ways(lambda x, g: F.grid_sample(x, g, align_corners=False), leaf(n, c, a, a, dtype=dtype), grid)
    if kind in ("shuffle", "unshuffle"):
        n, c, s = pick(0, 2, 32), 4 * pick(1, 1, 32), 2 * pick(2, 8, 96)
        function = F.pixel_shuffle if kind == "shuffle" else F.pixel_unshuffle
        return both_ways(lambda x: function(x, 2), leaf(n, c, s, s, dtype=dtype))
    if kind == "smooth":
        n, a, b = pick(0, 1, 16), pick(1, 16, 128), pick(2, 32, 256)
        x = leaf(n, 3, a, a, dtype=dtype)
        return both_ways(lambda x: F.interpolate(x, (b, b), mode="bilinear", antialias=True), x)
    if kind == "distance":
        return both_ways(
            torch.cdist, leaf(pick(0, 1, 16), pick(1, 50, 900), 4), leaf(pick(0, 1, 16), pick(2, 5, 400), 4)
        )
    if kind == "volume up":
        n, c, s = pick(0, 1, 8), pick(1, 4, 96), pick(2, 6, 40)
        x, mode = leaf(n, c, s, s, s, dtype=dtype), ("trilinear", "nearest")[u[3] < 0.3]
        return both_ways(lambda x: F.interpolate(x, scale_factor=2, mode=mode), x)
    if kind in ("cubic", "linear up"):
        n, c, a = pick(0, 1, 24), pick(1, 3, 768), pick(2, 6, 64)
        b = max(round(a * 2 ** (u[3] * 4.5 - 1)), 2)
        x = leaf(n, min(c, max(2**25 // (n * b * b), 3)), a, a, dtype=dtype)
        mode = "bicubic" if kind == "cubic" else "bilinear"
        return both_ways(lambda x: F.interpolate(x, (b, b), mode=mode, align_corners=False), x)
    if kind == "norm last":
        n, c, s = pick(0, 2, 128), 8 * pick(1, 2, 128), pick(2, 5, 112)
        n = max(min(n, 2**26 // (c * s * s)), 1)
        x = leaf(n, c, s, s, dtype=dtype).detach().contiguous(memory_format=torch.channels_last).requires_grad_()
        scale, shift = leaf(c), leaf(c)
        return both_ways(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), x, scale, shift)
    if kind == "safe softmax":
        n, t = pick(0, 2, 128), pick(1, 32, 700)
        x = leaf(n, t, t, dtype=dtype)
        return both_ways(lambda x: torch.ops.aten._safe_softmax(x, -1), x)
    if kind in ("index_add", "scatter_add", "gather"):
        rows, width, count = pick(0, 64, 40000), pick(1, 1, 1024), pick(2, 256, 40000)
        x, ids = leaf(count, width), torch.randint(rows, (count,), device="cuda")
        wide = ids[:, None].expand(count, width)
        if kind == "index_add":
            return both_ways(lambda x: torch.zeros(rows, width, device="cuda").index_add(0, ids, x), x)
        if kind == "scatter_add":
            return both_ways(lambda x: torch.zeros(rows, width, device="cuda").scatter_add(0, wide, x), x)
        return both_ways(lambda w: w.gather(0, wide), leaf(rows, width))
    rows, width = pick(0, 256, 40000), pick(1, 16, 2048)
    x = leaf(rows, width, dtype=dtype)
    if kind in ("sort", "topk"):
        k = pick(2, 1, 16)
        return both_ways((lambda x: x.sort(-1).values) if kind == "sort" else lambda x: x.topk(k, -1).values, x)
    if kind == "prelu":
        return both_ways(F.prelu, leaf(pick(0, 2, 64), pick(1, 16, 256), 64, 64, dtype=dtype), leaf(1, dtype=dtype))
    if kind in ("huber", "kl"):
        y = torch.randn_like(x)
        return both_ways((lambda x: F.huber_loss(x, y)) if kind == "huber" else lambda x: F.kl_div(x, y), x)
    functions: dict[str, Any] = {
        "hardswish": F.hardswish, "hardsigmoid": F.hardsigmoid, "mish": F.mish, "hardtanh": F.hardtanh,
        "softplus": F.softplus, "logsigmoid": F.logsigmoid, "glu": F.glu,
    }  # fmt: skip
    x = leaf(rows, 2 * (width // 2), dtype=dtype)
    return both_ways(functions[kind], x)
