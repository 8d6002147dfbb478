"""Operations on tensors in host memory and in GPU memory at once: what PyTorch allows, and what it refuses.

A tensor in host memory that has data takes what computed tensors of the GPU are read as (``ScalarReads.host_values``):
validation loops collect their losses so.  From weights of the host, which have no data, it takes zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import torch

from trainatomy.simulator.data_dependent import ScalarReads
from trainatomy.simulator.storages import Storages

_COPIES = {"aten::copy_": 1, "aten::_foreach_copy_": 1}
_FILLS = {
    f"aten::{name}{suffix}": place
    for name, place in (("fill", 1), ("masked_fill", 2), ("index_fill", 3), ("index_put", 2), ("_index_put_impl", 2))
    for suffix in ("", "_")
}
_WRITES = {**_COPIES, **_FILLS}
"""Position of the argument that is written to a tensor in host memory; fills take one number, by ``item()``.

Source: aten/src/ATen/native/Fill.cpp, TensorAdvancedIndexing.cpp (``_index_put_impl_``, ``masked_fill__cpu``), torch
2.9-2.13.
"""
_PICKS = frozenset(
    f"aten::{name}" for name in "index index_put index_put_ _index_put_impl_ _unsafe_index _unsafe_index_put".split()
)
"""Operators whose indices may lie in host memory while the indexed tensor lies on the GPU, but not the reverse."""
_CROSSES = frozenset(
    f"aten::{name}"
    for name in (
        "copy copy_ _foreach_copy_ _to_copy _pack_padded_sequence _foreach_addcmul _foreach_addcmul_ _foreach_addcdiv "
        "_foreach_addcdiv_"
    ).split()
)
"""Operators that take tensors of several devices: lengths, and numbers of lists, lie in host memory."""


class Written(NamedTuple):
    """Result of an operation that wrote to host memory."""

    result: Any


class MixedDevices:
    """Runs or refuses operations that have a tensor with data, which lies in host memory.

    Args:
        storages: Location of meta tensors.
        reads: Answers where Python reads a value.

    Attributes:
        written: The operators that wrote computed values to host memory.
    """

    def __init__(self, storages: Storages, reads: ScalarReads) -> None:
        self.written: set[str] = set()
        self._storages = storages
        self._reads = reads

    def run(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Written | None:
        """Return the result of an operation that writes computed values to host memory; None for any other.

        Raises:
            RuntimeError: PyTorch refuses these devices.
        """
        on_host = [value for value in args if isinstance(value, torch.Tensor) and not value.is_meta]
        place = _WRITES.get(name)
        if place is not None and all(not tensor.is_meta for tensor in _tensors(args[0])):
            others = args[1:place] + args[place + 1 :]
            source = args[place]
            crosses = any(map(self._is_on_gpu, _tensors(source)))
            if any(map(self._is_on_gpu, _tensors(others))) or (crosses and name in _FILLS and source.dim()):
                self._refuse()
            if not any(tensor.is_meta for tensor in _tensors(source)):
                return None
            return Written(func(*args[:place], self._read(name, source), *args[place + 1 :], **kwargs))
        if not name.startswith("aten::") or name in _CROSSES:
            return None
        if name in _PICKS:
            mixes = not args[0].is_meta or any(value.dim() for value in on_host)
        else:
            mixes = any(value.dim() for value in on_host)
        if mixes and any(map(self._is_on_gpu, _tensors(args))):
            self._refuse()
        return None

    def _read(self, name: str, value: Any) -> Any:
        """Return what Python reads of computed tensors."""
        if isinstance(value, torch.Tensor):
            if not value.is_meta:
                return value
            if not self._is_on_gpu(value):  # weights of the host, whose numbers nobody knows
                return torch.zeros(value.shape, dtype=value.dtype, device="cpu")
            found, is_known = self._reads.host_values(value)
            self.written |= set() if is_known else {name}
            return found
        return [self._read(name, item) for item in value]

    def _is_on_gpu(self, tensor: torch.Tensor) -> bool:
        return tensor.is_meta and self._storages.on_device(tensor)

    def _refuse(self) -> NoReturn:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu"
        )


def has_host_tensor(args: tuple[Any, ...]) -> bool:
    """Return whether an argument, or the first item of a list, is a tensor with data."""
    for value in args:
        if type(value) is list and value:
            value = value[0]
        if isinstance(value, torch.Tensor) and not value.is_meta:
            return True
    return False


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
