"""A torchvision ResNet-50 that returns its loss, and images for it: what a user would write in a file of their own."""

from __future__ import annotations

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


def images(batch_size: int) -> dict[str, Tensor]:
    """Random images of 224 x 224 pixels and their labels."""
    return {
        "pixel_values": torch.rand(batch_size, 3, 224, 224),
        "labels": torch.randint(0, CLASSES, (batch_size,)),
    }
