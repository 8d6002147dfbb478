"""Networks of torchvision whose memory is predicted and measured, with the batches that they train on."""

from __future__ import annotations

import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

CLASSES = 1000
SEGMENTS = 21
CLASSIFIERS = (
    "alexnet", "vgg16", "resnet18", "resnet50", "resnet101", "resnext50_32x4d", "wide_resnet50_2", "densenet121",
    "inception_v3", "googlenet", "squeezenet1_1", "mobilenet_v2", "mobilenet_v3_large", "shufflenet_v2_x1_0",
    "efficientnet_b0", "mnasnet1_0", "convnext_tiny",
    "resnet34", "vgg11_bn", "densenet169", "efficientnet_b1", "mobilenet_v3_small", "shufflenet_v2_x1_5",
    "regnet_y_800mf", "convnext_small", "resnext101_32x8d", "efficientnet_b2",
    "efficientnet_v2_s", "regnet_x_1_6gf", "densenet201", "vgg13", "mnasnet1_3",
)  # fmt: skip
SEGMENTERS = ("deeplabv3_resnet50", "fcn_resnet50", "lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large")
VIDEOS = ("r3d_18", "mc3_18", "r2plus1d_18")
LAST = ("resnet50", "mobilenet_v2", "efficientnet_b0")
"""Networks that are also trained in channels-last layout, named ``resnet50_last``."""


class WithLoss(nn.Module):
    """A network that returns the cross-entropy of its scores, of each image or of each pixel."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of the main output."""
        scores: Any = self.network(images)
        if isinstance(scores, dict):
            scores = scores["out"]
        elif not isinstance(scores, Tensor):
            scores = scores.logits
        return nn.functional.cross_entropy(scores, labels)


def network(name: str) -> nn.Module:
    """Build a network with random weights."""
    sys.path.append(str(Path(__file__).parents[1] / "accuracy"))
    from torchvision_path import models

    found = models()
    if name in SEGMENTERS:
        return WithLoss(getattr(found.segmentation, name)(weights=None, weights_backbone=None))
    if name in VIDEOS:
        return WithLoss(getattr(found.video, name)(weights=None))
    heads = {"init_weights": False} if name in ("inception_v3", "googlenet") else {}
    return WithLoss(getattr(found, name)(weights=None, **heads))


def channels_last(name: str) -> nn.Module:
    """Build a network whose weights are channels-last, which its convolutions then are, too."""
    return network(name).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@cache
def pictures(batch_size: int, side: int = 224) -> dict[str, Tensor]:
    """Draw random images and their labels."""
    return {"images": torch.rand(batch_size, 3, side, side), "labels": torch.randint(0, CLASSES, (batch_size,))}


def large_pictures(batch_size: int) -> dict[str, Tensor]:
    """Draw images of the size that Inception is made for."""
    return pictures(batch_size, 299)


@cache
def scenes(batch_size: int, side: int = 256) -> dict[str, Tensor]:
    """Draw images with a class for each pixel."""
    shape = batch_size, side, side
    return {"images": torch.rand(batch_size, 3, side, side), "labels": torch.randint(0, SEGMENTS, shape)}


@cache
def clips(batch_size: int, side: int = 112) -> dict[str, Tensor]:
    """Draw clips of sixteen frames."""
    return {"images": torch.rand(batch_size, 3, 16, side, side), "labels": torch.randint(0, 400, (batch_size,))}


SIDES = {
    **{f"pictures_{side}": partial(pictures, side=side) for side in range(64, 513)},
    **{f"scenes_{side}": partial(scenes, side=side) for side in range(96, 385)},
    **{f"clips_{side}": partial(clips, side=side) for side in range(64, 193)},
}
"""Batches of images of other sizes."""

globals().update({name: partial(network, name) for name in (*CLASSIFIERS, *SEGMENTERS, *VIDEOS)} | SIDES)
globals().update({f"{name}_last": partial(channels_last, name) for name in LAST})
