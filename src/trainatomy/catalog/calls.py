"""Text form of an operator call, which calibration files use to name the timed calls.

Example: ``aten::mm(bf16[512,1024],bf16[1024,4096|1,1024])->bf16[512,4096];k=v``.

- A tensor is its type's short name and its sizes; strides follow after a bar where it is not contiguous.
- ``@2``: shares memory with the tensor at position 2 of the line.  ``*3``: three equal tensors, each with own memory.
- ``h`` in front: lies in host memory.  ``!`` behind: is written to.
- ``#`` precedes the lengths of list arguments.  The FLOP count is not kept.
- Arguments of convolutions are left out where they are the usual ones (stride 1, no padding, one group, ...).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from math import prod

from trainatomy.results.operations import Array, Call

SHORT = {
    "float32": "f32", "float16": "f16", "bfloat16": "bf16", "float64": "f64", "int64": "i64", "int32": "i32",
    "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "b8", "float8_e4m3fn": "f8e4", "float8_e5m2": "f8e5",
    "complex64": "c64",
}  # fmt: skip
LONG = {short: long for long, short in SHORT.items()}
BYTES = {"f32": 4, "f16": 2, "bf16": 2, "f64": 8, "i64": 8, "i32": 4, "i16": 2, "c64": 8}

_USUAL = {"stride": 1, "padding": 0, "dilation": 1, "transposed": False, "output_padding": 0, "groups": 1}
"""Arguments of a convolution with their usual values; lists have the value in each dimension."""
_ARGUMENTS = {
    "aten::convolution": tuple(_USUAL),
    "aten::convolution_backward": ("bias_sizes", *_USUAL, "output_mask"),
}
"""Arguments of convolutions in the order of their schemas."""

_IN_HOST_MEMORY = re.compile(r"[(,>]h\w+\[")
_ARRAY = re.compile(r"(h?)(\w+)\[([\d,]*)(?:\|([\d,]*))?\](?:@(\d+))?(?:\*(\d+))?(!?)")


@cache
def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of that shape."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def array(dtype: str, *shape: int, strides: tuple[int, ...] | None = None, storage: int = -1) -> Array:
    """Make a tensor from the short or long name of its type; contiguous unless ``strides`` (in elements) are given."""
    short = SHORT.get(dtype, dtype)
    return Array(
        shape, contiguous(shape) if strides is None else strides, LONG.get(short, dtype), BYTES.get(short, 1), storage
    )


def to_text(call: Call) -> str:
    """Return the line for ``call``."""
    first: dict[int, int] = {}
    words = []
    for position, tensor in enumerate((*call.inputs, *call.outputs)):
        shared = first.setdefault(tensor.storage, position)
        words.append(_word(tensor, shared if shared != position else None, position in call.written))
    count = len(call.inputs)
    text = f"{call.name}({_joined(words[:count])})->{_joined(words[count:])}"
    if call.lengths:
        text += "#" + ",".join(map(str, call.lengths))
    usual = _usual_numbers(call.name, call.inputs)
    return text + "".join(f";{key}={value}" for key, value in call.numbers if usual.get(key) != value)


def _usual_numbers(name: str, inputs: Sequence[Array]) -> dict[str, str]:
    """Return the usual arguments of a convolution of these inputs, as texts; nothing for other operators."""
    if name not in _ARGUMENTS or not inputs:
        return {}
    dimensions = len(inputs[0].shape) - 2
    single = ("transposed", "groups")
    return {key: str(value if key in single else [value] * dimensions) for key, value in _USUAL.items()}


def _with_usual_numbers(name: str, inputs: Sequence[Array], given: dict[str, str]) -> dict[str, str]:
    """Return the arguments of a call, and the usual ones that a line leaves out, in the order of the schema."""
    every = _usual_numbers(name, inputs) | given
    return {key: every.pop(key) for key in _ARGUMENTS.get(name, ()) if key in every} | every


def _word(tensor: Array, shared: int | None, written: bool) -> str:
    sizes = ",".join(map(str, tensor.shape))
    if tensor.strides != contiguous(tensor.shape):
        sizes += "|" + ",".join(map(str, tensor.strides))
    own = "" if shared is None else f"@{shared}"
    host = "h" if tensor.on_host else ""
    return f"{host}{SHORT.get(tensor.dtype, tensor.dtype)}[{sizes}]{own}{'!' if written else ''}"


def _joined(words: list[str]) -> str:
    """Join words; equal neighbours are written once, with their count before the ``!``."""
    parts = []
    for word, run in groupby(words):
        count = len(list(run))
        mark = "!" if word.endswith("!") else ""
        parts.append(f"{word.removesuffix('!')}{f'*{count}' if count > 1 else ''}{mark}")
    return ",".join(parts)


def has_host_memory(text: str) -> bool:
    """Return whether a tensor of a line of ``to_text`` lies in host memory, without parsing the line."""
    return _IN_HOST_MEMORY.search(text) is not None


@cache
def from_text(text: str) -> Call:
    """Parse a line of ``to_text``; raises ``ValueError`` for any other text."""
    head, *pairs = text.split(";")
    matched = re.fullmatch(r"([\w:.]+)\((.*)\)->([^#]*)(?:#([\d,]*))?", head)
    if matched is None:
        raise ValueError(f"not a call: {text!r}")
    name, before, after, lengths = matched.groups()
    inputs, written = _arrays(before, [])
    outputs, _ = _arrays(after, inputs)
    given = {key: value for key, _, value in (pair.partition("=") for pair in pairs)}
    numbers = tuple(_with_usual_numbers(name, inputs, given).items())
    sizes = tuple(int(size) for size in lengths.split(",")) if lengths else ()
    return Call(name, tuple(inputs), tuple(outputs), sizes, numbers, None, tuple(written))


def _arrays(text: str, before: list[Array]) -> tuple[list[Array], list[int]]:
    found: list[Array] = []
    written: list[int] = []
    for host, dtype, sizes, strides, shared, count, mark in _ARRAY.findall(text):
        shape = _numbers(sizes)
        steps = _numbers(strides) if strides else contiguous(shape)
        storage = (before + found)[int(shared)].storage if shared else -1
        name, size, on_host = LONG.get(dtype, dtype), BYTES.get(dtype, 1), bool(host)
        for position in range(len(before) + len(found), len(before) + len(found) + int(count or 1)):
            if mark:
                written.append(position)
            found.append(Array(shape, steps, name, size, storage if shared else position, on_host))
    return found, written


@cache
def _numbers(text: str) -> tuple[int, ...]:
    return tuple([int(part) for part in text.split(",") if part])
