"""Joining tensors (``cat``, ``stack``): a grid of blocks for all parts, as large for each as the largest part needs.

A block copies 128 times 16 bytes of a part, or finds that the part has no more and ends, which takes nearly as long.
So a large part beside many small ones, as in DenseNet, costs a block of the large part's for each of the small ones'.
This holds where parts are contiguous, not channels-last, and what lies together of each is a multiple of 16 bytes.
Tensors of five dimensions and parts of other types are copied one after the other; other parts by a kernel that
computes where each number goes.

Source: ``getCatGridContig`` and ``CatArrayBatchedCopy_vectorized`` in aten/src/ATen/native/cuda/Shape.cu.
"""

from __future__ import annotations

from math import ceil, prod

from trainatomy.catalog.files import read_yaml
from trainatomy.operators.cost.elementwise import memory_bound, piecewise_seconds, pointwise
from trainatomy.operators.cost.kernel import Chip, KernelWork, name_of, number, on_gpu
from trainatomy.operators.traffic import traffic
from trainatomy.results.operations import Array, Call

_VECTOR_BYTES, _THREADS, _BLOCKS_OF_A_MULTIPROCESSOR = 16, 128, 32
_PARTS_OF_A_KERNEL = 128
_MOST_DIMENSIONS = 4
_SHORT_BYTES = 128
"""Below this, what lies together of a part is less than a line of the cache, and others write the rest of the line."""


def joined(call: Call, chip: Chip) -> KernelWork:
    """Return the work of joining tensors."""
    parts = [part for part in on_gpu(call.inputs) if part.elements]
    if len(parts) < 2 or not call.outputs:
        return pointwise(call, chip)
    result = call.outputs[0]
    if _dimensions(call) > _MOST_DIMENSIONS or any(part.dtype != result.dtype for part in parts):
        work = memory_bound(f"joined.copies.{8 * result.itemsize}", chip, call, launches=len(parts))
        return work._replace(seconds=piecewise_seconds(chip, parts, result))
    if not _is_vectorised(call, parts):
        return pointwise(call, chip)
    form: dict[str, float] = read_yaml("efficiency.yaml")["joined"]
    most = chip.multiprocessors * _BLOCKS_OF_A_MULTIPROCESSOR
    blocks = min(ceil(max(part.bytes for part in parts) / (_VECTOR_BYTES * _THREADS)), most)
    launches = ceil(len(parts) / _PARTS_OF_A_KERNEL)
    working = blocks * len(parts) * form["block_cycles"] / chip.issue_rate
    moving = traffic(call).bytes / (chip.bandwidth * form["bandwidth"])
    work = memory_bound(f"joined.vectors.{8 * parts[0].itemsize}", chip, call, launches=launches)
    return work._replace(seconds=launches * form["start_seconds"] + max(working, moving))


def _dimensions(call: Call) -> int:
    """Return the dimensions of what is joined; ``stack`` joins along a dimension that the tensors have, unless last."""
    return len(call.outputs[0].shape) - (name_of(call) == "stack" and _axis(call) < len(call.inputs[0].shape))


def _axis(call: Call) -> int:
    axis = int(number(call, "dim", "0"))
    return axis + len(call.outputs[0].shape) if axis < 0 else axis


def _is_vectorised(call: Call, parts: list[Array]) -> bool:
    """Return whether one kernel copies all parts, 16 bytes at a time."""
    axis = _axis(call)
    together = [prod(part.shape[axis:]) * part.itemsize for part in parts]
    return all(part.is_contiguous for part in parts) and all(
        size >= _SHORT_BYTES and not size % _VECTOR_BYTES for size in together
    )
