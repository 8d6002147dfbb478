"""A torchvision ResNet-50 that returns its loss, and images for it: what a user would write in a file of their own."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

CLASSES = 1000


class WithLoss(nn.Module):
    """A classifier of images [batch, 3, height, width] that returns its cross-entropy."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of ``labels`` [batch]."""
        return nn.functional.cross_entropy(self.network(pixel_values), labels)


def resnet50() -> nn.Module:
    """ResNet-50 (arXiv 1512.03385) for 1000 classes, random weights."""
    from torchvision.models import resnet50 as build

    return WithLoss(build(weights=None))


@cache
def images(batch_size: int) -> dict[str, Tensor]:
    """Random images of 224 x 224 pixels and their labels, drawn once."""
    return {
        "pixel_values": torch.rand(batch_size, 3, 224, 224),
        "labels": torch.randint(0, CLASSES, (batch_size,)),
    }


class Tagger(nn.Module):
    """An LSTM that tags tokens: a model of no library, as users write them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20000, 256)
        self.lstm = nn.LSTM(256, 512, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(1024, 50)

    def forward(self, tokens: Tensor, tags: Tensor) -> Tensor:
        """The mean loss of ``tags`` [batch, length] for ``tokens`` [batch, length]."""
        scores = self.head(nn.functional.relu(self.lstm(self.embedding(tokens))[0]))
        return nn.functional.cross_entropy(scores.flatten(0, 1), tags.flatten())


def tagger() -> nn.Module:
    """The tagger, random weights."""
    return Tagger()


def tagged(batch_size: int) -> dict[str, Tensor]:
    """Random sentences of 100 tokens."""
    shape = (batch_size, 100)
    return {"tokens": torch.randint(0, 20000, shape), "tags": torch.randint(0, 50, shape)}


def encoder() -> nn.Module:
    """PyTorch's own transformer encoder with a regression head."""
    return Regression()


class Regression(nn.Module):
    """``nn.TransformerEncoder`` over vectors, and the mean squared error of a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True), 6)
        self.head = nn.Linear(512, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean squared error of [batch, length, 512] against ``y`` [batch]."""
        return nn.functional.mse_loss(self.head(self.layers(x).mean(1)).squeeze(-1), y)


def vectors(batch_size: int) -> dict[str, Tensor]:
    """Random vectors and targets."""
    return {"x": torch.rand(batch_size, 200, 512), "y": torch.rand(batch_size)}
