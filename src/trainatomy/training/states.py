"""Find the tensors in an optimizer's state, however it nests them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested mappings and sequences; the keys of a mapping (parameters) do not count."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
