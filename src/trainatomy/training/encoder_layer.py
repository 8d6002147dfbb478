"""An encoder layer of BERT-large as Ivanov et al. describe it, with a call for each of their operators.

"Data Movement Is All You Need", arXiv 2007.00072, section 3.  Sizes by their letters: batch B = 8, sequence J = K =
512, heads H = 16, head size P = W = 64, hidden I = 1024, inner U = 4096.  ReLU, dropout with probability 0.1, no mask.
"""

from __future__ import annotations

import math

import torch
from torch import nn

BATCH, SEQUENCE, HEADS, HIDDEN, INNER = 8, 512, 16, 1024, 4096
DROPOUT = 0.1


class Projection(nn.Module):
    """Product with a weight, [.., in] to [.., out], and the bias added by a separate operator."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.normal_(self.weight, std=1 / math.sqrt(inputs))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return data @ self.weight + self.bias


class Attention(nn.Module):
    """Multi-head self-attention of [B, J, I]; query, key and value in one product, as the paper stacks them."""

    def __init__(self) -> None:
        super().__init__()
        self.projected = Projection(HIDDEN, 3 * HIDDEN)
        self.out = Projection(HIDDEN, HIDDEN)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        batch, length, _ = data.shape
        heads = self.projected(data).view(batch, length, 3, HEADS, HIDDEN // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        scores = (query @ key.transpose(-2, -1)) * (1 / math.sqrt(HIDDEN // HEADS))
        weights = nn.functional.dropout(scores.softmax(-1), DROPOUT, self.training)
        return self.out((weights @ value).transpose(1, 2).reshape(batch, length, HIDDEN))


class EncoderLayer(nn.Module):
    """Encoder layer with normalisation after each residual.

    Attention, dropout, residual, layer normalisation; linear, ReLU, dropout, linear; dropout, residual, layer
    normalisation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.attention_norm = nn.LayerNorm(HIDDEN)
        self.inner = Projection(HIDDEN, INNER)
        self.outer = Projection(INNER, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        attended = nn.functional.dropout(self.attention(data), DROPOUT, self.training)
        attended = self.attention_norm(attended + data)
        inner = nn.functional.dropout(self.inner(attended).relu(), DROPOUT, self.training)
        outer = nn.functional.dropout(self.outer(inner), DROPOUT, self.training)
        return self.norm(outer + attended)


class WithGradient(nn.Module):
    """The layer with a loss whose gradient at its output is ``gradient``, as from the next layer.

    Module paths inside the layer begin with ``layer``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = EncoderLayer()

    def forward(self, data: torch.Tensor, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(data.requires_grad_()) * gradient).sum()}


def build() -> nn.Module:
    """Return the layer in fp16; usable as ``model.factory``."""
    return WithGradient().half()


def batch(size: int) -> dict[str, torch.Tensor]:
    """Return ``size`` sequences of 512 vectors in fp16, and the gradient of the output."""
    shape = (size, SEQUENCE, HIDDEN)
    return {"data": torch.randn(shape, dtype=torch.float16), "gradient": torch.randn(shape, dtype=torch.float16)}
