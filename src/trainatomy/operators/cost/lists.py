"""Operators on lists of tensors: ``_foreach_*``, fused optimizers, norms for clipping.

A launch of ``multi_tensor_apply`` takes a limited number of tensors, fewer the more lists there are, and 320 chunks of
65,536 elements (aten/src/ATen/native/cuda/MultiTensorApply.cuh). Lists on the CPU (step counters) launch nothing.
"""

from __future__ import annotations

from math import ceil

from trainatomy.operators.cost.elementwise import memory_bound
from trainatomy.operators.cost.kernel import NOTHING, Chip, KernelWork, Passes, name_of, on_gpu, passes_to
from trainatomy.operators.traffic import in_memory, traffic
from trainatomy.results.operations import Array, Call

_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""Tensors of a launch, by the number of lists."""
_CHUNK, _CHUNKS = 65536, 320


def foreach(call: Call, chip: Chip) -> KernelWork:
    """Return the work of reading every list and writing the one that is written or returned."""
    tensors = on_gpu(call.inputs)
    if not tensors or not call.lengths:
        return NOTHING
    first = call.inputs[: call.lengths[0]]
    if first[0].on_host:
        return NOTHING
    short = name_of(call)
    lists = len(call.lengths) + (1 if call.outputs and not call.written else 0)
    launches = launches_of(first, lists)
    passes: Passes = ()
    if short == "_foreach_norm":
        launches, passes = launches + 2, (("norms, which stay in the cache", -traffic(call).written),)
    family = f"list.foreach.{8 * first[0].itemsize}.{short}"
    return memory_bound(family, chip, call, launches=launches, passes=passes)


def fused_optimizer(call: Call, chip: Chip) -> KernelWork:
    """Return the work of updating parameters and states in one pass: gradients are read, the rest read and written."""
    lists: list[tuple[Array, ...]] = []
    start = 0
    for length in call.lengths:
        lists.append(call.inputs[start : start + length])
        start += length
    if not lists or not lists[0] or lists[0][0].on_host:
        return NOTHING
    size = [sum(in_memory(t) for t in group if not t.on_host) for group in lists]
    steps = 1 if len(lists) > 2 else 0
    moved = 2 * sum(size[: len(size) - steps]) - size[1] + sum(size[len(size) - steps :])
    passes = passes_to(call, moved, "the last list is only read, scalars are in the cache")
    launches = launches_of(lists[0], min(len(lists), 5))
    return memory_bound(f"list.fused.{8 * lists[0][0].itemsize}", chip, call, launches=launches, passes=passes)


def deepspeed_adam(call: Call, chip: Chip) -> KernelWork:
    """Return the work of DeepSpeed's Adam: four lists one after the other, of which gradients are only read.

    It has the launches of PyTorch's lists (csrc/adam/multi_tensor_apply.cuh).  On the CPU it launches nothing.
    """
    if not call.inputs or call.inputs[0].on_host:
        return NOTHING
    gradients = call.inputs[: len(call.inputs) // 4]
    family = f"list.fused.{8 * gradients[0].itemsize}"
    return memory_bound(family, chip, call, launches=launches_of(gradients, 4))


def unscale(call: Call, chip: Chip) -> KernelWork:
    """Return the work of unscaling gradients and setting a flag."""
    moved = 2 * sum(in_memory(t) for t in on_gpu(call.inputs))
    passes = passes_to(call, moved, "the inverse scale counted as written")
    return memory_bound("list.unscale", chip, call, launches=launches_of(call.inputs, 1), passes=passes)


def launches_of(tensors: tuple[Array, ...], lists: int) -> int:
    """Return how many launches cover the tensors.

    A launch is full by tensors or by chunks; a tensor that does not fit goes on in the next.
    """
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
