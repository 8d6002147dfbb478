"""Triangles of matrices that are written in place cost what they cost elsewhere."""

from __future__ import annotations

import torch
from torch import nn

from trainatomy.api import predict


class Masked(nn.Module):
    """A product with a lower triangle, which is made in place or not."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(512, 512))
        self._in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        square = x @ self.weight
        return (square.tril_() if self._in_place else square.tril()).sum()


def test_triangles_in_place_are_timed() -> None:
    batch = {"x": torch.zeros(512, 512)}
    times = [predict(Masked(in_place=each), batch=batch).time for each in (True, False)]
    assert times[0] is not None and times[1] is not None
    assert times[0].gpu_seconds == times[1].gpu_seconds > 0
