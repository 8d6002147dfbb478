"""Models and batches as a user would write them: torchvision networks, LSTMs, a U-Net and more."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

CLASSES = 1000


def torchvision_models() -> Any:
    """Return ``torchvision.models``, also beside a CPU build of torch; this file is imported by its path alone."""
    sys.path.append(str(Path(__file__).parent))
    from torchvision_path import models

    return models()


class WithLoss(nn.Module):
    """A classifier of images [batch, 3, height, width] that returns its cross-entropy."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of the batch."""
        return nn.functional.cross_entropy(self.network(pixel_values), labels)


def resnet50() -> nn.Module:
    """Build ResNet-50 (arXiv 1512.03385) for 1000 classes with random weights."""
    return WithLoss(torchvision_models().resnet50(weights=None))


@cache
def images(batch_size: int) -> dict[str, Tensor]:
    """Draw random images of 224 x 224 pixels and their labels, once."""
    return {
        "pixel_values": torch.rand(batch_size, 3, 224, 224),
        "labels": torch.randint(0, CLASSES, (batch_size,)),
    }


class Tagger(nn.Module):
    """An LSTM that tags tokens, without any model library."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20000, 256)
        self.lstm = nn.LSTM(256, 512, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(1024, 50)

    def forward(self, tokens: Tensor, tags: Tensor) -> Tensor:
        """Return the mean cross-entropy of the batch."""
        scores = self.head(nn.functional.relu(self.lstm(self.embedding(tokens))[0]))
        return nn.functional.cross_entropy(scores.flatten(0, 1), tags.flatten())


def tagger() -> nn.Module:
    """Build the tagger with random weights."""
    return Tagger()


def tagged(batch_size: int) -> dict[str, Tensor]:
    """Draw random sentences of 100 tokens."""
    shape = (batch_size, 100)
    return {"tokens": torch.randint(0, 20000, shape), "tags": torch.randint(0, 50, shape)}


def encoder() -> nn.Module:
    """Build PyTorch's own transformer encoder with a regression head."""
    return Regression()


class Regression(nn.Module):
    """``nn.TransformerEncoder`` over vectors, and the mean squared error of a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True), 6)
        self.head = nn.Linear(512, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean squared error against ``y`` [batch] for ``x`` [batch, length, 512]."""
        return nn.functional.mse_loss(self.head(self.layers(x).mean(1)).squeeze(-1), y)


def vectors(batch_size: int) -> dict[str, Tensor]:
    """Draw random vectors and targets."""
    return {"x": torch.rand(batch_size, 200, 512), "y": torch.rand(batch_size)}


def resnet18() -> nn.Module:
    """Build ResNet-18 (arXiv 1512.03385) for 1000 classes with random weights."""
    return WithLoss(torchvision_models().resnet18(weights=None))


class UNet(nn.Module):
    """A small U-Net (arXiv 1505.04597) with transposed convolutions and group norm: the cross-entropy of each pixel."""

    def __init__(self, width: int = 32, classes: int = 8) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(_double(a, b) for a, b in zip([3, *sizes], [*sizes, 8 * width], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * size, size, 2, stride=2) for size in reversed(sizes))
        self.merge = nn.ModuleList(_double(2 * size, size) for size in reversed(sizes))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of the batch."""
        kept: list[Tensor] = []
        x = pixel_values
        for block in self.down:
            if kept:
                x = nn.functional.max_pool2d(x, 2)
            x = block(x)
            kept.append(x)
        for grow, merge, beside in zip(self.up, self.merge, reversed(kept[:-1]), strict=True):
            x = merge(torch.cat([beside, grow(x)], 1))
        return nn.functional.cross_entropy(self.head(x), labels)


def _double(inside: int, outside: int) -> nn.Module:
    layers = (nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(8, outside), nn.SiLU())
    return nn.Sequential(*layers, nn.Conv2d(outside, outside, 3, padding=1), nn.GroupNorm(8, outside), nn.SiLU())


def unet() -> nn.Module:
    """Build the U-Net with random weights."""
    return UNet()


def segments(batch_size: int) -> dict[str, Tensor]:
    """Draw random images of 160 x 160 pixels and a class for each pixel."""
    shape = (batch_size, 160, 160)
    return {"pixel_values": torch.rand(batch_size, 3, 160, 160), "labels": torch.randint(0, 8, shape)}


class Gated(nn.Module):
    """Gated recurrent units that tag tokens, with dropout between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20000, 300, padding_idx=0)
        self.gru = nn.GRU(300, 384, num_layers=3, batch_first=True, dropout=0.2)
        self.head = nn.Linear(384, 50)

    def forward(self, tokens: Tensor, tags: Tensor) -> Tensor:
        """Return the mean cross-entropy of the batch."""
        scores = self.head(self.gru(self.embedding(tokens))[0])
        return nn.functional.cross_entropy(scores.flatten(0, 1), tags.flatten())


def gru() -> nn.Module:
    """Build the tagger of gated recurrent units with random weights."""
    return Gated()


class Translator(nn.Module):
    """``nn.Transformer`` with a causal mask, between two vocabularies."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(16000, 384), nn.Embedding(16000, 384)
        self.transformer = nn.Transformer(384, 6, 3, 3, 1536, batch_first=True)
        self.head = nn.Linear(384, 16000)

    def forward(self, tokens: Tensor, words: Tensor) -> Tensor:
        """Return the mean cross-entropy of the batch."""
        inputs = words[:, :-1]
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1], device=inputs.device)
        found = self.transformer(self.source(tokens), self.target(inputs), tgt_mask=mask, tgt_is_causal=True)
        return nn.functional.cross_entropy(self.head(found).transpose(1, 2), words[:, 1:], label_smoothing=0.1)


def translator() -> nn.Module:
    """Build the translator with random weights."""
    return Translator()


def pairs(batch_size: int) -> dict[str, Tensor]:
    """Draw random sentences of 60 tokens and translations of 51."""
    return {
        "tokens": torch.randint(0, 16000, (batch_size, 60)),
        "words": torch.randint(0, 16000, (batch_size, 51)),
    }


class Mixer(nn.Module):
    """An MLP-Mixer (arXiv 2105.01601): products along patches and along channels in turn."""

    def __init__(self, width: int = 384, depth: int = 6, patches: int = 196) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.across = nn.ModuleList(_perceptron(patches, 2 * patches) for _ in range(depth))
        self.along = nn.ModuleList(_perceptron(width, 4 * width) for _ in range(depth))

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return features [batch, width] of images [batch, 3, 224, 224]."""
        x = self.patch(pixel_values).flatten(2).transpose(1, 2)
        for index, (across, along) in enumerate(zip(self.across, self.along, strict=True)):
            x = x + across(self.norms[2 * index](x).transpose(1, 2)).transpose(1, 2)
            x = x + along(self.norms[2 * index + 1](x))
        return x.mean(1)


def _perceptron(width: int, inner: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Dropout(0.1), nn.Linear(inner, width))


def mixer() -> nn.Module:
    """Build the mixer with a head for 1000 classes and random weights."""
    return WithLoss(nn.Sequential(Mixer(), nn.Linear(384, CLASSES)))
