"""Operations written by hand."""

from __future__ import annotations

from typing import Any

from trainatomy.results.operations import Array, Call, Operation, Operations

SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "bool": 1}


def array(
    *shape: int, dtype: str = "float16", storage: int = 0, on_host: bool = False, part: int | None = None
) -> Array:
    """Return a dense tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    part = storage if part is None else part
    return Array(shape, tuple(reversed(strides)), dtype, SIZES[dtype], storage, on_host, part)


def call(name: str, inputs: list[Array], outputs: list[Array], **more: Any) -> Call:
    """Return a call; tensors share memory only if their ``storage`` is equal."""
    return Call(f"aten::{name}", tuple(inputs), tuple(outputs), **more)


def product(m: int, n: int, k: int, dtype: str = "float16") -> Call:
    """Return the ``mm`` of [m, k] and [k, n]."""
    tensors = [array(m, k, dtype=dtype), array(k, n, dtype=dtype, storage=1)]
    return call("mm", tensors, [array(m, n, dtype=dtype, storage=2)], flop=2 * m * n * k)


def step(*rows: tuple[Call, str] | tuple[Call, str, str] | tuple[Call, str, str, int]) -> Operations:
    """Return operations from rows of (call, phase, module, repeats)."""
    calls = list(dict.fromkeys(row[0] for row in rows))
    found = []
    for row in rows:
        phase, module, repeats = (*row[1:], *("", 1)[len(row) - 2 :])
        found.append(Operation(0, calls.index(row[0]), str(phase), str(module), 0, int(repeats)))
    return Operations(calls, found, {}, 1)
