"""Optimizers for ``cases.yaml`` whose step is compiled."""

from __future__ import annotations

import torch
from torch import nn


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with a compiled step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)
    optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
    return optimizer


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum and a compiled step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9, foreach=True)
    optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
    return optimizer
