"""Normalisations, reductions and losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cases.making import Cases, leaf, through


def norms(dtype: torch.dtype) -> Cases:
    for shape in [(4, 512, 1024), (1, 77, 768), (64, 512, 1024), (8, 197, 768), (4, 100, 5120)]:
        x, w, b = leaf(*shape, dtype=dtype), leaf(shape[-1], dtype=dtype), leaf(shape[-1], dtype=dtype)
        yield f"layer_norm {shape}", through(lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b), x, w, b)
        yield f"rms_norm {shape}", through(lambda x, w: F.rms_norm(x, (x.shape[-1],), w), x, w)
    x, w, b = leaf(8, 64, 56, 56, dtype=dtype), leaf(64, dtype=torch.float32), leaf(64, dtype=torch.float32)
    mean, var = torch.zeros(64, device="cuda"), torch.ones(64, device="cuda")
    yield "batch_norm", through(lambda x, w, b: F.batch_norm(x, mean, var, w, b, True), x, w, b)
    y = leaf(8, 64, 56, 56, dtype=dtype).detach().to(memory_format=torch.channels_last).requires_grad_()
    yield "batch_norm channels_last", through(lambda x, w, b: F.batch_norm(x, mean, var, w, b, True), y, w, b)
    g, h = leaf(64, dtype=dtype), leaf(64, dtype=dtype)
    yield "group_norm", through(lambda x, w, b: F.group_norm(x, 8, w, b), x, g, h)
    x = leaf(4, 300, 2048, dtype=dtype)
    yield (
        "variance by hand",
        through(lambda x: x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype), x),
    )


def reductions(dtype: torch.dtype) -> Cases:
    shapes = [
        (4, 512, 1024),
        (2048, 4096),
        (512, 30522),
        (1, 77, 768),
        (16384, 768),
        (8, 12, 128, 128),
        (100000,),
        (7, 3),
    ]
    for shape in shapes:
        x = torch.randn(*shape, device="cuda").to(dtype)
        yield f"sum all {shape}", lambda x=x: x.sum()
        yield f"sum 0 {shape}", lambda x=x: x.sum(0)
        yield f"sum but last {shape}", lambda x=x: x.sum(tuple(range(x.dim() - 1))) if x.dim() > 1 else x.sum()
        yield f"sum last {shape}", lambda x=x: x.sum(-1)
        yield f"mean all {shape}", lambda x=x: x.mean()
        yield f"norm {shape}", lambda x=x: torch.linalg.vector_norm(x)
        yield f"amax last {shape}", lambda x=x: x.amax(-1)
        yield f"max last {shape}", lambda x=x: x.max(-1)
        yield f"argmax {shape}", lambda x=x: x.argmax(-1)
        yield f"float sum {shape}", lambda x=x: x.sum(dtype=torch.float32)
        yield f"isfinite all {shape}", lambda x=x: torch.isfinite(x).all()
    x = torch.randn(4, 64, 56, 56, device="cuda").to(dtype)
    yield "sum (0,2,3)", lambda: x.sum((0, 2, 3))
    yield "mean (2,3)", lambda: x.mean((2, 3))
    t = torch.randn(2048, 1024, device="cuda").to(dtype).t()
    yield "sum transposed 0", lambda: t.sum(0)
    yield "sum transposed 1", lambda: t.sum(1)


def losses(dtype: torch.dtype) -> Cases:
    for n, c in [(2048, 30522), (8, 2), (4096, 32000), (511, 151936), (300, 1000)]:
        x, y = leaf(n, c, dtype=dtype), torch.randint(0, c, (n,), device="cuda")
        yield f"cross_entropy {n}x{c}", through(lambda x, y=y: F.cross_entropy(x, y), x)
        yield (
            f"cross_entropy float {n}x{c}",
            through(lambda x, y=y: F.cross_entropy(x.float(), y, ignore_index=-100, reduction="sum"), x),
        )
        yield f"softmax {n}x{c}", through(lambda x: F.softmax(x, -1), x)
        yield f"softmax float {n}x{c}", through(lambda x: F.softmax(x, -1, dtype=torch.float32).to(x.dtype), x)
    x, y = leaf(64, 10, dtype=dtype), torch.rand(64, 10, device="cuda").to(dtype)
    yield (
        "label smoothing",
        through(lambda x: F.cross_entropy(x, torch.zeros(64, dtype=torch.long, device="cuda"), label_smoothing=0.1), x),
    )
    yield "bce", through(lambda x: F.binary_cross_entropy_with_logits(x, y), x)
    yield "mse", through(lambda x: F.mse_loss(x, y), x)
