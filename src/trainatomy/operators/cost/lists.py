"""Operators on lists of tensors: ``_foreach_*``, fused optimizers, norms for clipping.

A launch of ``multi_tensor_apply`` takes a limited number of tensors, fewer the more lists there are, and 320 chunks of
65,536 numbers (aten/src/ATen/native/cuda/MultiTensorApply.cuh).  Lists on the host (step counters) launch nothing.
"""

from __future__ import annotations

from math import ceil

from trainatomy.operators.cost.traffic import name_of, sized
from trainatomy.operators.cost.work import NOTHING, Chip, Work, distinct, on_device, read_bytes
from trainatomy.results.operations import Array, Call

_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
_CHUNK, _CHUNKS = 65536, 320


def foreach(call: Call, chip: Chip) -> Work:
    """Every list read, and the written or returned one written."""
    tensors = on_device(call.inputs)
    if not tensors or not call.lengths:
        return NOTHING
    first = call.inputs[: call.lengths[0]]
    if first[0].on_host:
        return NOTHING
    short = name_of(call)
    lists = len(call.lengths) + (1 if call.outputs and not call.written else 0)
    only_written = short in ("_foreach_zero_", "_foreach_copy_")
    unread = frozenset(range(call.lengths[0])) if only_written else frozenset()
    read = read_bytes(call, unread)
    written = sum(distinct(t) for t in first) if call.written else sum(distinct(t) for t in on_device(call.outputs))
    launches = launches_of(first, lists)
    if short == "_foreach_norm":
        launches, written = launches + 2, 0
    return sized(f"list.foreach.{8 * first[0].itemsize}.{short}", chip, read + written, launches)


def fused_optimizer(call: Call, chip: Chip) -> Work:
    """Parameters, gradients and states in one pass: gradients are read, the rest is read and written."""
    lists: list[tuple[Array, ...]] = []
    start = 0
    for length in call.lengths:
        lists.append(call.inputs[start : start + length])
        start += length
    if not lists or not lists[0] or lists[0][0].on_host:
        return NOTHING
    size = [sum(distinct(t) for t in group if not t.on_host) for group in lists]
    steps = 1 if len(lists) > 2 else 0
    traffic = 2 * sum(size[: len(size) - steps]) - size[1] + sum(size[len(size) - steps :])
    return sized(f"list.fused.{8 * lists[0][0].itemsize}", chip, traffic, launches_of(lists[0], min(len(lists), 5)))


def unscale(call: Call, chip: Chip) -> Work:
    """Gradients read and written, and a flag."""
    traffic = 2 * sum(distinct(t) for t in on_device(call.inputs))
    return sized("list.unscale", chip, traffic, launches_of(call.inputs, 1))


def launches_of(tensors: tuple[Array, ...], lists: int) -> int:
    """How many launches cover the tensors: a launch is full by tensors or by chunks; a tensor that does not fit goes on
    in the next."""
    limit = _TENSORS.get(min(max(lists, 1), 5), 30)
    launches = chunks = held = 0
    for tensor in tensors:
        if not tensor.elements:
            continue
        held += 1
        left = ceil(tensor.elements / _CHUNK)
        while left:
            taken = min(left, _CHUNKS - chunks)
            chunks, left = chunks + taken, left - taken
            if chunks == _CHUNKS or (held == limit and not left):
                launches += 1
                chunks, held = 0, 1 if left else 0
    return launches + (1 if chunks else 0)
