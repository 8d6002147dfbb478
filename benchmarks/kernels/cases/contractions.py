"""Matrix products, attention and convolutions."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from cases.making import Cases, leaf, through


def linear(dtype: torch.dtype) -> Cases:
    for (b, s, i, o), bias in itertools.product(
        [(4, 512, 1024, 4096), (4, 77, 768, 768), (2, 128, 768, 30522), (1, 1, 768, 2), (3, 5, 63, 17)], [True, False]
    ):
        x, w = leaf(b, s, i, dtype=dtype), leaf(o, i, dtype=dtype)
        c = leaf(o, dtype=dtype) if bias else None
        yield (
            f"linear {b}x{s} {i}->{o} bias={bias}",
            through(lambda x, w, *c: F.linear(x, w, *c), x, w, *([c] if c is not None else [])),
        )
    x, w, c = leaf(64, 768, dtype=dtype), leaf(2, 768, dtype=dtype), leaf(2, dtype=dtype)
    yield "linear 64 768->2", through(F.linear, x, w, c)
    a, b = leaf(8, 12, 128, 64, dtype=dtype), leaf(8, 12, 64, 128, dtype=dtype)
    yield "matmul 4d", through(torch.matmul, a, b)
    yield "matmul 4d transposed", through(lambda a, b: a.transpose(1, 2).contiguous().transpose(1, 2) @ b, a, b)
    k = leaf(8, 12, 128, 64, dtype=dtype)
    yield "q @ k.T", through(lambda a, k: a @ k.transpose(-1, -2), a, k)
    heads = leaf(8, 128, 12, 64, dtype=dtype)
    yield "q.transpose @ k.T", through(lambda h, k: h.transpose(1, 2) @ k.transpose(-1, -2), heads, k)
    x, w = leaf(4, 512, 768, dtype=dtype), leaf(768, 2304, dtype=dtype)
    c = leaf(2304, dtype=dtype)
    yield "Conv1D addmm", through(lambda x, w, c: torch.addmm(c, x.view(-1, 768), w), x, w, c)
    i, j = leaf(4, 16, 64, 32, dtype=dtype), leaf(4, 16, 32, 64, dtype=dtype)
    yield "einsum", through(lambda i, j: torch.einsum("bhqd,bhdk->bhqk", i, j), i, j)


ATTENTION: tuple[tuple[tuple[int, int, int, int, int], str | None, bool, float, int], ...] = (
    ((4, 16, 512, 512, 64), None, False, 0.1, 1),
    ((4, 16, 512, 512, 64), None, True, 0.0, 1),
    ((2, 12, 77, 77, 64), None, True, 0.0, 1),
    ((2, 12, 300, 300, 64), "float", False, 0.1, 1),
    ((2, 12, 300, 300, 64), "bool", False, 0.0, 1),
    ((2, 12, 301, 301, 64), "float", False, 0.0, 1),
    ((2, 32, 256, 256, 128), None, True, 0.0, 4),
    ((2, 8, 256, 256, 256), None, True, 0.0, 8),
    ((2, 8, 256, 256, 256), "float", False, 0.0, 1),
    ((2, 8, 200, 200, 80), None, True, 0.0, 1),
    ((2, 8, 200, 200, 96), None, False, 0.0, 1),
    ((2, 8, 200, 200, 60), None, False, 0.0, 1),
    ((2, 6, 448, 1500, 64), None, False, 0.0, 1),
    ((1, 8, 64, 64, 64), "grad", False, 0.0, 1),
    ((1, 8, 65, 65, 64), "grad", False, 0.0, 1),
    ((16, 16, 1024, 1024, 64), None, True, 0.0, 1),
    ((1, 8, 2048, 2048, 128), None, False, 0.0, 2),
    ((2, 4, 1, 128, 64), None, False, 0.0, 1),
    ((2, 32, 256, 256, 128), "bool", False, 0.0, 4),
)
"""Batch, heads, query length, key length, head width; mask; causal; dropout; query heads per key head."""


def _attend(q: Any, k: Any, v: Any, *bias: Any, mask: Any, p: float, causal: bool, gqa: bool) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, bias[0] if bias else mask, p, causal, enable_gqa=gqa)


def _attend_transposed(q: Any, k: Any, v: Any, *bias: Any, **settings: Any) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return _attend(q, k, v, *bias, **settings)


def _attend_and_return(*inputs: Any, **settings: Any) -> torch.Tensor:
    return _attend_transposed(*inputs, **settings).transpose(1, 2).contiguous()


def attention(dtype: torch.dtype) -> Cases:
    for (b, h, s, t, d), mask, causal, p, gqa in ATTENTION:
        q = leaf(b, s, h, d, dtype=dtype)
        k, v = leaf(b, t, h // gqa, d, dtype=dtype), leaf(b, t, h // gqa, d, dtype=dtype)
        m = {
            "float": torch.zeros(b, 1, s, t, device="cuda", dtype=dtype),
            "bool": torch.ones(b, 1, s, t, device="cuda", dtype=torch.bool),
            "grad": None,
            None: None,
        }[mask]
        bias = [leaf(1, h, s, t, dtype=dtype)] if mask == "grad" else []
        name = f"{b}x{h}x{s}x{t}x{d} mask={mask} causal={causal}"
        settings = {"mask": m, "p": p, "causal": causal, "gqa": gqa > 1}
        yield f"sdpa {name} p={p} gqa={gqa}", through(partial(_attend_and_return, **settings), q, k, v, *bias)
        if s == t and gqa == 1:
            packed = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
            short = f"{b}x{h}x{s}x{d} mask={mask} causal={causal}"
            yield f"sdpa contiguous {short}", through(partial(_attend, **settings), *packed, *bias)
        no_gradients = [x.detach() for x in (q, k, v)]
        yield f"sdpa inference {name} gqa={gqa}", partial(_attend_transposed, *no_gradients, **settings | {"p": 0.0})


def convolutions(dtype: torch.dtype) -> Cases:
    shapes = {
        "vit patches": ((8, 3, 224, 224), (768, 3, 16, 16), 16, 0, 1),
        "resnet stem": ((8, 3, 224, 224), (64, 3, 7, 7), 2, 3, 1),
        "resnet 3x3": ((8, 64, 56, 56), (64, 64, 3, 3), 1, 1, 1),
        "resnet 1x1": ((8, 64, 56, 56), (256, 64, 1, 1), 1, 0, 1),
        "resnet stride": ((8, 256, 56, 56), (512, 256, 1, 1), 2, 0, 1),
        "resnet deep": ((32, 512, 7, 7), (512, 512, 3, 3), 1, 1, 1),
        "depthwise": ((8, 96, 56, 56), (96, 1, 7, 7), 1, 3, 96),
    }
    for (name, (x, w, stride, padding, groups)), last, bias in itertools.product(
        shapes.items(), (False, True), (True, False)
    ):
        if last and bias:
            continue
        a, k = leaf(*x, dtype=dtype), leaf(*w, dtype=dtype)
        if last:
            a, k = (t.detach().to(memory_format=torch.channels_last).requires_grad_() for t in (a, k))
        c = [leaf(w[0], dtype=dtype)] if bias else []
        yield (
            f"conv2d {name} channels_last={last} bias={bias}",
            through(
                lambda a, k, *c, s=stride, p=padding, g=groups: F.conv2d(a, k, c[0] if c else None, s, p, groups=g),
                a,
                k,
                *c,
            ),
        )
    for name, x, w, stride in [
        ("whisper 1", (2, 80, 3000), (512, 80, 3), 1),
        ("whisper 2", (2, 512, 3000), (512, 512, 3), 2),
    ]:
        a, k, b = leaf(*x, dtype=dtype), leaf(*w, dtype=dtype), leaf(w[0], dtype=dtype)
        yield f"conv1d {name}", through(lambda a, k, b, s=stride: F.conv1d(a, k, b, s, 1), a, k, b)
    image = leaf(8, 64, 56, 56, dtype=dtype)
    yield "max_pool2d", through(lambda x: F.max_pool2d(x, 3, 2, 1), image)
    yield "adaptive_avg_pool2d", through(lambda x: F.adaptive_avg_pool2d(x, 1), image)
    yield "avg_pool2d", through(lambda x: F.avg_pool2d(x, 2), image)
    yield "interpolate bilinear", through(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), image)
    yield "interpolate nearest", through(lambda x: F.interpolate(x, scale_factor=2), image)
