"""Indices outside of the tensor that they index, where their values are known.

The CPU's kernels raise ``IndexError``; a GPU's end the whole process with ``device-side assert triggered``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from trainatomy.simulator.values import Values

_ALONG = frozenset({"aten::index_select", "aten::gather"})
INDEXES = _ALONG | {"aten::embedding", "aten::index"}
"""Operators that ``check_range`` knows."""
_MOST_CHECKED = 1 << 20
"""Elements of the largest tensor of indices that is looked at."""


class OutOfRange(IndexError):
    """An index that lies outside of the dimension that it indexes, on a GPU as well."""


def check_range(name: str, args: tuple[Any, ...], values: Values) -> None:
    """Raise what a GPU would raise if an index lies outside of the dimension that it indexes.

    Args:
        name: The operator, such as ``aten::embedding``.
        args: Its positional arguments.
        values: Values that are known; indices without any are taken to be inside.

    Raises:
        OutOfRange: An index lies outside.
    """
    for size, indices, least in _indexed(name, args):
        found = values.of(indices, decides=False) if indices.is_meta and 0 < indices.numel() <= _MOST_CHECKED else None
        if found is None:
            continue
        low, high = int(found.min()), int(found.max())
        if low < least or high >= size:
            outside = high if high >= size else low
            plain = name.removeprefix("aten::")
            raise OutOfRange(
                f"{plain} reads entry {outside} of a dimension of {size}; a run on a GPU ends with 'device-side assert "
                "triggered'"
            )


def _indexed(name: str, args: tuple[Any, ...]) -> Iterator[tuple[int, torch.Tensor, int]]:
    """Yield the size of each dimension that is indexed, its indices, and the least that is allowed."""
    if name == "aten::embedding":
        yield args[0].shape[0], args[1], 0
    elif name in _ALONG:
        if args[0].dim() and len(args) > 2:
            yield args[0].shape[args[1]], args[2], 0
    elif not any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
        for size, index in zip(args[0].shape, args[1], strict=False):
            if index is not None:
                yield size, index, -size
