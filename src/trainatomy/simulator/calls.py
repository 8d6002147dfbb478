"""One call of an operator as a value, and as a cheap key by which equal calls are found."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from trainatomy.results.operations import Array, Call


class Places:
    """The storages of one call by their keys, and the places in them where its tensors begin, each numbered."""

    __slots__ = ("parts", "storages")

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}
        self.parts: dict[tuple[int, int], int] = {}


class Seen(tuple[Any, ...]):
    """Shape, strides, dtype, place of the storage among those of the call, whether it is the host's, and the place of
    its first element."""

    __slots__ = ()


def storages_of(seen: Any) -> list[int]:
    """The places of the storages of a key's tensors."""
    if type(seen) is Seen:
        return [seen[3]]
    return [place for item in seen for place in storages_of(item)] if type(seen) is tuple else []


def arrays(seen: Any) -> tuple[Array, ...]:
    """The tensors of a key, flattened."""
    if type(seen) is Seen:
        shape, strides, dtype, place, on_host, part = seen
        return (Array(tuple(shape), tuple(strides), text(dtype), dtype.itemsize, place, on_host, part),)
    return tuple(array for item in seen for array in arrays(item)) if type(seen) is tuple else ()


def text(value: Any) -> str:
    return str(value).removeprefix("torch.").replace("meta", "cuda")


def described(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    seen: tuple[Any, Any, Any],
    in_place: bool,
    no_new_storage: bool,
) -> Call:
    """The call as a value; runs once for each distinct one."""
    schema = func._schema
    inputs, lengths, numbers, written = _arguments(schema, seen)
    outputs = arrays(seen[2])
    name = schema.name
    if in_place:
        outputs = tuple(array._replace(storage=inputs[0].storage, part=inputs[0].part) for array in outputs)
        written, name = [0], _in_place_name(name)
    is_view = bool(outputs) and no_new_storage and not written
    return Call(
        name,
        tuple(inputs),
        outputs,
        tuple(lengths),
        tuple(numbers),
        _flop(func, args, kwargs, result),
        tuple(written),
        is_view,
        torch.Tag.pointwise in func.tags,
    )


def _arguments(
    schema: Any, seen: tuple[Any, Any, Any]
) -> tuple[list[Array], list[int], list[tuple[str, str]], list[int]]:
    """Tensors flattened, lengths of lists, other arguments as text, positions of the tensors that are written to."""
    inputs: list[Array] = []
    lengths: list[int] = []
    numbers: list[tuple[str, str]] = []
    written: list[int] = []
    by_name = dict(seen[1])
    for position, argument in enumerate(schema.arguments):
        value = seen[0][position] if position < len(seen[0]) else by_name.get(argument.name)
        tensors = arrays(value)
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.extend(range(len(inputs), len(inputs) + len(tensors)))
        inputs.extend(tensors)
        if type(value) is tuple and (tensors or "Tensor" in str(argument.type)):
            lengths.append(len(tensors))
            if len(tensors) < len(value):  # indices: which dimensions are indexed
                numbers.append((argument.name, ", ".join("*" if type(item) is Seen else "None" for item in value)))
        elif value is not None and not tensors:
            numbers.append((argument.name, text(list(value) if type(value) is tuple else value)))
    return inputs, lengths, numbers, written


def _in_place_name(name: str) -> str:
    space, _, operator = name.partition("::")
    return f"{name}_" if hasattr(getattr(torch.ops, space), f"{operator}_") else name


def _flop(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int | None:
    """By torch's registry, as ``FlopCounterMode`` calls it (torch/utils/flop_counter.py); None where it has no formula
    or the formula does not take these shapes."""
    formula = flop_registry.get(func._overloadpacket)
    if formula is None:
        return None
    try:
        return int(formula(*args, **kwargs, out_val=result))
    except AssertionError:
        return None
