"""Networks for sound and speech."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Separator(nn.Module):
    """Dilated depthwise convolutions over time, as Conv-TasNet separates speakers."""

    def __init__(self, width: int = 128, inner: int = 512, repeats: int = 2, depth: int = 8) -> None:
        super().__init__()
        self.encode = nn.Conv1d(1, width, 16, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(width, inner, 1), nn.PReLU(), nn.GroupNorm(1, inner),
                nn.Conv1d(inner, inner, 3, padding=2**level, dilation=2**level, groups=inner),
                nn.PReLU(), nn.GroupNorm(1, inner), nn.Conv1d(inner, width, 1),
            )
            for _ in range(repeats) for level in range(depth)
        )  # fmt: skip
        self.decode = nn.ConvTranspose1d(width, 1, 16, 8)

    def forward(self, input_values: Tensor, labels: Tensor) -> Tensor:
        """Return the mean squared error of the separated sound."""
        mixed = x = self.encode(input_values)
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(self.decode(torch.sigmoid(x) * mixed), labels)


class Waves(nn.Module):
    """Gated dilated convolutions over time, as WaveNet."""

    def __init__(self, width: int = 64, depth: int = 20) -> None:
        super().__init__()
        rates = [2 ** (level % 10) for level in range(depth)]
        self.stem = nn.Conv1d(1, width, 1)
        self.gates = nn.ModuleList(nn.Conv1d(width, 2 * width, 3, padding=rate, dilation=rate) for rate in rates)
        self.mix = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in rates)
        self.head = nn.Conv1d(width, 1, 1)

    def forward(self, input_values: Tensor, labels: Tensor) -> Tensor:
        """Return the mean squared error of the next sample."""
        x = self.stem(input_values)
        for gate, mix in zip(self.gates, self.mix, strict=True):
            up, down = gate(x).chunk(2, 1)
            x = x + mix(torch.tanh(up) * torch.sigmoid(down))
        return F.mse_loss(self.head(x), labels)


class Recogniser(nn.Module):
    """Speech recognition by convolutions, a bidirectional LSTM and the CTC loss, as DeepSpeech 2."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 32, (11, 41), (2, 2), (5, 20)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20),
            nn.Conv2d(32, 32, (11, 21), (1, 2), (5, 10)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20),
        )  # fmt: skip
        self.lstm = nn.LSTM(32 * 40, width, 3, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 29)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return the CTC loss."""
        x = self.convolutions(features).transpose(1, 2).flatten(2)
        scores = self.head(self.lstm(x)[0]).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((scores.shape[1],), scores.shape[0], dtype=torch.long)
        return F.ctc_loss(scores, labels, lengths, torch.full_like(lengths, labels.shape[1]))
