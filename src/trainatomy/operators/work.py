"""What one call does: floating-point operations, and bytes read and written."""

from __future__ import annotations

from dataclasses import dataclass

from trainatomy.operators.groups import Group, Rule, rule_of
from trainatomy.results.operations import Array, Call

_READ_BY_HOST = frozenset({"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"})


@dataclass(frozen=True, slots=True)
class Work:
    """``kind``: kernel, view (nothing runs), host (runs on the CPU), read (a value comes to the host), transfer (a copy
    between host and device).  ``flop`` is ``None`` where there is no formula; ``read`` and ``written`` are bytes."""

    kind: str
    rule: Rule | None = None
    flop: int | None = 0
    read: int = 0
    written: int = 0

    @property
    def group(self) -> Group | None:
        """The group of a kernel."""
        return self.rule.group if self.rule is not None else None

    @property
    def bytes(self) -> int:
        """All that it moves."""
        return self.read + self.written


def work_of(call: Call) -> Work:
    """What a call does on the GPU.

    Bytes are counted as the paper counts them (arXiv 2007.00072): each distinct input and output once, whatever a
    kernel's caches do; a broadcast tensor counts what lies in memory; what is only overwritten is not read.
    """
    arrays = (*call.inputs, *call.outputs)
    on_device = [array for array in arrays if not array.on_host]
    if call.name in _READ_BY_HOST:
        return Work("read" if on_device else "host")
    if not on_device:
        return Work("host")
    rule = rule_of(call)
    if rule is None:
        return Work("view")
    read, written = traffic(call, rule)
    from_host = any(array.on_host and array.elements > 1 for array in call.inputs)
    if call.name in ("aten::_to_copy", "aten::copy_") and (from_host or any(a.on_host for a in call.outputs)):
        return Work("transfer", None, 0, read, written)
    return Work("kernel", rule, flop_of(call, rule), read, written)


def flop_of(call: Call, rule: Rule) -> int | None:
    """By PyTorch's registry where it has a formula; for a grouped product 2·S·K·N (S rows in all, each meets one
    group's [K, N]); else the rule's count per element; ``None`` without any."""
    if call.flop is not None:
        return call.flop
    if call.name == "aten::_grouped_mm":
        return _grouped(call)
    return None if rule.flop is None else rule.flop * _elements(call)


def _grouped(call: Call) -> int:
    first, second = (array.shape for array in call.inputs[:2])
    if len(first) == len(second) == 2:  # [K, S] x [S, N]: a product for each group, over its rows
        return 2 * first[0] * first[1] * second[1]
    rows = first[0] if len(first) == 2 else first[0] * first[1]
    return 2 * rows * first[-1] * second[-1]


def _elements(call: Call) -> int:
    if call.lengths and ("_foreach_" in call.name or "_fused_" in call.name):
        return sum(array.elements for array in call.inputs[: call.lengths[0]])
    return max((array.elements for array in (*call.inputs, *call.outputs)), default=0)


def traffic(call: Call, rule: Rule) -> tuple[int, int]:
    """Bytes read and written."""
    outputs = _distinct(call.outputs) or _distinct(tuple(call.inputs[place] for place in call.written))
    written = sum(map(in_memory, outputs))
    if rule.reads == "none":
        return 0, written
    if rule.reads == "rows":
        indices = [array for array in call.inputs[1:] if array.dtype.startswith(("int", "bool"))]
        return written + sum(map(in_memory, indices)), written
    overwritten = call.inputs[0] if call.name == "aten::copy_" else None
    read = sum(in_memory(array) for array in _distinct(call.inputs) if array is not overwritten)
    return read, written


def in_memory(array: Array) -> int:
    """Bytes that a tensor really has in memory: broadcast dimensions (stride 0) count once."""
    count = 1
    for size, stride in zip(array.shape, array.strides, strict=True):
        count *= size if stride else min(size, 1)
    return count * array.itemsize


def _distinct(arrays: tuple[Array, ...]) -> list[Array]:
    """Each part of memory once."""
    found: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Array] = {}
    for array in arrays:
        found.setdefault((array.part, array.shape, array.strides), array)
    return list(found.values())
