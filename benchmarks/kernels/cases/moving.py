"""Embeddings, indexing, gathering, sorting."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from cases.making import Cases, leaf, through


def indexing(dtype: torch.dtype) -> Cases:
    for (rows, width), (b, s) in itertools.product(
        [(30522, 1024), (1000, 64)], [(1, 512), (4, 512), (6, 512), (8, 1024), (3, 1025)]
    ):
        ids = torch.randint(0, rows, (b, s), device="cuda")
        w = leaf(rows, width, dtype=dtype)
        yield f"embedding {rows}x{width} {b}x{s}", through(lambda w, ids=ids: F.embedding(ids, w), w)
        yield (
            f"embedding padded {rows}x{width} {b}x{s}",
            through(lambda w, ids=ids: F.embedding(ids, w, padding_idx=0), w),
        )
    ids = torch.randint(0, 512, (1, 512), device="cuda")
    w = leaf(512, 1024, dtype=dtype)
    yield "positions", through(lambda w: F.embedding(ids, w), w)
    x = leaf(64, 128, dtype=dtype)
    index = torch.randint(0, 64, (200,), device="cuda")
    yield "x[index]", through(lambda x: x[index], x)
    yield "index_select", through(lambda x: x.index_select(0, index), x)
    yield "gather", through(lambda x: x.gather(1, torch.zeros(64, 4, dtype=torch.long, device="cuda")), x)
    yield "x[:, 0]", through(lambda x: x[:, 0], leaf(8, 128, 768, dtype=dtype))
    yield "x[:, 1:-1]", through(lambda x: x[:, 1:-1], leaf(8, 128, 768, dtype=dtype))
    yield "cat", through(lambda x: torch.cat([x, -x], -1), x)
    yield "chunk", through(lambda x: torch.cat(x.chunk(2, -1)[::-1], -1), x)
    yield "stack", through(lambda x: torch.stack([x, x]), x)
    yield "expand", through(lambda x: x[:, None].expand(64, 5, 128).reshape(-1, 128), x)
    yield "repeat_interleave", through(lambda x: torch.repeat_interleave(x, 4, dim=1), x)
    yield "masked_fill", through(lambda x: x.masked_fill(torch.zeros(64, 1, dtype=torch.bool, device="cuda"), 0.0), x)
    yield "where", through(lambda x: torch.where(x > 0, x, 0.0), x)
    yield (
        "scatter_add",
        lambda: torch.zeros(64, 128, device="cuda", dtype=dtype).scatter_add(
            0, torch.zeros(64, 128, dtype=torch.long, device="cuda"), x.detach()
        ),
    )
    yield (
        "index_add",
        through(
            lambda x: torch.zeros(70, 128, device="cuda", dtype=dtype).index_add(0, torch.arange(64, device="cuda"), x),
            x,
        ),
    )
    yield "cumsum", lambda: x.detach().cumsum(-1)
    yield "topk", through(lambda x: x.topk(2, -1)[0], x)
    yield "tril", through(lambda x: x.tril(), x)
    yield "roll", through(lambda x: x.roll(1, 0), x)


def sorting(dtype: torch.dtype) -> Cases:
    if dtype != torch.float32:
        return
    for n in (256, 4096, 20000):
        ids = torch.randint(0, 8, (n,), device="cuda")
        yield f"sort {n}", lambda ids=ids: ids.sort()
        yield f"argsort {n}", lambda ids=ids: torch.argsort(ids)
        yield f"cumsum {n}", lambda ids=ids: ids.cumsum(0)
        yield f"histc {n}", lambda ids=ids: torch.histc(ids.int().float(), bins=8, min=0, max=7)
        yield f"histc int {n}", lambda ids=ids: torch.histc(ids.int(), bins=8, min=0, max=7)
        yield f"nonzero {n}", lambda ids=ids: ids.nonzero()
        yield f"one_hot {n}", lambda ids=ids: F.one_hot(ids, 8)
        yield f"bincount {n}", lambda ids=ids: torch.bincount(ids, minlength=8)
        yield f"eq any {n}", lambda ids=ids: (ids == 3).any()
        yield f"masked index {n}", lambda ids=ids: ids[ids == 3]
    yield "arange", lambda: torch.arange(512, device="cuda").expand(4, -1).clone()
    yield "randperm", lambda: torch.randperm(1000, device="cuda")
    yield "multinomial", lambda: torch.multinomial(torch.ones(100, device="cuda"), 5)
