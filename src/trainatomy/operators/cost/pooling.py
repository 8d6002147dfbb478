"""Pooling: a thread for each number, which computes indices and reads a window; gradients gather or add atomically.

Index arithmetic and reads bound these kernels, not traffic.  In three dimensions, and where the window adapts to the
size of the result, a block of 32 x 8 threads covers a plane of the result, so that small planes leave threads idle.

Sources: aten/src/ATen/native/cuda/DilatedMaxPool2d.cu, DilatedMaxPool3d.cu, AveragePool2d.cu, AveragePool3d.cu,
AdaptiveAveragePooling.cu.  Constants: ``catalog/efficiency.yaml``.
"""

from __future__ import annotations

from math import ceil, log2, prod
from typing import Any

from trainatomy.catalog.files import read_yaml
from trainatomy.operators.cost.kernel import NOTHING, Chip, KernelWork, name_of, number, whole_numbers
from trainatomy.operators.traffic import traffic
from trainatomy.results.operations import Array, Call

_BLOCK = (32, 8)
"""Threads of a block along a row and across rows of a plane."""


def pooled(call: Call, chip: Chip) -> KernelWork:
    """Return the work of ``max_pool*``, ``avg_pool*``, ``_adaptive_avg_pool*`` and their backwards."""
    short, moved = name_of(call), traffic(call).bytes
    if not moved or not call.outputs:
        return NOTHING
    backward, dimensions = short.endswith("_backward"), 3 if "3d" in short else 2
    kind = "adaptive" if "adaptive" in short else "max" if "max" in short else "average"
    wide, pooled_one = (call.outputs[0], call.inputs[0]) if backward else (call.inputs[0], call.outputs[0])
    last = dimensions == 2 and len(wide.shape) == 4 and wide.strides[1] == 1
    window = _window(call, kind, wide, pooled_one, dimensions)
    form: dict[str, Any] = read_yaml("efficiency.yaml")["pooling"]
    way = "backward" if backward else "forward"
    each, read = form[f"{kind}{dimensions}d"][way]
    if dimensions == 3 or kind == "adaptive":
        threads = _padded(pooled_one)
        reads = window * (pooled_one.elements if kind == "adaptive" or backward else threads)
    else:
        threads = wide.elements if backward else pooled_one.elements
        reads = window * pooled_one.elements
    working = (threads * each + reads * read) / chip.multiprocessors
    if backward and kind == "max" and dimensions == 3:
        working += _waiting(wide, pooled_one, window, chip)
    start = form["start_seconds"] * (2 if backward else 1)
    seconds = start + max(working, moved / (chip.bandwidth * form["bandwidth"]))
    family = f"pooling.{kind}{dimensions}d.{way}.{'last' if last else 'first'}"
    features = (log2(moved / chip.l2_bytes), log2(max(window, 1)) / 2)
    return KernelWork(family, features, bytes=moved, launches=2 if backward else 1, seconds=seconds)


def _waiting(wide: Array, pooled_one: Array, window: float, chip: Chip) -> float:
    """Return how long atomic additions wait for those of other windows that have the same maximum.

    The constant is that of interpolation's gradients, whose numbers share places in the same way.
    """
    sharing = window * pooled_one.elements / max(wide.elements, 1)
    known = read_yaml("efficiency.yaml")["resampling"]["atomic_seconds"]["half" if wide.itemsize < 4 else "single"]
    return float(pooled_one.elements * max(sharing - 1, 0) * known[1] / chip.multiprocessors)


def _window(call: Call, kind: str, wide: Array, pooled_one: Array, dimensions: int) -> float:
    """Return how many numbers a result is made from; an adaptive window's ends round outwards.

    A window that is larger than the image (1280 x 1280 in transformers' EfficientNet) reads what there is.
    """
    if kind == "adaptive":
        sides = zip(wide.shape[-dimensions:], pooled_one.shape[-dimensions:], strict=True)
        return prod(size / parts + (size % parts > 0) for size, parts in sides)
    sides_of_window = whole_numbers(number(call, "kernel_size")) or (2,)
    if len(sides_of_window) == 1:
        sides_of_window *= dimensions
    return float(prod(map(min, sides_of_window, wide.shape[-dimensions:])))


def _padded(array: Array) -> int:
    """Return the threads of all blocks over the planes of an array."""
    height, width = array.shape[-2:]
    planes = prod(array.shape[:-2])
    return planes * ceil(width / _BLOCK[0]) * _BLOCK[0] * ceil(height / _BLOCK[1]) * _BLOCK[1]
