"""Layers of random networks: blocks of convolutions, stems and heads in one, two or three dimensions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CONVOLUTIONS: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED: tuple[Any, ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
BATCH_NORMS: tuple[Any, ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
INSTANCE_NORMS: tuple[Any, ...] = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
POOLINGS: tuple[tuple[Any, ...], ...] = (
    (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
)
KINDS = ("plain", "plain", "residual", "bottleneck", "depthwise", "groups", "dense")
LINEAR = ("linear", "bilinear", "trilinear")
GROUPS = (2, 4, 8, 16, 32)


def width_of(random: Random, least: int, most: int) -> int:
    """Draw a width: most are multiples of 8 or 16, some are odd."""
    step = random.choice((1, 2, 4, 8, 8, 16, 16, 32))
    return max(random.randrange(least, most) // step * step, step, 4)


def norm_of(kind: str, space: int, width: int) -> nn.Module:
    """Return a norm of a kind for feature maps of a width."""
    if kind == "batch":
        return BATCH_NORMS[space - 1](width)
    if kind == "instance":
        return INSTANCE_NORMS[space - 1](width, affine=True)
    if kind == "group":
        return nn.GroupNorm(max(count for count in (1, 2, 4, 8, 16, 32) if width % count == 0), width)
    return nn.Identity()


def stem_of(random: Random, space: int, channels: int, width: int) -> nn.Module:
    """Draw the first layer."""
    filters, stride = random.choice((3, 4, 5, 7)), random.choice((1, 2, 2, 4) if space < 3 else (1, 1, 2))
    return CONVOLUTIONS[space - 1](channels, width, filters, stride, filters // 2)


class Block(nn.Module):
    """Convolutions with norms and activations.

    Args:
        form: What all blocks of a network have in common: kind, space, filters, dilation, norm, activation, pooling,
            share of a bottleneck, groups and whether channels are excited.
        before: Channels of its input.
        outside: Channels of its result.
        stride: By how much the result is smaller.
    """

    def __init__(self, form: dict[str, Any], before: int, outside: int, stride: int) -> None:
        super().__init__()
        kind, space = form["kind"], form["space"]
        pool = form["pooling"] if stride > 1 else None
        inner = 1 if pool is not None else stride
        self.dense = kind == "dense" and outside > before
        self.beside: nn.Module | None = None
        if kind not in ("plain", "dense"):
            same = before == outside and stride == 1
            self.beside = nn.Identity() if same else CONVOLUTIONS[space - 1](before, outside, 1, stride)
        middle = max(round(outside * form["share"]), 4)
        layer = partial(self._layer, form)
        if kind == "depthwise":
            wide = before * 2
            parts = [*layer(before, wide, 1), *layer(wide, wide, 0, inner, wide), *layer(wide, outside, 1)]
        elif kind in ("bottleneck", "groups"):
            groups = form["groups"] if kind == "groups" else 1
            middle = max(middle // groups, 1) * groups
            parts = [*layer(before, middle, 1), *layer(middle, middle, 0, inner, groups), *layer(middle, outside, 1)]
        elif kind == "residual":
            parts = [*layer(before, outside, 0, inner), *layer(outside, outside, 0)]
        else:
            parts = layer(before, outside - before if self.dense else outside, 0, inner)
        self.parts = nn.Sequential(*parts, *([pool] if pool is not None else []))
        self.shrink = POOLINGS[1][space - 1](2, ceil_mode=True) if self.dense and stride > 1 else nn.Identity()
        self.excited = (
            nn.Sequential(
                nn.Linear(outside, max(outside // 4, 1)),
                nn.ReLU(),
                nn.Linear(max(outside // 4, 1), outside),
                nn.Sigmoid(),
            )
            if form["excited"]
            else None
        )
        self.outside = outside

    @staticmethod
    def _layer(
        form: dict[str, Any], before: int, after: int, filters: int, stride: int = 1, groups: int = 1
    ) -> list[nn.Module]:
        filters = filters or form["filters"]
        dilation = form["dilation"] if filters > 1 and stride == 1 else 1
        padding = (filters - 1) // 2 * dilation
        convolution = CONVOLUTIONS[form["space"] - 1]
        bias = form["norm"] == "none"
        layer = convolution(before, after, filters, stride, padding, dilation, groups, bias)
        return [layer, norm_of(form["norm"], form["space"], after), form["activation"]()]

    @classmethod
    def drawn(cls, random: Random, space: int) -> Callable[[int, int, int], Block]:
        """Draw what the blocks of a network have in common."""
        kind = random.choice(KINDS)
        pooling = random.choice((None, None, *POOLINGS))
        form = {
            "kind": kind,
            "space": space,
            "filters": random.choice({1: (3, 5, 9, 15), 2: (3, 3, 3, 5, 7), 3: (3, 3, 3, 5)}[space]),
            "dilation": random.choice((1, 1, 1, 2, 4)),
            "norm": random.choice(("batch", "batch", "batch", "group", "instance", "none")),
            "activation": random.choice(
                (nn.ReLU, nn.ReLU, nn.SiLU, nn.GELU, nn.LeakyReLU, nn.Hardswish, nn.PReLU, nn.ELU, nn.Mish)
            ),
            "pooling": None
            if pooling is None or kind not in ("plain", "dense")
            else pooling[space - 1](2, ceil_mode=True),
            "share": random.choice((0.25, 0.5, 0.5, 1.0)),
            "groups": random.choice(GROUPS),
            "excited": random.random() < 0.2,
        }
        if form["pooling"] is None and kind == "dense":
            form["pooling"] = POOLINGS[1][space - 1](2, ceil_mode=True)
        return partial(cls, form)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's feature maps."""
        found = self.parts(x)
        if self.dense:
            found = torch.cat([self.shrink(x), found], 1)
        elif self.beside is not None:
            found = found + self.beside(x)
        if self.excited is not None:
            scale = self.excited(found.flatten(2).mean(2))
            found = found * scale.view(*scale.shape, *[1] * (found.dim() - 2))
        return found


