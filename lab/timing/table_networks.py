"""Networks for rows of numbers and categories: recommenders, and a stack of many layers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _perceptron(*sizes: int) -> nn.Module:
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Recommender(nn.Module):
    """Embedding bags for categories, a perceptron for numbers, and products of both, as DLRM."""

    def __init__(self, entries: int = 100_000, width: int = 64, categories: int = 26) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(entries, width, mode="sum") for _ in range(categories))
        self.bottom, count = _perceptron(13, 512, 256, width), categories + 1
        self.top = _perceptron(count * (count - 1) // 2 + width, 512, 256, 1)
        self.register_buffer("pairs", torch.tril_indices(count, count, -1), persistent=False)

    def forward(self, numbers: Tensor, categories: Tensor, labels: Tensor) -> Tensor:
        """Return the mean binary cross-entropy; ``categories`` are [categories, batch, entries of a bag]."""
        dense = self.bottom(numbers)
        rows = [bag(ids) for bag, ids in zip(self.bags, categories.unbind(1), strict=True)]
        every = torch.stack([dense, *rows], 1)
        products = torch.bmm(every, every.transpose(1, 2))
        pairs: Any = self.pairs
        found = self.top(torch.cat([dense, products[:, pairs[0], pairs[1]]], 1))
        return F.binary_cross_entropy_with_logits(found.squeeze(1), labels)


class Towers(nn.Module):
    """Two towers over embeddings of users and items, with all others of the batch as negatives."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(1_000_000, width), nn.Embedding(200_000, width)
        self.left, self.right = _perceptron(width, 512, 256, 64), _perceptron(width, 512, 256, 64)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return the mean cross-entropy of finding each user's item."""
        left, right = (F.normalize(tower) for tower in (self.left(self.users(users)), self.right(self.items(items))))
        scores = left @ right.T / 0.05
        return F.cross_entropy(scores, torch.arange(len(users), device=scores.device))


class Many(nn.Module):
    """Many small layers, so that the optimizer has many small tensors."""

    def __init__(self, depth: int = 300, width: int = 96) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(depth))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean squared error."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.mse_loss(x, y)
