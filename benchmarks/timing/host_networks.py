"""Networks and batches of ``host_phases.yaml``: stacks of one kind of layer, so small that the host bounds them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parent))

from random_batches import Batch, texts_of
from text_networks import Sequences

CHANNELS = 16


class Stack(nn.Module):
    """Layers that keep the shape of their input, one after the other."""

    def __init__(self, make: Callable[[], nn.Module], depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(depth))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean squared error."""
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x.float(), y)


class Dense(nn.Module):
    """Adds channels to its input by a convolution, as a layer of a DenseNet, and takes as many away."""

    def __init__(self) -> None:
        super().__init__()
        self.grow: Any = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.shrink: Any = nn.Conv2d(2 * CHANNELS, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return as many channels as the input has."""
        return self.shrink(torch.cat([x, self.grow(x)], 1))


class Excited(nn.Module):
    """Weighs channels by what their means say, as in a MobileNet."""

    def __init__(self) -> None:
        super().__init__()
        self.down: Any = nn.Conv2d(CHANNELS, CHANNELS // 4, 1)
        self.up: Any = nn.Conv2d(CHANNELS // 4, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighed channels."""
        weights = self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1))))
        return x * F.hardsigmoid(weights)


def _convolved() -> nn.Module:
    return nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)


def _normalised() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False), nn.BatchNorm2d(CHANNELS), nn.ReLU(inplace=True)
    )


def _separable() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS, bias=False), nn.Conv2d(CHANNELS, CHANNELS, 1)
    )


def convolutions() -> nn.Module:
    """Build a stack of convolutions."""
    return Stack(_convolved, 60)


def normalised() -> nn.Module:
    """Build a stack of convolutions with batch norm and an activation."""
    return Stack(_normalised, 40)


def separable() -> nn.Module:
    """Build a stack of depthwise and pointwise convolutions."""
    return Stack(_separable, 40)


def norms() -> nn.Module:
    """Build a stack of batch norms."""
    return Stack(lambda: nn.BatchNorm2d(CHANNELS), 80)


def poolings() -> nn.Module:
    """Build a stack of max pooling."""
    return Stack(lambda: nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.PReLU()), 60)


def dense() -> nn.Module:
    """Build a stack of layers that join channels."""
    return Stack(Dense, 30)


def excited() -> nn.Module:
    """Build a stack of layers that weigh channels."""
    return Stack(Excited, 30)


@cache
def maps(batch_size: int) -> Batch:
    """Draw random feature maps of 8 x 8."""
    return {name: torch.rand(batch_size, CHANNELS, 8, 8) for name in ("x", "y")}


lstm = partial(Sequences, nn.LSTM, 64, 64, 500)
lstm_three = partial(Sequences, nn.LSTM, 96, 96, 500, num_layers=3)
lstm_both = partial(Sequences, nn.LSTM, 64, 64, 500, num_layers=2, bidirectional=True)
lstm_odd = partial(Sequences, nn.LSTM, 50, 50, 500, num_layers=2)
gru = partial(Sequences, nn.GRU, 64, 64, 500, num_layers=2)
gru_both = partial(Sequences, nn.GRU, 96, 96, 500, bidirectional=True)
plain = partial(Sequences, nn.RNN, 64, 64, 500, num_layers=2)
texts_20, texts_80, texts_300 = (texts_of(length, 500) for length in (20, 80, 300))