class Head(nn.Module):
    """Scores of the whole input, or of each place by a decoder that meets the feature maps of each stage again."""

    def __init__(self, random: Random, space: int, sizes: list[int], classes: int) -> None:
        super().__init__()
        self.kind = random.choice(
            ("whole", "whole", "nearest", "linear", "transposed") if space > 1 else ("whole", "each", "recurrent")
        )
        self.space, width = space, sizes[-1]
        self.recurrent: Any = None
        if self.kind == "recurrent":
            cell = random.choice((nn.LSTM, nn.GRU))
            hidden, both = width_of(random, 128, 769), random.random() < 0.5
            self.recurrent = cell(width, hidden, random.choice((1, 2)), batch_first=True, bidirectional=both)
            width = hidden * (2 if both else 1)
        decoded = self.kind in ("nearest", "linear", "transposed")
        pairs = list(zip(sizes[:0:-1], sizes[-2::-1], strict=True)) if decoded else []
        self.grow = (
            nn.ModuleList(TRANSPOSED[space - 1](a, a, 2, 2) for a, _ in pairs) if self.kind == "transposed" else None
        )
        self.mix = nn.ModuleList(CONVOLUTIONS[space - 1](a + b, b, 3, padding=1) for a, b in pairs)
        width = sizes[0] if decoded else width
        self.scores = (
            nn.Linear(width, classes)
            if self.kind in ("whole", "recurrent")
            else CONVOLUTIONS[space - 1](width, classes, 1)
        )

    def forward(self, kept: list[Tensor]) -> Tensor:
        """Return scores [batch, classes, places...]."""
        x = kept[-1]
        if self.kind == "whole":
            return self.scores(x.flatten(2).mean(2))
        if self.recurrent is not None:
            return self.scores(self.recurrent(x.transpose(1, 2))[0]).transpose(1, 2)
        for number, mix in enumerate(self.mix):
            beside = kept[-2 - number]
            if self.grow is not None:
                x = self.grow[number](x)
            if self.kind == "linear":
                x = F.interpolate(x, beside.shape[2:], mode=LINEAR[self.space - 1], align_corners=False)
            elif x.shape[2:] != beside.shape[2:]:
                x = F.interpolate(x, beside.shape[2:], mode="nearest")
            x = F.relu(mix(torch.cat([x, beside], 1)))
        return self.scores(x)
