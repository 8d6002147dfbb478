"""Networks drawn by the seed in their name: ``volumes_17`` is one on volumes, and ``volumes_17_batch`` its data.

Names of families: ``images``, ``volumes``, ``series`` (convolutions over time, some with a recurrent layer), ``texts``
(transformers) and ``rows`` (perceptrons and tables).  Widths, depths, filters, norms, activations and sizes are drawn
more widely than those of published networks, so that they show which kernels nobody has looked at.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parent))

from random_batches import Batch
from random_layers import Block, Head, stem_of, width_of

CLASSES = 37
SIDES = {
    1: (600, 1000, 2000, 3001, 8000),
    2: (96, 112, 129, 160, 192, 224, 255),
    3: (24, 32, 40, 45, 48, 64),
}
"""Lengths of the sides of inputs by their number of dimensions."""
NUMBERS = {1: 1.2e6, 2: 6e6, 3: 8e6}
"""Numbers of the first feature maps of a batch, about."""
ROWS = (1024, 2048, 5000, 8192)


class Convolutions(nn.Module):
    """Stages of blocks of one kind, each with wider and smaller feature maps; scores of the whole or of each place."""

    def __init__(self, random: Random, space: int, channels: int) -> None:
        super().__init__()
        self.last = space > 1 and random.random() < 0.2
        width = width_of(random, *{1: (32, 257), 2: (16, 113), 3: (8, 49)}[space])
        self.stem = stem_of(random, space, channels, width)
        draw, stages = Block.drawn(random, space), []
        for _ in range(random.randint(2, 4)):
            wider = width_of(random, width, 2 * width + 1)
            stages.append(
                nn.Sequential(draw(width, wider, 2), *(draw(wider, wider, 1) for _ in range(random.randint(0, 3))))
            )
            width = wider
        self.stages = nn.ModuleList(stages)
        sizes = [int(stage[-1].outside) for stage in stages]  # type: ignore[arg-type]
        self.head = Head(random, space, sizes, CLASSES)
        if self.last:
            self.to(memory_format=torch.channels_last if space == 2 else torch.channels_last_3d)  # type: ignore[call-overload]

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy; ``labels``: a class for each sample, spread where each place has scores."""
        if self.last:
            x = x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
        x, kept = self.stem(x), []
        for stage in self.stages:
            x = stage(x)
            kept.append(x)
        scores = self.head(kept)
        places = scores.shape[2:]
        return F.cross_entropy(scores, labels.view(-1, *[1] * len(places)).expand(-1, *places))


