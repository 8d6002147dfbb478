"""Networks for texts: recurrent ones, and a mean of embeddings."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F


class Sequences(nn.Module):
    """A recurrent network that predicts the next token."""

    def __init__(self, kind: type[nn.RNNBase], width: int, hidden: int, entries: int = 10000, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(entries, width)
        network: Any = kind
        self.network = network(width, hidden, batch_first=True, **options)
        self.head = nn.Linear(hidden * (2 if options.get("bidirectional") else 1), entries)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of the batch."""
        return F.cross_entropy(self.head(self.network(self.embedding(tokens))[0]).flatten(0, 1), labels.flatten())


class Words(nn.Module):
    """A mean of embeddings and a linear layer, as fastText."""

    def __init__(self, entries: int = 500_000, width: int = 100) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(entries, width, mode="mean"), nn.Linear(width, 20)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        return F.cross_entropy(self.head(self.bag(tokens)), labels)
