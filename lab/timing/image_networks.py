"""Networks for images, videos and volumes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parent.parent / "accuracy"))

from torchvision_path import models as torchvision_models


class Classifier(nn.Module):
    """A network whose scores [batch, classes, ...] are compared with labels [batch, ...]."""

    def __init__(self, network: nn.Module, channels_last: bool = False) -> None:
        super().__init__()
        self.network: Any = network
        self.channels_last = channels_last
        if channels_last:
            self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of the batch."""
        if self.channels_last:
            pixel_values = pixel_values.contiguous(memory_format=torch.channels_last)
        found = self.network(pixel_values)
        return F.cross_entropy(found["out"] if isinstance(found, dict) else found, labels)


def torchvision_network(
    name: str, folder: str = "", *, channels_last: bool = False, **options: Any
) -> Callable[[], nn.Module]:
    """Return a factory of one of torchvision's networks with random weights."""

    def build() -> nn.Module:
        models = torchvision_models()
        source = getattr(models, folder) if folder else models
        return Classifier(getattr(source, name)(weights=None, **options), channels_last)

    return build


class Residual(nn.Module):
    """A block of a diffusion model: group norm, SiLU and convolution, twice."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(32, inside), nn.SiLU(), nn.Conv2d(inside, outside, 3, padding=1))
        self.second = nn.Sequential(nn.GroupNorm(32, outside), nn.SiLU(), nn.Conv2d(outside, outside, 3, padding=1))
        self.beside = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the block and its input."""
        return self.beside(x) + self.second(self.first(x))


class Denoiser(nn.Module):
    """A U-Net as diffusion models use it, with nearest-neighbour upsampling and attention at the bottom."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        sizes = (width, 2 * width, 3 * width)
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(Residual(a, b) for a, b in zip((width, *sizes), sizes, strict=False))
        self.shrink = nn.ModuleList(nn.Conv2d(size, size, 3, 2, 1) for size in sizes)
        self.middle = Residual(sizes[-1], sizes[-1])
        self.attention = nn.MultiheadAttention(sizes[-1], 6, batch_first=True)
        self.up = nn.ModuleList(
            Residual(a + b, b) for a, b in zip((sizes[-1], *sizes[:0:-1]), sizes[::-1], strict=True)
        )
        self.head = nn.Sequential(nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, pixel_values: Tensor, noise: Tensor) -> Tensor:
        """Return the mean squared error of the predicted noise."""
        x, kept = self.stem(pixel_values + noise), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            kept.append(block(x))
            x = shrink(kept[-1])
        x = self.middle(x)
        rows = x.flatten(2).transpose(1, 2)
        x = x + self.attention(rows, rows, rows, need_weights=False)[0].transpose(1, 2).reshape(x.shape)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0, mode="nearest"), kept.pop()], 1))
        return F.mse_loss(self.head(x), noise)


class Segmenter(nn.Module):
    """A U-Net with batch norm and bilinear upsampling."""

    def __init__(self, width: int = 48, classes: int = 21) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(4)]
        self.down = nn.ModuleList(_twice(a, b) for a, b in zip([3, *sizes], sizes, strict=False))
        self.up = nn.ModuleList(_twice(a + b, b) for a, b in zip(sizes[:0:-1], sizes[-2::-1], strict=True))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of each pixel."""
        kept: list[Tensor] = []
        for block in self.down:
            x = block(F.max_pool2d(kept[-1], 2) if kept else x)
            kept.append(x)
        for block, beside in zip(self.up, kept[-2::-1], strict=True):
            x = block(torch.cat([beside, F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)], 1))
        return self.head(x)


def _twice(inside: int, outside: int, space: int = 2) -> nn.Module:
    convolution, norm = ((nn.Conv2d, nn.BatchNorm2d), (nn.Conv3d, nn.BatchNorm3d))[space - 2]
    layers = [convolution(inside, outside, 3, padding=1, bias=False), norm(outside), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, convolution(outside, outside, 3, padding=1, bias=False), norm(outside), nn.ReLU(True))


class Volumes(nn.Module):
    """A small 3D U-Net, as for medical images."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first, self.second = _twice(1, width, 3), _twice(width, 2 * width, 3)
        self.bottom, self.grow = _twice(2 * width, 4 * width, 3), nn.ConvTranspose3d(4 * width, 2 * width, 2, 2)
        self.third, self.last = _twice(4 * width, 2 * width, 3), nn.ConvTranspose3d(2 * width, width, 2, 2)
        self.fourth, self.head = _twice(2 * width, width, 3), nn.Conv3d(width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of each place."""
        one = self.first(x)
        two = self.second(F.max_pool3d(one, 2))
        x = self.third(torch.cat([two, self.grow(self.bottom(F.max_pool3d(two, 2)))], 1))
        return self.head(self.fourth(torch.cat([one, self.last(x)], 1)))


class Autoencoder(nn.Module):
    """Strided convolutions and transposed ones, with batch norm, as in DCGAN."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        sizes = (3, width, 2 * width, 4 * width, 8 * width)
        pairs = list(pairwise(sizes))
        self.encode = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.LeakyReLU(0.2)) for a, b in pairs)
        )
        self.decode = nn.Sequential(
            *(nn.Sequential(nn.ConvTranspose2d(b, a, 4, 2, 1), nn.BatchNorm2d(a), nn.ReLU()) for a, b in pairs[::-1])
        )

    def forward(self, pixel_values: Tensor, noise: Tensor) -> Tensor:
        """Return the mean squared error of the decoded image."""
        return F.mse_loss(torch.tanh(self.decode(self.encode(pixel_values + noise))), pixel_values)


class Upscaler(nn.Module):
    """Super-resolution by residual blocks and a pixel shuffle, as EDSR."""

    def __init__(self, width: int = 64, depth: int = 12) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(depth)
        )
        self.grow = nn.Sequential(nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2))

    def forward(self, pixel_values: Tensor, noise: Tensor) -> Tensor:
        """Return the mean absolute difference to the interpolated image."""
        x = self.stem(pixel_values)
        for block in self.blocks:
            x = x + block(x)
        wanted = F.interpolate(pixel_values + noise, scale_factor=2, mode="bicubic")
        return (self.head(self.grow(x)) - wanted).abs().mean()
