"""Element-wise operations, and rotary embeddings, which consist of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cases.making import Cases, leaf, through


def elementwise(dtype: torch.dtype) -> Cases:
    for name, function in {
        "gelu": F.gelu,
        "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
        "silu": F.silu,
        "relu": F.relu,
        "tanh": torch.tanh,
        "dropout": lambda x: F.dropout(x, 0.1),
        "pow": lambda x: x**3,
        "float": lambda x: x.float(),
        "bf16": lambda x: x.bfloat16(),
        "contiguous": lambda x: x.transpose(1, 2).contiguous(),
        "softcap": lambda x: torch.tanh(x / 30.0) * 30.0,
        "mean": lambda x: x.mean(),
        "sigmoid": torch.sigmoid,
        "exp": torch.exp,
        "clamp": lambda x: x.clamp(-1, 1),
    }.items():
        yield name, through(function, leaf(4, 100, 768, dtype=dtype))
    x, b, s = leaf(4, 100, 768, dtype=dtype), leaf(768, dtype=dtype), leaf(4, 1, 768, dtype=dtype)
    yield "add bias", through(lambda x, b: x + b, x, b)
    yield "mul bias", through(lambda x, b: x * b, x, b)
    yield "mul middle", through(lambda x, b: x * b, x, s)
    f = leaf(768, dtype=torch.float32)
    yield "mul float bias", through(lambda x, b: x * b, x, f)
    p = leaf(1, 100, 768, dtype=dtype)
    yield "add first", through(lambda x, p: x + p, x, p)
    cos = torch.randn(1, 1, 100, 64, device="cuda").to(dtype)
    q = leaf(4, 100, 12, 64, dtype=dtype)
    yield (
        "rotary",
        through(lambda q: (t := q.transpose(1, 2)) * cos + torch.cat((-t[..., 32:], t[..., :32]), -1) * cos, q),
    )
