"""Fill large weights with random numbers quickly, so that building a model does not outlast measuring it.

PyTorch draws random numbers on the CPU one after the other: a minute for a model of one billion weights.  Neither
memory nor time of a step depends on which numbers they are.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DRAWN = 1 << 20
"""Numbers that are drawn for a tensor; a larger one repeats them."""
_METHODS = ("normal_", "uniform_")


@contextmanager
def repeated_random_values() -> Iterator[None]:
    """Make ``normal_`` and ``uniform_`` draw ``DRAWN`` numbers for a larger tensor in host memory, and repeat them."""
    for name in _METHODS:
        setattr(torch.Tensor, name, _repeating(getattr(torch.Tensor, name)))
    try:
        yield
    finally:
        for name in _METHODS:
            delattr(torch.Tensor, name)  # torch.Tensor inherits both from torch._C.TensorBase


def _repeating(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def fill(self: torch.Tensor, *args: Any, **keywords: Any) -> torch.Tensor:
        if self.device.type != "cpu" or self.numel() <= DRAWN or not self.is_contiguous():
            return draw(self, *args, **keywords)
        flat = self.view(-1)
        whole = self.numel() // DRAWN * DRAWN
        drawn = draw(torch.empty(DRAWN, dtype=self.dtype), *args, **keywords)
        flat[:whole].view(-1, DRAWN).copy_(drawn)
        flat[whole:].copy_(drawn[: self.numel() - whole])
        return self

    return fill
