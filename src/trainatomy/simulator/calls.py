"""Calls of operators: a cheap key by which equal calls are found, and the ``Call`` value made from it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from trainatomy.errors import SimulationError
from trainatomy.results.operations import Array, Call
from trainatomy.simulator.storages import NESTED, Storages

_COPIES_TO_RESULT = frozenset({"fsdp::all_gather_copy_in"})
"""Operators that copy their list into a part of another argument, their first result, and do not declare it."""


class TensorKey(tuple[Any, ...]):
    """Tensor in a call's key: shape, strides, dtype, number of the storage, on host or not, number of the part."""

    __slots__ = ()


class StorageNumbers:
    """Numbers of the storages of one call, by their keys, and of the places in them where its tensors begin."""

    __slots__ = ("_location", "parts", "storages")

    def __init__(self, location: Storages) -> None:
        """Take the location of all tensors."""
        self.storages: dict[int, int] = {}
        self.parts: dict[tuple[int, int], int] = {}
        self._location = location

    def key(self, value: Any) -> Any:
        """Return a value as part of a call's key: tensors as ``TensorKey``, lists as tuples.

        A sparse tensor counts as its values.
        """
        if isinstance(value, torch.Tensor):
            if value.is_nested:
                raise SimulationError(NESTED)
            value = value._values() if value.layout == torch.sparse_coo else value
            storage = value.untyped_storage()._cdata
            number = self.storages.setdefault(storage, len(self.storages))
            part = self.parts.setdefault((storage, int(value.storage_offset())), len(self.parts))
            on_host = self._location.is_host_key(storage) if value.is_meta else True
            return TensorKey((value.shape, value.stride(), value.dtype, number, on_host, part))
        if isinstance(value, (list, tuple)):
            return tuple([self.key(item) for item in value])
        return None if isinstance(value, torch.Generator) else value


def storages_in(key: Any) -> list[int]:
    """Return the storage numbers of all tensors in a key."""
    if type(key) is TensorKey:
        return [key[3]]
    return [number for item in key for number in storages_in(item)] if type(key) is tuple else []


def arrays(key: Any) -> tuple[Array, ...]:
    """Return the tensors of a key, flattened."""
    if type(key) is TensorKey:
        shape, strides, dtype, storage, on_host, part = key
        return (Array(tuple(shape), tuple(strides), text(dtype), dtype.itemsize, storage, on_host, part),)
    return tuple(array for item in key for array in arrays(item)) if type(key) is tuple else ()


def text(value: Any) -> str:
    """Return an argument as text, with the device of the simulated GPU."""
    return str(value).removeprefix("torch.").replace("meta", "cuda")


def call_of(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    keys: tuple[Any, Any, Any],
    in_place: bool,
    no_new_storage: bool,
) -> Call:
    """Return a call as a value; runs once for each distinct call.

    Args:
        func: Operator overload.
        args: Positional arguments.
        kwargs: Keyword arguments.
        result: Its result.
        keys: Keys of positional arguments, keyword arguments and result.
        in_place: True if a GPU writes the result into the first argument.
        no_new_storage: True if the result shares its storages with the arguments.
    """
    schema = func._schema
    inputs, lengths, numbers, written = _arguments(schema, keys)
    outputs = arrays(keys[2])
    name = schema.name
    if name in _COPIES_TO_RESULT:
        inputs, outputs, no_new_storage = inputs[: lengths[0]], outputs[:1], False
    if in_place:
        outputs = tuple(array._replace(storage=inputs[0].storage, part=inputs[0].part) for array in outputs)
        written, name = [0], _in_place_name(name)
    return Call(
        name,
        tuple(inputs),
        outputs,
        tuple(lengths),
        tuple(numbers),
        _flop(func, args, kwargs, result),
        tuple(written),
        is_view=bool(outputs) and no_new_storage and not written,
        pointwise=torch.Tag.pointwise in func.tags,
    )


def _arguments(
    schema: Any, keys: tuple[Any, Any, Any]
) -> tuple[list[Array], list[int], list[tuple[str, str]], list[int]]:
    """Return flattened tensors, lengths of lists, other arguments as text, and positions that are written to."""
    inputs: list[Array] = []
    lengths: list[int] = []
    numbers: list[tuple[str, str]] = []
    written: list[int] = []
    by_name = dict(keys[1])
    for position, argument in enumerate(schema.arguments):
        value = keys[0][position] if position < len(keys[0]) else by_name.get(argument.name)
        tensors = arrays(value)
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.extend(range(len(inputs), len(inputs) + len(tensors)))
        inputs.extend(tensors)
        if type(value) is tuple and (tensors or "Tensor" in str(argument.type)):
            lengths.append(len(tensors))
            if len(tensors) < len(value):  # indices: shows which dimensions are indexed
                numbers.append((argument.name, ", ".join("*" if type(item) is TensorKey else "None" for item in value)))
        elif value is not None and not tensors:
            numbers.append((argument.name, text(list(value) if type(value) is tuple else value)))
    return inputs, lengths, numbers, written


def _in_place_name(name: str) -> str:
    """Return the name of an operator's in-place variant, where it has one."""
    space, _, operator = name.partition("::")
    return f"{name}_" if hasattr(getattr(torch.ops, space), f"{operator}_") else name


def _flop(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int | None:
    """Return the floating-point operations by torch's registry, called as ``FlopCounterMode`` does.

    None where it has no formula, or one that does not take these arguments: ``addmm`` with an ``out_dtype`` raises
    TypeError (torch/utils/flop_counter.py).
    """
    formula = flop_registry.get(func._overloadpacket)
    if formula is None:
        return None
    try:
        return int(formula(*args, **kwargs, out_val=result))
    except (AssertionError, TypeError):
        return None
