"""Operators on lists of tensors: ``_foreach_*``, fused optimizers, norms for clipping.

A launch of ``multi_tensor_apply`` takes a limited number of tensors, fewer the more lists there are, and 320 chunks of
65,536 elements (aten/src/ATen/native/cuda/MultiTensorApply.cuh). A block of threads walks over a chunk, so that a
launch takes as long as its longest chunk however few there are. Lists on the CPU (step counters) launch nothing.
"""

from __future__ import annotations

from math import ceil, hypot
from typing import NamedTuple

from trainatomy.operators.cost.elementwise import memory_bound
from trainatomy.operators.cost.kernel import (
    NOTHING,
    Chip,
    KernelWork,
    Passes,
    efficiency_of,
    name_of,
    on_gpu,
    passes_to,
)
from trainatomy.operators.traffic import in_memory, traffic
from trainatomy.results.operations import Array, Call

_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""Tensors of a launch, by the number of lists."""
_CHUNK, _CHUNKS = 65536, 320


_START, _ELEMENT = 2.5e-6, 0.48e-9
"""Seconds of a launch, and of each element of a chunk, of a fused optimizer: 34 µs for a full chunk in small networks
on an H200 (lab/timing/records/random-calls-h200.jsonl.gz)."""


class _Launch(NamedTuple):
    """Tensors of one launch.

    Attributes:
        longest: Elements of its longest chunk.
        elements: Elements of all chunks.
    """

    longest: int
    elements: int


def foreach(call: Call, chip: Chip) -> KernelWork:
    """Return the work of reading every list and writing the one that is written or returned."""
    tensors = on_gpu(call.inputs)
    if not tensors or not call.lengths:
        return NOTHING
    first = call.inputs[: call.lengths[0]]
    if first[0].on_host:
        return NOTHING
    short, lists = name_of(call), len(call.lengths)
    passes: Passes = ()
    norms = short == "_foreach_norm"
    if norms:  # two kernels more sum up what the blocks found
        passes = (("norms, which stay in the cache", -traffic(call).written),)
    elif call.outputs and not call.written:
        lists += 1
    launches = launches_of(first, lists) + 2 * norms
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
    size = [sum(in_memory(t) for t in group if not t.on_host) for group in lists if group]  # no largest moments: empty
    steps = 0 if name_of(call) == "_fused_sgd_" else 1  # a list of step counters
    moved = 2 * sum(size[: len(size) - steps]) - size[1] + sum(size[len(size) - steps :])
    passes = passes_to(call, moved, "gradients are only read, scalars are in the cache")
    family = f"list.fused.{8 * lists[0][0].itemsize}"
    launches = _launches(lists[0], len(size) - steps)
    seconds, each = 0.0, moved / max(sum(one.elements for one in launches), 1)
    for one in launches:
        walked = _START + one.longest * _ELEMENT
        seconds += hypot(walked, one.elements * each / (chip.bandwidth * efficiency_of(family).share))
    return memory_bound(family, chip, call, launches=len(launches), passes=passes)._replace(seconds=seconds)


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
    """Return how many launches cover the tensors."""
    return len(_launches(tensors, lists))


def _launches(tensors: tuple[Array, ...], lists: int) -> list[_Launch]:
    """Return the launches that cover the tensors.

    A launch is full by tensors or by chunks; a tensor that does not fit goes on in the next.
    """
    limit = _TENSORS.get(min(max(lists, 1), 5), 30)
    found: list[_Launch] = []
    chunks = held = longest = elements = 0
    for tensor in tensors:
        if not tensor.elements:
            continue
        held += 1
        rest, left = tensor.elements, ceil(tensor.elements / _CHUNK)
        while left:
            taken = min(left, _CHUNKS - chunks)
            part = min(rest, taken * _CHUNK)
            longest, elements, rest = max(longest, min(rest, _CHUNK)), elements + part, rest - part
            chunks, left = chunks + taken, left - taken
            if chunks == _CHUNKS or (held == limit and not left):
                found.append(_Launch(longest, elements))
                chunks, held = 0, 1 if left else 0
                longest = elements = 0
    return [*found, _Launch(longest, elements)] if chunks else found
