"""Count the bytes that a call has to read and write in GPU memory, for the operation breakdown and for kernel costs.

Counted as in *Data Movement Is All You Need* (arXiv 2007.00072), section 3: each distinct input and output once,
whatever a kernel's caches do. What a kernel moves beyond that is named by its cost function
(``cost.kernel.KernelWork.passes``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from trainatomy.operators.operator import Operator
from trainatomy.operators.registry import find
from trainatomy.results.operations import Array, Call

COPIES = frozenset({"aten::_to_copy", "aten::copy_", "aten::clone"})
"""Operators that may copy between host memory and GPU memory."""


class Traffic(NamedTuple):
    """Compulsory traffic of a call in GPU memory, in bytes."""

    read: int
    written: int

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.read + self.written


def traffic(call: Call) -> Traffic:
    """Return the compulsory traffic of a call; tensors in host memory count nothing."""
    operator = find(call.name)
    reads = "all" if operator is None else operator.reads
    writes = _written_inputs(call, operator)
    written = _bytes((*(call.inputs[position] for position in writes), *call.outputs))
    if reads == "none":
        return Traffic(0, written)
    if reads == "rows":
        indices = [array for array in call.inputs[1:] if array.dtype.startswith(("int", "bool"))]
        return Traffic(written + _bytes(indices), written)
    overwritten: Collection[int] = writes if reads == "sources" else ()
    read = _bytes(array for position, array in enumerate(call.inputs) if position not in overwritten)
    return Traffic(read, written)


def crosses(call: Call) -> bool:
    """Return whether a call copies between host memory and GPU memory."""
    return call.name in COPIES and len({array.on_host for array in (*call.inputs, *call.outputs)}) == 2


def is_asynchronous(call: Call) -> bool:
    """Return whether a copy between host memory and GPU memory lets the CPU go on (``non_blocking``, pinned memory)."""
    return crosses(call) and ("non_blocking", "True") in call.numbers


def in_memory(array: Array) -> int:
    """Return the bytes that a tensor has in memory: broadcast dimensions (stride 0) count once."""
    if all(array.strides):
        return array.bytes
    count = 1
    for size, stride in zip(array.shape, array.strides, strict=True):
        count *= size if stride else min(size, 1)
    return count * array.itemsize


def _written_inputs(call: Call, operator: Operator | None) -> tuple[int, ...]:
    """Return the positions in ``call.inputs`` that the kernel writes to."""
    if operator is None or operator.read_only_list is None:
        return call.written
    start = sum(call.lengths[: operator.read_only_list])
    read_only = range(start, start + call.lengths[operator.read_only_list])
    return tuple(position for position in call.written if position not in read_only)


def _bytes(arrays: Iterable[Array]) -> int:
    """Return the bytes of each distinct part of GPU memory."""
    parts = {(array.storage, array.part, array.shape, array.strides): array for array in arrays if not array.on_host}
    return sum(map(in_memory, parts.values()))
