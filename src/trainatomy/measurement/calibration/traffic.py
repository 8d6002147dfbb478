"""Memory-bound calibration cases: element-wise operators, normalisations, reductions, losses, embeddings, copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from trainatomy.measurement.calibration.cases import BF16, F16, F32, Case, Work, both_ways, leaf, random, through

SIZES = tuple(2**power for power in (14, 16, 18, 20, 21, 22, 23, 24, 25, 26, 28))
"""Bytes of the tensor, 16 KiB to 256 MiB."""
FEW = (*SIZES[1::2], 2**28)
WIDTH = 1024

Function = Callable[..., torch.Tensor]
UNARY: dict[str, Function] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "relu": F.relu,
    "dropout": lambda x: F.dropout(x, 0.1),
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "mean of rows": lambda x: x.mean(-1),
    "pow": lambda x: x.pow(2),
}
PLAIN: dict[str, Function] = {  # of a table, another table, and a row
    "add": lambda x, other, row: x + other,
    "scale": lambda x, other, row: x * 2.5,
    "clone": lambda x, other, row: x.clone(),
    "fill": lambda x, other, row: torch.zeros_like(x),
    "rsqrt": lambda x, other, row: torch.rsqrt(x),
    "sqrt": lambda x, other, row: torch.sqrt(x),
    "bias": lambda x, other, row: x + row,
    "per row": lambda x, other, row: x * other[:, :1],
    "sum of columns": lambda x, other, row: x.sum(0),
    "sum of rows": lambda x, other, row: x.sum(1),
    "sum of all": lambda x, other, row: x.sum(),
    "norm": lambda x, other, row: torch.linalg.vector_norm(x),
    "transposed": lambda x, other, row: x.view(-1, 4, 16, 64).transpose(1, 2).contiguous(),
    "transposed last": lambda x, other, row: x.t().contiguous(),
    "cat": lambda x, other, row: torch.cat([x, other], -1),
    "half": lambda x, other, row: x[:, : WIDTH // 2].contiguous(),
    "where": lambda x, other, row: torch.where(other > 0, x, 0.0),
}
EVERY_SIZE = ("add", "scale", "clone")


def elementwise() -> Iterator[Case]:
    """Yield element-wise operators by size, on elements of 4 and 2 bytes."""
    for dtype in (F32, BF16):
        for size in SIZES:
            rows = max(size // dtype.itemsize // WIDTH, 4)
            for function in UNARY.values():
                if size in FEW:
                    yield Case(partial(through, function, (rows, WIDTH), dtype))
            for name, function in PLAIN.items():
                if size in FEW or name in EVERY_SIZE:
                    yield Case(partial(plain, function, rows, dtype))
    for size in FEW:
        yield Case(partial(cast, size // 4, F32, BF16))
        yield Case(partial(cast, size // 4, BF16, F32))
        yield Case(partial(mixed, size // 4))
        yield Case(partial(accumulated, size // 4))
    for size in FEW[2:]:
        yield Case(partial(cast, size // 4, F32, F16))


def plain(function: Function, rows: int, dtype: torch.dtype) -> Work:
    """Return an operator without backward on a table of ``rows`` rows of 1024."""
    x, other, row = random(rows, WIDTH, dtype=dtype), random(rows, WIDTH, dtype=dtype), random(WIDTH, dtype=dtype)
    return lambda: function(x, other, row)


def cast(count: int, source: torch.dtype, target: torch.dtype) -> Work:
    """Return a conversion from one dtype to another."""
    x = random(count, dtype=source)
    return lambda: x.to(target)


def mixed(count: int) -> Work:
    """Return operators on two dtypes."""
    x, y, z = random(count), random(count, dtype=BF16), random(count // WIDTH, WIDTH, dtype=BF16)
    whole = x.view(-1, WIDTH)

    def work() -> None:
        x * y
        x + y
        whole + z[:1]
        x.add_(y)

    return work


def accumulated(count: int) -> Work:
    """Return the addition of autograd when a second gradient arrives."""
    x, y = random(count), random(count)
    return lambda: x.add_(y)


def broadcast() -> Iterator[Case]:
    """Yield masks over scores and rotary positions over heads."""
    for dtype in (F32, BF16):
        for batch, heads, length in ((8, 12, 128), (8, 12, 512), (2, 32, 1024)):
            scores, mask = (batch, heads, length, length), (batch, 1, 1, length)
            yield Case(partial(binary, torch.add, scores, mask, dtype))
            yield Case(partial(binary, torch.add, scores, (mask[0], 1, *scores[2:]), dtype))
            yield Case(partial(masked, scores, mask, dtype))
            heads_inside = (batch, length, heads, 64)
            yield Case(partial(rotated, heads_inside, dtype))


def binary(function: Function, one: tuple[int, ...], other: tuple[int, ...], dtype: torch.dtype) -> Work:
    """Return an operator on two operands of different shapes."""
    x, y = random(*one, dtype=dtype), random(*other, dtype=dtype)
    return lambda: function(x, y)


def masked(scores: tuple[int, ...], mask: tuple[int, ...], dtype: torch.dtype) -> Work:
    """Return a masked fill of scores."""
    x, m = random(*scores, dtype=dtype), random(*mask) > 0
    return lambda: x.masked_fill(m, -1e4)


def rotated(shape: tuple[int, ...], dtype: torch.dtype) -> Work:
    """Return a rotary position embedding: products with a table, halves exchanged, on transposed heads."""
    x = leaf(*shape, dtype=dtype)
    table = random(1, 1, shape[1], shape[3], dtype=dtype)

    def run(x: torch.Tensor) -> torch.Tensor:
        y = x.transpose(1, 2)
        half = y.shape[-1] // 2
        return y * table + torch.cat((-y[..., half:], y[..., :half]), -1) * table

    return both_ways(run, x)


def normalisations() -> Iterator[Case]:
    """Yield layer norm and root-mean-square norm, by width."""
    for dtype in (F32, BF16):
        for width in (512, 768, 1024, 2048, 4096):
            for rows in (128, 1024, 4096, 16384) if width < 4096 else (512, 4096):
                yield Case(partial(layer_norm, rows, width, dtype))
        for rows, width in ((1024, 1024), (8192, 2048)):
            yield Case(partial(rms_norm, rows, width, dtype))
        for rows, width in (
            (4096, 64),
            (65536, 64),
            (8192, 128),
            (65536, 128),
            (512, 2048),
            (4096, 2048),
            (2048, 4096),
        ):
            yield Case(partial(through, UNARY["mean of rows"], (rows, width), dtype))


def layer_norm(rows: int, width: int, dtype: torch.dtype) -> Work:
    """Return layer norm with weight and bias; its statistics are fp32."""
    inputs = leaf(rows, width, dtype=dtype), leaf(width, dtype=dtype), leaf(width, dtype=dtype)
    return both_ways(lambda x, w, b: F.layer_norm(x, (width,), w, b), *inputs)


def rms_norm(rows: int, width: int, dtype: torch.dtype) -> Work:
    """Return the fused root-mean-square norm."""
    return both_ways(lambda x, w: F.rms_norm(x, (width,), w), leaf(rows, width, dtype=dtype), leaf(width, dtype=dtype))


def rows_of_scores() -> Iterator[Case]:
    """Yield softmax over short and long rows."""
    for dtype in (F32, BF16):
        for rows, width in ((12288, 128), (49152, 512), (28800, 300), (37824, 197), (32768, 1024), (9324, 777)):
            yield Case(partial(through, UNARY["softmax"], (rows, width), dtype))


def losses() -> Iterator[Case]:
    """Yield cross entropy over vocabularies."""
    for dtype in (F32, BF16):
        for rows, classes in ((1024, 30522), (4096, 30522), (1000, 50257), (2048, 32000), (1024, 151936), (8, 2)):
            yield Case(partial(cross_entropy, rows, classes, dtype))


def cross_entropy(rows: int, classes: int, dtype: torch.dtype) -> Work:
    """Return cross entropy, averaged over rows."""
    target = torch.randint(classes, (rows,), device="cuda")
    return both_ways(lambda x: F.cross_entropy(x, target), leaf(rows, classes, dtype=dtype))


def tables() -> Iterator[Case]:
    """Yield embeddings and indexed rows, forward and backward."""
    for dtype in (F32, BF16):
        for tokens, entries, width in (
            (128, 30522, 768), (512, 2, 768), (2048, 2, 768), (2048, 512, 768), (1024, 30522, 768),
            (4096, 30522, 1024), (4096, 2, 768), (4096, 512, 1024), (2048, 32000, 2048), (16384, 50257, 768),
            (2048, 151936, 896),
        ):  # fmt: skip
            yield Case(partial(embedding, tokens, entries, width, dtype))
        for tokens, width in ((1024, 1024), (8192, 2048)):
            yield Case(partial(indexed, tokens, width, dtype))


def embedding(tokens: int, entries: int, width: int, dtype: torch.dtype) -> Work:
    """Return an embedding of random tokens."""
    ids = torch.randint(entries, (tokens,), device="cuda")
    return both_ways(lambda w: F.embedding(ids, w), leaf(entries, width, dtype=dtype))


def indexed(tokens: int, width: int, dtype: torch.dtype) -> Work:
    """Return rows selected by index and by gather."""
    ids = torch.randint(tokens, (tokens,), device="cuda")
    wide = ids[:, None].expand(tokens, width)
    return both_ways(lambda x: x[ids] + x.gather(0, wide), leaf(tokens, width, dtype=dtype))
