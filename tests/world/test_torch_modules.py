"""Modules that are PyTorch's own, not transformers', from a live module to its bill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import trainatomy
from trainatomy.results.bill import Prediction


class Net(nn.Module):
    """A layer ``part`` and what ``loss`` makes of it and of the batch."""

    def __init__(self, part: nn.Module, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.part = part
        self.loss = loss

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.loss(self.part, **batch).float().mean()


def predicted(part: nn.Module, loss: Callable[..., torch.Tensor], **given: Any) -> Prediction:
    """Of training ``part`` on the tensors among ``given`` by the settings among them."""
    batch = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    settings = {name: value for name, value in given.items() if name not in batch}
    return trainatomy.predict(Net(part, loss), batch=batch, gpu="h200", **{"optimizer": "adamw_torch", **settings})


def test_ctc_takes_its_lengths_as_tensors_of_the_host() -> None:
    def loss(part: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        frames, labels = torch.full((2,), 6), torch.tensor([3, 2])
        return functional.ctc_loss(part(x).log_softmax(-1).transpose(0, 1), y, frames, labels)

    made = predicted(nn.Linear(8, 5), loss, x=torch.randn(2, 6, 8), y=torch.randint(1, 5, (2, 3)))
    assert made.memory.peak.operation == "aten::_ctc_loss_backward"
