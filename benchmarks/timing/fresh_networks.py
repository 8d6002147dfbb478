"""Networks and batches of ``trainings.yaml`` that were drawn when the others had been measured."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parent))

from networks import Batch, Recommender, Sequences, _clicks, _pictures, _torchvision

resnext_wide = _torchvision("resnext101_64x4d")
resnet34_last = _torchvision("resnet34", channels_last=True)
efficientnet_b1_last = _torchvision("efficientnet_b1", channels_last=True)
squeezenet_large = _torchvision("squeezenet1_0")
mobilenet_v3_small = _torchvision("mobilenet_v3_small")
shufflenet_half = _torchvision("shufflenet_v2_x0_5")
convnext_small = _torchvision("convnext_small")
swin_s = _torchvision("swin_s")
vit_b_32 = _torchvision("vit_b_32")
alexnet = _torchvision("alexnet")
deeplab_mobile = _torchvision("deeplabv3_mobilenet_v3_large", "segmentation", weights_backbone=None, num_classes=21)
small_images = _pictures(160, 1000)


@cache
def short_clips(batch_size: int) -> Batch:
    """Draw random clips of 8 frames."""
    return {"pixel_values": torch.rand(batch_size, 3, 8, 112, 112), "labels": torch.randint(0, 400, (batch_size,))}


def wide_lstm() -> nn.Module:
    """Build a language model of three layers of LSTM."""
    return Sequences(nn.LSTM, 320, 800, num_layers=3)


def bidirectional_gru() -> nn.Module:
    """Build a bidirectional GRU of two layers."""
    return Sequences(nn.GRU, 256, 384, 4000, num_layers=2, bidirectional=True)


@cache
def sentences(batch_size: int) -> Batch:
    """Draw random texts of 120 tokens."""
    return {name: torch.randint(0, 4000, (batch_size, 120)) for name in ("tokens", "labels")}


def deep_recommender() -> nn.Module:
    """Build a recommender of large and long bags."""
    return Recommender(400_000, 32, 16)


long_clicks = _clicks(16, 400_000, 12)