class Transformer(nn.Module):
    """Layers of attention and a perceptron, whose widths, heads and norms are drawn."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        heads, head = random.choice((4, 6, 8, 12, 16)), random.choice((32, 40, 64, 72, 80, 96, 128))
        width = heads * head
        while width > 1600:
            heads //= 2
            width = heads * head
        self.heads, self.causal = heads, random.random() < 0.5
        inner = width_of(random, 2 * width, 4 * width + 1)
        self.gated, self.before = random.random() < 0.4, random.random() < 0.7
        norm = random.choice((nn.LayerNorm, nn.LayerNorm, nn.RMSNorm))
        self.biased = random.random() < 0.3
        self.dropout = random.choice((0.0, 0.0, 0.1))
        self.activation = random.choice((F.gelu, F.silu, F.relu, partial(F.gelu, approximate="tanh")))
        self.entries = random.randrange(2000, 50001, random.choice((1, 8, 64)))
        self.embedding, self.norm = nn.Embedding(self.entries, width), norm(width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "first": norm(width),
                    "attention": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "second": norm(width),
                    "up": nn.Linear(width, inner * (2 if self.gated else 1)),
                    "down": nn.Linear(inner, width),
                }
            )
            for _ in range(random.randint(2, 6))
        )
        self.head = nn.Linear(width, self.entries, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of the next tokens."""
        x = self.embedding(x % self.entries)
        layers: Any = self.layers
        for layer in layers:
            x = self._added(x, partial(self._attended, layer), layer["first"])
            x = self._added(x, partial(self._widened, layer), layer["second"])
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), (labels % self.entries).flatten())

    def _added(self, x: Tensor, part: Callable[[Tensor], Tensor], norm: nn.Module) -> Tensor:
        found: Tensor = x + F.dropout(part(norm(x) if self.before else x), self.dropout)
        return found if self.before else norm(found)

    def _attended(self, layer: Any, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = layer["attention"](x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.biased:
            places = torch.arange(length, device=x.device)
            scores = parts[0] @ parts[1].transpose(-1, -2) * parts.shape[-1] ** -0.5
            scores = scores - (places[:, None] - places).abs().to(scores.dtype) * 0.1
            found = scores.softmax(-1).to(parts.dtype) @ parts[2]
        else:
            query, key, value = parts.unbind(0)
            found = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return layer["out"](found.transpose(1, 2).reshape(batch, length, width))

    def _widened(self, layer: Any, x: Tensor) -> Tensor:
        x = layer["up"](x)
        if self.gated:
            gate, x = x.chunk(2, -1)
            return layer["down"](self.activation(gate) * x)
        return layer["down"](self.activation(x))


class Tables(nn.Module):
    """Tables of categories beside numbers, and a perceptron over both."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        width = random.choice((4, 8, 10, 16, 24, 32, 50))
        entries = [round(10 ** random.uniform(2, 5.5)) for _ in range(random.randint(4, 40))]
        self.entries = entries
        self.tables = nn.ModuleList(nn.Embedding(count, width) for count in entries)
        sizes = [13 + width * len(entries), *(width_of(random, 64, 2049) for _ in range(random.randint(2, 6)))]
        norm: Any = random.choice((nn.LayerNorm, nn.BatchNorm1d, None))
        activation: Any = random.choice((nn.ReLU, nn.SiLU, nn.GELU, nn.SELU, nn.Tanh))
        dropout, layers = random.choice((0.0, 0.2)), []
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), *([norm(after)] if norm else []), activation()]
            layers += [nn.Dropout(dropout)] if dropout else []
        self.layers = nn.Sequential(*layers, nn.Linear(sizes[-1], CLASSES))

    def forward(self, x: Tensor, categories: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        found = [table(ids % len(table.weight)) for table, ids in zip(self.tables, categories.unbind(1), strict=False)]  # type: ignore[arg-type]
        return F.cross_entropy(self.layers(torch.cat([x, *found], 1)), labels)


SPACES = {"series": 1, "images": 2, "volumes": 3}


def network(family: str, seed: int) -> nn.Module:
    """Build a network."""
    random = Random(f"{family} {seed}")
    if family in SPACES:
        _, channels, _ = _input_of(family, seed)
        return Convolutions(random, SPACES[family], channels)
    return Transformer(random) if family == "texts" else Tables(random)


def _input_of(family: str, seed: int) -> tuple[int, int, Random]:
    """Return the side and the channels of an input of convolutions, and where to draw further from."""
    random, space = Random(f"{family} {seed} input"), SPACES[family]
    return random.choice(SIDES[space]), random.choice((1, 1, 8, 40, 80) if space == 1 else (1, 3, 3, 4)), random


def usual_batch(family: str, seed: int) -> int:
    """Return the batch of a network: one that lets a step take some tens of milliseconds."""
    if family in SPACES:
        side, _, _ = _input_of(family, seed)
        return max(round(NUMBERS[SPACES[family]] / side ** SPACES[family] / 4), 1)
    random = Random(f"{family} {seed} batch")
    return random.choice(ROWS) if family == "rows" else max(6000 // _length_of(seed), 1)


def _length_of(seed: int) -> int:
    random = Random(f"texts {seed} input")
    return random.randrange(48, 1025, random.choice((1, 8, 16)))


@cache
def batch(family: str, seed: int, batch_size: int) -> Batch:
    """Draw a batch of a network."""
    if family in SPACES:
        side, channels, _ = _input_of(family, seed)
        shape = (batch_size, channels, *[side] * SPACES[family])
        return {"x": torch.rand(shape), "labels": torch.randint(0, CLASSES, (batch_size,))}
    if family == "texts":
        return {name: torch.randint(0, 2000, (batch_size, _length_of(seed))) for name in ("x", "labels")}
    rows = {"x": torch.rand(batch_size, 13), "categories": torch.randint(0, 300_000, (batch_size, 40))}
    return {**rows, "labels": torch.randint(0, CLASSES, (batch_size,))}


def __getattr__(name: str) -> Callable[..., Any]:
    if not (form := re.fullmatch(r"(series|images|volumes|texts|rows)_(\d+)(_batch)?", name)):
        raise AttributeError(name)
    family, seed, data = form.groups()
    return partial(batch if data else network, family, int(seed))
