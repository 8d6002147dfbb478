"""Calibration cases with random shapes: operands that are repeated or transposed, reductions, indices, moves, products.

Kinds of operators that many transformers use and of which other groups have few shapes or none.
"""

from __future__ import annotations

from functools import partial
from math import prod
from random import Random
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from trainatomy.measurement.calibration.cases import BF16, F16, F32, Case, both_ways, leaf
from trainatomy.measurement.calibration.cases import random as normal

if TYPE_CHECKING:
    from trainatomy.measurement.calibration.cases import Work

DTYPES = (F32, F32, BF16, F16)
LEAST, MOST = 2**19, 2**27
"""Numbers of the largest tensor of a case."""
MOST_FLOP = 4e11


def between(random: Random, least: float, most: float) -> int:
    """Return a whole number whose logarithm is uniform."""
    return round(least * (most / least) ** random.random())


def shape_of(random: Random, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Draw the shape of a tensor."""
    while True:
        rank = random.choice(ranks)
        sizes = (2, 3, 4, 5, 8, 12, 16, 24, 32, 49, 64, 96, 128, 197, 256, 300, 512, 768, 1024, 3072)
        shape = tuple(random.choice(sizes) for _ in range(rank))
        if LEAST <= prod(shape) <= MOST:
            return shape


def repeated(random: Random) -> Case:
    """Draw an operator of tensors of which one is repeated along dimensions, or lies in another order."""
    shape, dtype = shape_of(random, (2, 3, 4, 5)), random.choice(DTYPES)
    other = tuple(1 if random.random() < 0.45 else size for size in shape)
    swapped = random.sample(range(len(shape)), 2) if random.random() < 0.3 else None
    kind = random.choice(("mul", "mul", "add", "add", "where", "masked_fill", "expanded"))
    mixed = random.choice(DTYPES) if random.random() < 0.2 else dtype
    return Case(partial(repeating, kind, shape, other, swapped, dtype, mixed), runs=3)


def repeating(
    kind: str, shape: tuple[int, ...], other: tuple[int, ...], swapped: Any, dtype: torch.dtype, mixed: torch.dtype
) -> Work:
    """Return the operator, forward and backward where both tensors are numbers."""
    x = leaf(*shape, dtype=dtype)
    if swapped is not None:
        x = x.detach().transpose(*swapped).contiguous().transpose(*swapped).requires_grad_()
    if kind in ("where", "masked_fill"):
        mask = torch.rand(other, device="cuda") < 0.5
        if kind == "where":
            return both_ways(lambda x: torch.where(mask, x, 0.0), x)
        return both_ways(lambda x: x.masked_fill(mask, -1e4), x)
    y = leaf(*other, dtype=mixed)
    if kind == "expanded":
        wide = y.detach().expand(shape)
        return lambda: wide * x.detach()
    function: Any = torch.mul if kind == "mul" else torch.add
    return both_ways(function, x, y)


def reduced(random: Random) -> Case:
    """Draw a reduction over any dimensions."""
    shape, dtype = shape_of(random, (2, 2, 3, 4)), random.choice(DTYPES)
    dims = tuple(sorted(random.sample(range(len(shape)), random.randint(1, max(len(shape) - 1, 1)))))
    function: Any = random.choice((
        lambda x, d: x.sum(d), lambda x, d: x.sum(d), lambda x, d: x.mean(d), lambda x, d: x.pow(2).mean(d, True),
        lambda x, d: x.amax(d), lambda x, d: x.float().var(d), lambda x, d: torch.linalg.vector_norm(x, dim=d),
        lambda x, d: torch.logsumexp(x, d), lambda x, d: x.max(d[0]).values, lambda x, d: x.sum(d, dtype=F32),
    ))  # fmt: skip
    return Case(partial(reducing, function, shape, dims, dtype), runs=3)


def reducing(function: Any, shape: tuple[int, ...], dims: tuple[int, ...], dtype: torch.dtype) -> Work:
    """Return the reduction, forward and backward."""
    return both_ways(lambda x: function(x, dims), leaf(*shape, dtype=dtype))


def tokens(random: Random) -> Case:
    """Draw an embedding of which tokens occur often: all the same, few, positions, or as frequent as words are."""
    width, entries = random.choice((16, 32, 64, 128, 256, 512, 768, 1024)), between(random, 2, 60000)
    kind = random.choice(("same", "same", "few", "positions", "words", "random"))
    batch, length = random.choice((1, 2, 4, 8, 16, 32)), between(random, 64, 2048)
    return Case(partial(embedded, kind, batch, length, entries, width, random.choice((F32, F32, BF16))), runs=3)


def embedded(kind: str, batch: int, length: int, entries: int, width: int, dtype: torch.dtype) -> Work:
    """Return the embedding, forward and backward."""
    shape = (batch, length)
    if kind == "same":
        ids = torch.full(shape, entries - 1, device="cuda")
    elif kind == "few":
        ids = torch.randint(min(entries, 8), shape, device="cuda")
    elif kind == "positions":
        ids = (torch.arange(length, device="cuda") % entries).expand(shape).contiguous()
    elif kind == "words":
        ids = (entries ** torch.rand(shape, device="cuda")).long().clamp(max=entries) - 1
    else:
        ids = torch.randint(entries, shape, device="cuda")
    return both_ways(lambda w: F.embedding(ids, w), leaf(entries, width, dtype=dtype))


def accumulated(random: Random) -> Case:
    """Draw a selection by index whose gradient adds values where indices repeat."""
    kind, dtype = random.choice(("pairs", "rows", "rows", "columns", "biases")), random.choice((F32, F32, BF16))
    if kind == "pairs":  # of features, as recommenders have them
        shape: tuple[int, ...] = (between(random, 128, 8192), *(random.randint(6, 40),) * 2)
        count = shape[1] * (shape[1] - 1) // 2
    elif kind == "biases":  # of relative positions, for each head
        window = random.choice((7, 8, 12, 14, 16))
        shape, count = ((2 * window - 1) ** 2, random.choice((3, 4, 6, 8, 12, 16, 24, 32))), window**4
    elif kind == "columns":
        shape = (random.choice((2, 4, 8, 16)), between(random, 64, 1024), random.choice((1, 4, 64, 256, 768)))
        count = between(random, 16, 2048)
    else:
        shape = (between(random, 64, 30000), random.choice((1, 2, 8, 64, 256, 768, 1024)))
        count = between(random, 64, 60000 if shape[1] <= 256 else 8192)
    return Case(partial(selecting, kind, shape, count, dtype), runs=3)


def selecting(kind: str, shape: tuple[int, ...], count: int, dtype: torch.dtype) -> Work:
    """Return the selection, forward and backward."""
    x = leaf(*shape, dtype=dtype)
    if kind == "pairs":
        first, second = torch.triu_indices(shape[1], shape[1], 1, device="cuda")
        return both_ways(lambda x: x[:, first, second], x)
    ids = torch.randint(shape[1 if kind == "columns" else 0], (count,), device="cuda")
    return both_ways((lambda x: x[:, ids]) if kind == "columns" else (lambda x: x[ids]), x)


def moved(random: Random) -> Case:
    """Draw an operator that moves, scans or spreads numbers."""
    shape, dtype = shape_of(random, (3, 3, 4)), random.choice(DTYPES)
    d = random.randrange(len(shape))
    function: Any = random.choice((
        lambda x: x.flip(d), lambda x: x.roll(3, d), lambda x: torch.cumsum(x, d), lambda x: x.softmax(-1),
        lambda x: x.repeat_interleave(2, d), lambda x: x.repeat(2, *(1,) * (len(shape) - 1)), torch.triu,
        lambda x: F.pad(x, (1, 1)), lambda x: F.pad(x, (0, 0, 2, 0)), lambda x: torch.stack([x, x], d),
        lambda x: torch.cat([x, x], d), lambda x: torch.cat([-x[..., 1:], x[..., :1]], -1), lambda x: x[..., ::2],
        lambda x: x.transpose(-1, -2).contiguous(), lambda x: x.transpose(0, 1).contiguous(), F.softplus,
        lambda x: torch.fft.fft(x.float()).real, lambda x: torch.exp(x), lambda x: F.silu(x), lambda x: x * x.sigmoid(),
        lambda x: F.glu(torch.cat([x, x], -1)), lambda x: F.rms_norm(x, x.shape[-1:]), torch.erf, lambda x: x.abs(),
        lambda x: x.unfold(1, 2, 1).contiguous(), lambda x: x.masked_fill(x > 1, 0), lambda x: x.clamp(-1, 1),
    ))  # fmt: skip
    return Case(partial(moving, function, shape, dtype), runs=3)


def moving(function: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Work:
    """Return the operator, forward and backward."""
    return both_ways(function, leaf(*shape, dtype=dtype))


def matrices(random: Random) -> Case:
    """Draw a linear layer of any width: rows that are aligned, and rows that are not."""
    while True:
        step = random.choice((1, 2, 4, 8, 8, 64, 64))
        before, after = (between(random, 32, 12000) // step * step or step for _ in range(2))
        rows, dtype = between(random, 64, 16384), random.choice((F32, F32, BF16, F16))
        if 2 * rows * before * after <= MOST_FLOP and rows * max(before, after) <= MOST:
            break
    return Case(partial(linear, rows, before, after, dtype), tf32=random.random() < 0.6, warm=True, runs=3)


def large_matrices(random: Random) -> Case:
    """Draw a linear layer of thousands of rows and columns, as large language models and long batches have them."""
    while True:
        step = random.choice((8, 64, 64, 256))
        rows, before, after = (between(random, 2048, 32768) // step * step for _ in range(3))
        if 2e11 <= 2 * rows * before * after <= 6e12 and max(rows * before, rows * after, before * after) <= 2**30:
            break
    return Case(partial(linear, rows, before, after, random.choice((BF16, BF16, F16, F32))), True, True, runs=3)


def linear(rows: int, before: int, after: int, dtype: torch.dtype) -> Work:
    """Return a linear layer, forward and backward."""
    return both_ways(F.linear, leaf(rows, before, dtype=dtype), leaf(after, before, dtype=dtype))


def batches(random: Random) -> Case:
    """Draw a batched product, also of an operand that is one for all, and of operands in other orders."""
    while True:
        step = random.choice((1, 2, 8, 8, 16))
        m, n, k = (max(between(random, 16, 1536) // step * step, step) for _ in range(3))
        if random.random() < 0.5:
            k = random.choice((32, 48, 64, 64, 80, 96, 128))
        batch, dtype = between(random, 2, 768), random.choice((F32, F32, BF16, F16))
        size = batch * max(m * n, m * k, n * k)
        if 2 * batch * m * n * k <= MOST_FLOP and LEAST <= size <= MOST:
            break
    kinds = random.choice(("plain", "plain", "transposed", "one for all"))
    return Case(partial(batched, kinds, batch, m, n, k, dtype), tf32=random.random() < 0.6, warm=True, runs=3)


def batched(kind: str, batch: int, m: int, n: int, k: int, dtype: torch.dtype) -> Work:
    """Return a batched product, forward and backward."""
    a, b = leaf(batch, m, k, dtype=dtype), leaf(batch, k, n, dtype=dtype)
    if kind == "transposed":
        b = normal(batch, n, k, dtype=dtype).transpose(1, 2).requires_grad_()
    if kind == "one for all":
        wide = normal(k, n, dtype=dtype).expand(batch, k, n)
        return both_ways(lambda a: torch.bmm(a, wide), a)
    return both_ways(torch.bmm, a, b)


def experts(random: Random) -> Case:
    """Draw the products of experts whose shares of the tokens differ."""
    count, tokens = random.choice((4, 8, 8, 12, 16, 32)), between(random, 512, 12000)
    sizes = random.choice((512, 768, 1024, 1536, 2048)), random.choice((512, 768, 1024, 1408, 2048, 3584, 7168))
    sizes = (sizes[1], sizes[0]) if random.random() < 0.5 else sizes
    cuts = tuple(sorted(random.randrange(tokens) for _ in range(count - 1)))
    return Case(partial(shared, (*cuts, tokens), *sizes, random.choice((F32, BF16, BF16))), warm=True, runs=3)


def shared(ends: tuple[int, ...], before: int, after: int, dtype: torch.dtype) -> Work:
    """Return the products of experts, forward and backward."""
    offsets = torch.tensor(ends, device="cuda", dtype=torch.int32)
    x, w = leaf(ends[-1], before, dtype=dtype), leaf(len(ends), before, after, dtype=dtype)
    return both_ways(lambda x, w: torch._grouped_mm(x, w, offs=offsets), x, w)
