"""What is answered where the value of a tensor is asked for, and there is none.

A number is 0 and a truth is True: a training without padding, overflow or NaN takes these ways (``mask.all()``, ``found_inf``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _local_scalar_dense(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if not tensor.is_meta:
        return None
    if tensor.dtype == torch.bool:
        return True
    return 0.0 if tensor.is_floating_point() else 0


def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return True if args[0].is_meta or args[1].is_meta else None


ANSWERS: dict[str, Callable[..., Any]] = {
    "aten::_local_scalar_dense": _local_scalar_dense,
    "aten::equal": _equal,
    "aten::is_nonzero": _local_scalar_dense,
}
