"""Bounds of values that are unknown: true elements of a mask, and indices within a dimension.

How many elements of a mask are true at most, where its values are unknown.

Code that samples marks entries that it has picked in a mask of zeros, and selects by the mask later (torchvision's
``BalancedPositiveNegativeSampler``): which entries is unknown, but not how many.

Indices outside of the tensor that they index, where their values are known.

The CPU's kernels raise ``IndexError``; a GPU's end the whole process with ``device-side assert triggered``.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from trainatomy.simulator.storages import forgetting
from trainatomy.simulator.values import Values

_SETS = frozenset({"aten::index_put_", "aten::_index_put_impl_"})
_SUMS = frozenset({"aten::bitwise_or", "aten::logical_or", "aten::__or__"})
_LEASTS = frozenset({"aten::bitwise_and", "aten::logical_and", "aten::__and__"})
_KEEPS = frozenset({"aten::_to_copy", "aten::clone"})
_DTYPES = (torch.bool, torch.uint8, torch.long)
BOUNDED = _SETS | _SUMS | _LEASTS | _KEEPS
"""Operators that ``MaskBounds.learn`` may learn from."""


class _Bound(NamedTuple):
    storage: weakref.ref[torch.UntypedStorage]
    version: int
    most: int


class MaskBounds:
    """Knows how many elements of masks are true at most."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._bounds: dict[int, _Bound] = {}

    def most(self, mask: torch.Tensor) -> int:
        """Return how many elements are true at most, all if nothing is known."""
        known = self._known(mask)
        return mask.numel() if known is None else min(known, mask.numel())

    def learn(self, name: str, args: tuple[Any, ...], result: torch.Tensor) -> None:
        """Remember the bound of a result, before the values of the arguments are followed."""
        is_set = name in _SETS
        if torch.is_inference_mode_enabled() or result.dtype not in _DTYPES or not (is_set or self._bounds):
            return
        if is_set:
            before, added = self._before(args[0]), _entries(args[0], args[1])
            # PyTorch counts the version of a tensor that is written to once the operation is over.
            self._remember(result, None if before is None or added is None else before + added, result._version + 1)
            return
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        bounds = [self._known(tensor) for tensor in tensors if tensor.shape == result.shape]
        known = [bound for bound in bounds if bound is not None]
        if name in _LEASTS and known:
            self._remember(result, min(known), result._version)
        elif known and len(known) == len(bounds) == len(tensors):
            self._remember(result, sum(known), result._version)

    def _known(self, mask: torch.Tensor) -> int | None:
        storage = mask.untyped_storage()
        if (bound := self._bounds.get(storage._cdata)) is not None:
            is_whole = mask.numel() * mask.itemsize <= storage.nbytes()
            return bound.most if bound.version == mask._version and is_whole else None
        return None

    def _before(self, mask: torch.Tensor) -> int | None:
        """Return how many elements were true before some are set: those of values that are known, or the bound."""
        values = self._values.of(mask, decides=False) if mask.is_meta else None
        return self._known(mask) if values is None else int(values.count_nonzero())

    def _remember(self, mask: torch.Tensor, most: int | None, version: int) -> None:
        storage = mask.untyped_storage()
        self._bounds.pop(storage._cdata, None)
        if most is not None and most < mask.numel():
            reference = weakref.ref(storage, forgetting(self._bounds, storage._cdata))
            self._bounds[storage._cdata] = _Bound(reference, version, most)


def _entries(mask: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> int | None:
    """Return how many elements indices name at most; None if some are masks themselves."""
    named = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in named):
        return None
    others = [size for size, index in zip(mask.shape, (*indices, *[None] * mask.dim()), strict=False) if index is None]
    return torch.broadcast_shapes(*(index.shape for index in named)).numel() * math.prod(others)


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
