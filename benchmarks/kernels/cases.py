"""Operations whose allocations are compared between an H200 and the simulation, one call each, forward and backward.

A case is a function of no arguments, made under ``torch.device("cuda")`` in either world, that runs the operation once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Case = Callable[[], Any]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _leaf(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype).requires_grad_()


def _through(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Case:
    """Forward, a gradient of ones, backward; gradients are dropped afterwards."""

    def run() -> None:
        out = function(*inputs)
        out.backward(torch.ones_like(out))
        for tensor in inputs:
            tensor.grad = None

    return run


def linear(dtype: torch.dtype) -> Iterator[tuple[str, Case]]:
    for (b, s, i, o), bias in itertools.product(
        [(4, 512, 1024, 4096), (4, 77, 768, 768), (2, 128, 768, 30522), (1, 1, 768, 2), (3, 5, 63, 17)], [True, False]
    ):
        x, w = _leaf(b, s, i, dtype=dtype), _leaf(o, i, dtype=dtype)
        c = _leaf(o, dtype=dtype) if bias else None
        yield (
            f"linear {b}x{s} {i}->{o} bias={bias}",
            _through(lambda x, w, *c: F.linear(x, w, *c), x, w, *([c] if c is not None else [])),
        )
    x, w, c = _leaf(64, 768, dtype=dtype), _leaf(2, 768, dtype=dtype), _leaf(2, dtype=dtype)
    yield "linear 64 768->2", _through(F.linear, x, w, c)
    a, b = _leaf(8, 12, 128, 64, dtype=dtype), _leaf(8, 12, 64, 128, dtype=dtype)
    yield "matmul 4d", _through(torch.matmul, a, b)
    yield "matmul 4d transposed", _through(lambda a, b: a.transpose(1, 2).contiguous().transpose(1, 2) @ b, a, b)
    k = _leaf(8, 12, 128, 64, dtype=dtype)
    yield "q @ k.T", _through(lambda a, k: a @ k.transpose(-1, -2), a, k)
    heads = _leaf(8, 128, 12, 64, dtype=dtype)
    yield "q.transpose @ k.T", _through(lambda h, k: h.transpose(1, 2) @ k.transpose(-1, -2), heads, k)
    x, w = _leaf(4, 512, 768, dtype=dtype), _leaf(768, 2304, dtype=dtype)
    c = _leaf(2304, dtype=dtype)
    yield "Conv1D addmm", _through(lambda x, w, c: torch.addmm(c, x.view(-1, 768), w), x, w, c)
    i, j = _leaf(4, 16, 64, 32, dtype=dtype), _leaf(4, 16, 32, 64, dtype=dtype)
    yield "einsum", _through(lambda i, j: torch.einsum("bhqd,bhdk->bhqk", i, j), i, j)


def norms(dtype: torch.dtype) -> Iterator[tuple[str, Case]]:
    for shape in [(4, 512, 1024), (1, 77, 768), (64, 512, 1024), (8, 197, 768), (4, 100, 5120)]:
        x, w, b = _leaf(*shape, dtype=dtype), _leaf(shape[-1], dtype=dtype), _leaf(shape[-1], dtype=dtype)
        yield f"layer_norm {shape}", _through(lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b), x, w, b)
        yield f"rms_norm {shape}", _through(lambda x, w: F.rms_norm(x, (x.shape[-1],), w), x, w)
    x, w, b = _leaf(8, 64, 56, 56, dtype=dtype), _leaf(64, dtype=torch.float32), _leaf(64, dtype=torch.float32)
    mean, var = torch.zeros(64, device="cuda"), torch.ones(64, device="cuda")
    yield "batch_norm", _through(lambda x, w, b: F.batch_norm(x, mean, var, w, b, True), x, w, b)
    y = _leaf(8, 64, 56, 56, dtype=dtype).detach().to(memory_format=torch.channels_last).requires_grad_()
    yield "batch_norm channels_last", _through(lambda x, w, b: F.batch_norm(x, mean, var, w, b, True), y, w, b)
    g, h = _leaf(64, dtype=dtype), _leaf(64, dtype=dtype)
    yield "group_norm", _through(lambda x, w, b: F.group_norm(x, 8, w, b), x, g, h)
    x = _leaf(4, 300, 2048, dtype=dtype)
    yield (
        "variance by hand",
        _through(lambda x: x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype), x),
    )


def reductions(dtype: torch.dtype) -> Iterator[tuple[str, Case]]:
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


def indexing(dtype: torch.dtype) -> Iterator[tuple[str, Case]]:
    for (rows, width), (b, s) in itertools.product(
        [(30522, 1024), (1000, 64)], [(1, 512), (4, 512), (6, 512), (8, 1024), (3, 1025)]
    ):
        ids = torch.randint(0, rows, (b, s), device="cuda")
        w = _leaf(rows, width, dtype=dtype)
        yield f"embedding {rows}x{width} {b}x{s}", _through(lambda w, ids=ids: F.embedding(ids, w), w)
        yield (
            f"embedding padded {rows}x{width} {b}x{s}",
            _through(lambda w, ids=ids: F.embedding(ids, w, padding_idx=0), w),
        )
    ids = torch.randint(0, 512, (1, 512), device="cuda")
    w = _leaf(512, 1024, dtype=dtype)
    yield "positions", _through(lambda w: F.embedding(ids, w), w)
    x = _leaf(64, 128, dtype=dtype)
    index = torch.randint(0, 64, (200,), device="cuda")
    yield "x[index]", _through(lambda x: x[index], x)
    yield "index_select", _through(lambda x: x.index_select(0, index), x)
    yield "gather", _through(lambda x: x.gather(1, torch.zeros(64, 4, dtype=torch.long, device="cuda")), x)
    yield "x[:, 0]", _through(lambda x: x[:, 0], _leaf(8, 128, 768, dtype=dtype))
    yield "x[:, 1:-1]", _through(lambda x: x[:, 1:-1], _leaf(8, 128, 768, dtype=dtype))
    yield "cat", _through(lambda x: torch.cat([x, -x], -1), x)
    yield "chunk", _through(lambda x: torch.cat(x.chunk(2, -1)[::-1], -1), x)
    yield "stack", _through(lambda x: torch.stack([x, x]), x)
    yield "expand", _through(lambda x: x[:, None].expand(64, 5, 128).reshape(-1, 128), x)
    yield "repeat_interleave", _through(lambda x: torch.repeat_interleave(x, 4, dim=1), x)
    yield "masked_fill", _through(lambda x: x.masked_fill(torch.zeros(64, 1, dtype=torch.bool, device="cuda"), 0.0), x)
    yield "where", _through(lambda x: torch.where(x > 0, x, 0.0), x)
    yield (
        "scatter_add",
        lambda: torch.zeros(64, 128, device="cuda", dtype=dtype).scatter_add(
            0, torch.zeros(64, 128, dtype=torch.long, device="cuda"), x.detach()
        ),
    )
    yield (
        "index_add",
        _through(
            lambda x: torch.zeros(70, 128, device="cuda", dtype=dtype).index_add(0, torch.arange(64, device="cuda"), x),
            x,
        ),
    )
    yield "cumsum", lambda: x.detach().cumsum(-1)
    yield "topk", _through(lambda x: x.topk(2, -1)[0], x)
    yield "tril", _through(lambda x: x.tril(), x)
    yield "roll", _through(lambda x: x.roll(1, 0), x)


def sorting(dtype: torch.dtype) -> Iterator[tuple[str, Case]]:
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


def losses(dtype: torch.dtype) -> Iterator[tuple[str, Case]]:
    for n, c in [(2048, 30522), (8, 2), (4096, 32000), (511, 151936), (300, 1000)]:
        x, y = _leaf(n, c, dtype=dtype), torch.randint(0, c, (n,), device="cuda")
        yield f"cross_entropy {n}x{c}", _through(lambda x, y=y: F.cross_entropy(x, y), x)
        yield (
            f"cross_entropy float {n}x{c}",
            _through(lambda x, y=y: F.cross_entropy(x.float(), y, ignore_index=-100, reduction="sum"), x),
        )
        yield f"softmax {n}x{c}", _through(lambda x: F.softmax(x, -1), x)
        yield f"softmax float {n}x{c}", _through(lambda x: F.softmax(x, -1, dtype=torch.float32).to(x.dtype), x)
    x, y = _leaf(64, 10, dtype=dtype), torch.rand(64, 10, device="cuda").to(dtype)
    yield (
        "label smoothing",
        _through(
            lambda x: F.cross_entropy(x, torch.zeros(64, dtype=torch.long, device="cuda"), label_smoothing=0.1), x
        ),
    )
    yield "bce", _through(lambda x: F.binary_cross_entropy_with_logits(x, y), x)
    yield "mse", _through(lambda x: F.mse_loss(x, y), x)


def elementwise(dtype: torch.dtype) -> Iterator[tuple[str, Case]]:
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
        yield name, _through(function, _leaf(4, 100, 768, dtype=dtype))
    x, b, s = _leaf(4, 100, 768, dtype=dtype), _leaf(768, dtype=dtype), _leaf(4, 1, 768, dtype=dtype)
    yield "add bias", _through(lambda x, b: x + b, x, b)
    yield "mul bias", _through(lambda x, b: x * b, x, b)
    yield "mul middle", _through(lambda x, b: x * b, x, s)
    f = _leaf(768, dtype=torch.float32)
    yield "mul float bias", _through(lambda x, b: x * b, x, f)
    p = _leaf(1, 100, 768, dtype=dtype)
    yield "add first", _through(lambda x, p: x + p, x, p)
    cos = torch.randn(1, 1, 100, 64, device="cuda").to(dtype)
    q = _leaf(4, 100, 12, 64, dtype=dtype)
    yield (
        "rotary",
        _through(lambda q: (t := q.transpose(1, 2)) * cos + torch.cat((-t[..., 32:], t[..., :32]), -1) * cos, q),
    )


def attention(dtype: torch.dtype) -> Iterator[tuple[str, Case]]:
    for (b, h, s, t, d), mask, causal, p, gqa in [
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
    ]:
        q = _leaf(b, s, h, d, dtype=dtype)
        k, v = _leaf(b, t, h // gqa, d, dtype=dtype), _leaf(b, t, h // gqa, d, dtype=dtype)
        m = {
            "float": torch.zeros(b, 1, s, t, device="cuda", dtype=dtype),
            "bool": torch.ones(b, 1, s, t, device="cuda", dtype=torch.bool),
            "grad": None,
            None: None,
        }[mask]
        extra = [_leaf(1, h, s, t, dtype=dtype)] if mask == "grad" else []

        def run(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            *e: torch.Tensor,
            m: Any = m,
            p: float = p,
            causal: bool = causal,
            gqa: int = gqa,
        ) -> torch.Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            mask = e[0] if e else m
            return (
                F.scaled_dot_product_attention(q, k, v, mask, p, causal, enable_gqa=gqa > 1)
                .transpose(1, 2)
                .contiguous()
            )

        yield f"sdpa {b}x{h}x{s}x{t}x{d} mask={mask} causal={causal} p={p} gqa={gqa}", _through(run, q, k, v, *extra)
        if s == t and gqa == 1:
            packed = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
            yield (
                f"sdpa contiguous {b}x{h}x{s}x{d} mask={mask} causal={causal}",
                _through(
                    lambda q, k, v, *e, m=m, p=p, causal=causal: F.scaled_dot_product_attention(
                        q, k, v, e[0] if e else m, p, causal
                    ),
                    *packed,
                    *extra,
                ),
            )
        with_no = [x.detach() for x in (q, k, v)]

        def inference(
            q: Any = with_no[0],
            k: Any = with_no[1],
            v: Any = with_no[2],
            m: Any = m,
            causal: bool = causal,
            gqa: int = gqa,
        ) -> Any:
            return F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), m, 0.0, causal, enable_gqa=gqa > 1
            )

        yield f"sdpa inference {b}x{h}x{s}x{t}x{d} mask={mask} causal={causal} gqa={gqa}", inference


def convolutions(dtype: torch.dtype) -> Iterator[tuple[str, Case]]:
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
        a, k = _leaf(*x, dtype=dtype), _leaf(*w, dtype=dtype)
        if last:
            a, k = (t.detach().to(memory_format=torch.channels_last).requires_grad_() for t in (a, k))
        c = [_leaf(w[0], dtype=dtype)] if bias else []
        yield (
            f"conv2d {name} channels_last={last} bias={bias}",
            _through(
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
        a, k, b = _leaf(*x, dtype=dtype), _leaf(*w, dtype=dtype), _leaf(w[0], dtype=dtype)
        yield f"conv1d {name}", _through(lambda a, k, b, s=stride: F.conv1d(a, k, b, s, 1), a, k, b)
    image = _leaf(8, 64, 56, 56, dtype=dtype)
    yield "max_pool2d", _through(lambda x: F.max_pool2d(x, 3, 2, 1), image)
    yield "adaptive_avg_pool2d", _through(lambda x: F.adaptive_avg_pool2d(x, 1), image)
    yield "avg_pool2d", _through(lambda x: F.avg_pool2d(x, 2), image)
    yield "interpolate bilinear", _through(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), image)
    yield "interpolate nearest", _through(lambda x: F.interpolate(x, scale_factor=2), image)


def optimizers(dtype: torch.dtype) -> Iterator[tuple[str, Case]]:
    def parameters() -> list[nn.Parameter]:
        made = [
            nn.Parameter(torch.randn(*s, device="cuda").to(dtype))
            for s in [(1024, 1024), (30522, 64), (1024,), (4096, 1024), (7,), (3, 5, 7)]
        ]
        for p in made:
            p.grad = torch.ones_like(p)
        return made

    kinds: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
        "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
        "adamw loop": lambda p: torch.optim.AdamW(p, foreach=False, fused=False),
        "adamw amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True, foreach=True),
        "adam": lambda p: torch.optim.Adam(p, weight_decay=0.1),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "sgd nesterov decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        "sgd loop": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
        "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
        "adagrad": lambda p: torch.optim.Adagrad(p),
        "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9),
        "adadelta": lambda p: torch.optim.Adadelta(p),
        "adamax": lambda p: torch.optim.Adamax(p),
        "nadam": lambda p: torch.optim.NAdam(p),
        "radam": lambda p: torch.optim.RAdam(p),
        "adafactor torch": lambda p: torch.optim.Adafactor(p),
    }
    for name, make in kinds.items():
        made = parameters()
        optimizer = make(made)
        yield f"{name} first and second step", lambda optimizer=optimizer: (optimizer.step(), optimizer.step())
    from transformers.optimization import Adafactor

    made = parameters()
    adafactor = Adafactor(made, scale_parameter=False, relative_step=False, lr=1e-3)
    yield "adafactor transformers", lambda: (adafactor.step(), adafactor.step())
    made = parameters()
    yield "clip_grad_norm_", lambda: nn.utils.clip_grad_norm_(made, 1.0)
    yield "clip_grad_norm_ loop", lambda: nn.utils.clip_grad_norm_(made, 1.0, foreach=False)
    yield "clip_grad_value_", lambda: nn.utils.clip_grad_value_(made, 1.0)
    if dtype == torch.float32:
        scaler = torch.amp.GradScaler("cuda")
        sgd = torch.optim.SGD(made, lr=0.1)
        scaler.scale(torch.ones((), device="cuda"))

        def scaled() -> None:
            scaler.scale(torch.ones((), device="cuda"))
            scaler.unscale_(sgd)
            scaler.step(sgd)
            scaler.update()

        yield "GradScaler", scaled


def modules(dtype: torch.dtype) -> Iterator[tuple[str, Case]]:
    for name, make in {
        "lstm": lambda: nn.LSTM(64, 128, 2, batch_first=True),
        "gru": lambda: nn.GRU(64, 128, batch_first=True),
        "rnn": lambda: nn.RNN(64, 128),
    }.items():
        module = make().to("cuda").to(dtype)
        yield name, _through(lambda x, m=module: m(x)[0], _leaf(4, 20, 64, dtype=dtype))
    mha = nn.MultiheadAttention(256, 4, batch_first=True).to("cuda").to(dtype)
    yield "multihead attention", _through(lambda x: mha(x, x, x)[0], _leaf(4, 20, 256, dtype=dtype))
    layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True).to("cuda").to(dtype)
    yield "encoder layer", _through(lambda x: layer(x), _leaf(4, 20, 256, dtype=dtype))
    if dtype == torch.bfloat16:
        a, b = _leaf(64, 128, dtype=dtype), _leaf(4, 128, 256, dtype=dtype)
        offsets = torch.tensor([16, 32, 48, 64], dtype=torch.int32).to("cuda")
        if hasattr(F, "grouped_mm"):
            yield "grouped_mm", _through(lambda a, b: F.grouped_mm(a, b, offs=offsets), a, b)


def autocast(dtype: torch.dtype) -> Iterator[tuple[str, Case]]:
    if dtype == torch.float32:
        return
    lin, norm = nn.Linear(256, 512).to("cuda"), nn.LayerNorm(512).to("cuda")

    def run() -> None:
        with torch.autocast("cuda", dtype):
            loss = F.cross_entropy(
                norm(lin(torch.ones(8, 256, device="cuda"))) + lin(torch.zeros(8, 256, device="cuda")),
                torch.zeros(8, dtype=torch.long, device="cuda"),
            )
        loss.backward()
        lin.zero_grad()
        norm.zero_grad()

    yield "autocast mlp", run


GROUPS = (
    linear,
    norms,
    reductions,
    indexing,
    sorting,
    losses,
    elementwise,
    attention,
    convolutions,
    optimizers,
    modules,
    autocast,
)


def cases() -> Iterator[tuple[str, Callable[[], Iterator[tuple[str, Case]]]]]:
    """Names of the groups with functions that make their cases."""
    for (name, dtype), group in itertools.product(DTYPES.items(), GROUPS):
        yield f"{group.__name__} {name}", lambda group=group, dtype=dtype: group(dtype)
