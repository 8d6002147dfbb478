"""Optimizers, clipping and scaling; modules of many operations; autocast."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from cases.making import Cases, leaf, through


def optimizers(dtype: torch.dtype) -> Cases:
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


def modules(dtype: torch.dtype) -> Cases:
    for name, make in {
        "lstm": lambda: nn.LSTM(64, 128, 2, batch_first=True),
        "gru": lambda: nn.GRU(64, 128, batch_first=True),
        "rnn": lambda: nn.RNN(64, 128),
    }.items():
        module = make().to("cuda").to(dtype)
        yield name, through(lambda x, m=module: m(x)[0], leaf(4, 20, 64, dtype=dtype))
    mha = nn.MultiheadAttention(256, 4, batch_first=True).to("cuda").to(dtype)
    yield "multihead attention", through(lambda x: mha(x, x, x)[0], leaf(4, 20, 256, dtype=dtype))
    layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True).to("cuda").to(dtype)
    yield "encoder layer", through(lambda x: layer(x), leaf(4, 20, 256, dtype=dtype))
    if dtype == torch.bfloat16:
        a, b = leaf(64, 128, dtype=dtype), leaf(4, 128, 256, dtype=dtype)
        offsets = torch.tensor([16, 32, 48, 64], dtype=torch.int32).to("cuda")
        if hasattr(F, "grouped_mm"):
            yield "grouped_mm", through(lambda a, b: F.grouped_mm(a, b, offs=offsets), a, b)


def autocast(dtype: torch.dtype) -> Cases:
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
