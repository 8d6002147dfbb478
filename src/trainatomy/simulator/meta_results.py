"""Results of operators on meta tensors, remembered by the shapes of their arguments.

Most of PyTorch's meta kernels are written in Python and take 0.2 to 2 ms, several times as long as everything else that
a simulation does for an operation.  A training calls the same operators on the same shapes in every layer and step, so
the second call only makes empty tensors of the shapes, strides and types that the first one returned.  Every simulation
registers the same meta kernels (``meta_kernels``), so that what one remembers serves the next ones of the process, too.

Operators on lists (``_foreach``) run their kernel on one tensor of each kind only: a model has hundreds of parameters
of a dozen shapes.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, NamedTuple

import torch

_SCALARS = frozenset((bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format, torch.device))
_CHEAP = frozenset({"aten::_to_copy", "aten::clone", "aten::new_empty", "aten::zero_", "aten::fill_", "aten::copy_"})
"""Operators whose meta kernel is about as fast as looking a result up."""


_INTO_OUT = frozenset((torch.ops.aten.mm.dtype_out, torch.ops.aten.addmm.dtype_out))
"""Products into a tensor of a type other than their operands', which PyTorch's meta kernels refuse."""


_MOST_REMEMBERED = 100_000
"""Results that are remembered at once, about 100 MB; a training of a large model has a few thousand."""


class _Like(NamedTuple):
    """An empty tensor to make: shape, strides in elements, dtype."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


_Remembered = _Like | None | tuple["_Remembered", ...]


class MetaResults:
    """Run operators on meta tensors; calls that are equal but for the identity of their tensors run once.

    Remembered are aten operators whose results are new dense tensors, and in-place forms that leave the shape, strides
    and type of their tensor as they are.  Views, and results whose shape depends on values, are not.
    """

    def __init__(self) -> None:
        self._results: dict[Any, _Remembered] = {}
        self._never: set[Any] = set()
        self._kinds: dict[int, str] = {}  # by identity, as hashing an operator is slow
        self._operators: list[Any] = []  # kept alive, so that no other operator gets the identity of one

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of ``func``, as the meta kernel would."""
        if func in _INTO_OUT:
            return kwargs["out"]
        kind = self._kinds.get(id(func))
        if kind is None:
            kind = self._kinds[id(func)] = _kind(func)
            self._operators.append(func)
        if kind == "list":
            return _on_list(func, args, kwargs)
        arguments = None if kind == "other" else _key((*args, *kwargs.items()) if kwargs else args)
        if arguments is None:
            return func(*args, **kwargs)
        key = (id(func), len(args), torch.get_default_dtype(), arguments)
        if key in self._results:
            return args[0] if kind == "in-place" else _make(self._results[key])
        if key in self._never:
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if kind == "in-place":
            unchanged = result is args[0] and _key((*args, *kwargs.items()) if kwargs else args) == arguments
            self._results.update({key: None} if unchanged else {})
            self._never.update(() if unchanged else {key})
            return result
        if len(self._results) >= _MOST_REMEMBERED:
            self._results.clear()
        storages = {tensor.untyped_storage()._cdata for tensor in _tensors((*args, *kwargs.values()))}
        if _is_new(result, storages):
            self._results[key] = _description(result)
        else:
            self._never.add(key)
        return result


@cache
def results_of_process() -> MetaResults:
    """Return the results that all simulations of this process remember; one runs at a time."""
    return MetaResults()


@cache
def _kind(func: Any) -> Literal["functional", "in-place", "list", "other"]:
    """Return whether an operator returns new tensors only, or writes to its first argument only and returns it.

    ``list``: it does one of the two to each tensor of a list, independently of the others.
    """
    schema = func._schema
    if schema.name.startswith("aten::_foreach_"):
        return "list"
    tags = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
    returned = [each.alias_info for each in schema.returns if str(each.type) == "Tensor"]
    if func.namespace != "aten" or schema.name in _CHEAP or any(tag in func.tags for tag in tags):
        return "other"
    if not returned or len(returned) < len(schema.returns):
        return "other"
    written = [each.alias_info is not None and each.alias_info.is_write for each in schema.arguments]
    if not any(written) and all(alias is None for alias in returned):
        return "functional" if any("Tensor" in str(each.type) for each in schema.arguments) else "other"
    in_place = written[:1] == [True] and sum(written) == 1 and len(returned) == 1 and returned[0] is not None
    return "in-place" if in_place and returned[0].is_write else "other"


def _on_list(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on lists with the first item of each kind, and give the others results of the same layout.

    Items are of one kind if their tensors have the same shape, strides and type.
    """
    lists = {place for place, value in enumerate(args) if isinstance(value, (list, tuple))}
    named_list = any(isinstance(value, (list, tuple)) for value in kwargs.values())
    if named_list or len({len(args[place]) for place in lists}) != 1:
        return func(*args, **kwargs)
    first: dict[Any, int] = {}
    kinds = []
    for number, item in enumerate(zip(*(args[place] for place in sorted(lists)), strict=True)):
        kind = tuple(_key(part) if isinstance(part, torch.Tensor) else type(part) for part in item)
        if None in kind:
            return func(*args, **kwargs)
        kinds.append(kind)
        first.setdefault(kind, number)
    result = func(
        *([value[each] for each in first.values()] if place in lists else value for place, value in enumerate(args)),
        **kwargs,
    )
    if result is None:
        return None
    if not _is_new(result, {tensor.untyped_storage()._cdata for tensor in _tensors(args)}):
        return func(*args, **kwargs)
    made = dict(zip(first, result, strict=True))
    likes = {kind: _description(tensor) for kind, tensor in made.items()}
    return [made[kind] if first[kind] == number else _make(likes[kind]) for number, kind in enumerate(kinds)]


def _key(value: Any) -> Any:
    """Return a value as a part of a key: tensors by their metadata, numbers with their type; None if it has no key.

    The type matters: ``x * 2`` and ``x * 2.0`` have results of different types.
    """
    if value is None:
        return ()
    if isinstance(value, torch.Tensor):
        if not value.is_meta or value.layout != torch.strided:
            return None
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        parts = []
        for item in value:
            part = _key(item)
            if part is None:
                return None
            parts.append(part)
        return type(value), tuple(parts)
    return (type(value), value) if type(value) in _SCALARS else None


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _is_new(result: Any, storages: set[int]) -> bool:
    """Return whether a result consists of meta tensors that fill storages of their own, none of ``storages``."""
    seen = set(storages)
    for tensor in _tensors(result):
        if not tensor.is_meta or tensor.layout != torch.strided:
            return False
        storage = tensor.untyped_storage()
        dense = _make(_description(tensor)).untyped_storage().nbytes()
        if storage._cdata in seen or tensor.storage_offset() or storage.nbytes() != dense:
            return False
        seen.add(storage._cdata)
    return True


def _description(result: Any) -> _Remembered:
    if isinstance(result, torch.Tensor):
        return _Like(result.shape, result.stride(), result.dtype)
    return None if result is None else tuple(_description(item) for item in result)


def _make(remembered: _Remembered) -> Any:
    """Make the empty tensors of a remembered result."""
    if isinstance(remembered, _Like):
        return torch.empty_strided(remembered.shape, remembered.strides, dtype=remembered.dtype, device="meta")
    return None if remembered is None else tuple(_make(item) for item in remembered)
