"""Operators whose cost is what they move: each distinct input read once, each output written once.

Counting: *Data Movement Is All You Need* (arXiv 2007.00072), section 3; an expanded dimension is read from the cache.
What one kernel does besides moving (gelu, dropout's random numbers, type conversions), and how much faster the L2 cache
is than memory, is in the measured efficiency of its family, by size relative to the L2 cache.
"""

from __future__ import annotations

from math import hypot, log2

from trainatomy.catalog.files import read_yaml
from trainatomy.operators.cost.work import (
    NOTHING,
    Chip,
    Work,
    largest,
    number,
    on_device,
    read_bytes,
    whole_numbers,
    written_bytes,
)
from trainatomy.results.operations import Array, Call

_WARP_ROW = 1024
"""Softmax keeps rows up to this long in the registers of a warp (aten/src/ATen/native/cuda/PersistentSoftmax.cuh)."""
_ONLY_WRITTEN = ("copy_", "fill_", "zero_", "random_", "normal_", "uniform_", "bernoulli_", "exponential_")


def pointwise(call: Call, chip: Chip) -> Work:
    """One kernel that reads and writes; the family says the operator, its widths, and whether layouts differ."""
    device = on_device((*call.inputs, *call.outputs))
    if not device:
        return NOTHING
    short = name_of(call)
    traffic = moved(call)
    if not traffic:
        return NOTHING
    if short == "_to_copy" and call.inputs and call.outputs:
        wider = call.outputs[0].itemsize > call.inputs[0].itemsize
        short = "widen" if wider else "narrow" if call.outputs[0].itemsize < call.inputs[0].itemsize else "convert"
    result = call.outputs[0] if call.outputs else call.inputs[call.written[0]] if call.written else device[0]
    return sized(f"traffic.{_form(call, result)}.{_width(call)}.{short}", chip, traffic)


def sized(family: str, chip: Chip, traffic: float, launches: int = 1, *features: float) -> Work:
    """Work that is nothing but traffic; the first feature is its size relative to the L2 cache."""
    return Work(
        family, (log2(max(traffic, 1) / chip.l2_bytes), *features), 0.0, "fp32", traffic, launches
    )  # fmt: skip


def moved(call: Call) -> int:
    """Bytes read and written."""
    unread = call.written[:1] if name_of(call).endswith(_ONLY_WRITTEN) else ()
    return read_bytes(call, frozenset(unread)) + written_bytes(call)


def name_of(call: Call) -> str:
    """The operator without its namespace."""
    return call.name.rpartition("::")[2]


def _width(call: Call) -> str:
    """Bits of the numbers that are moved; mixed where they differ by more than masks."""
    sizes = {t.itemsize for t in on_device((*call.inputs, *call.outputs)) if t.elements > 1 and t.itemsize > 1}
    return str(8 * sizes.pop()) if len(sizes) == 1 else "mixed" if sizes else "8"


def _form(call: Call, result: Array) -> str:
    """Which kind of element-wise kernel runs (aten/src/ATen/native/cuda/CUDALoops.cuh): ``plain`` where all lie alike;
    ``broadcast`` where a smaller operand is repeated; ``rows`` where large ones lie differently but have the same
    innermost dimension; else ``transposed``."""
    small = any(1 < t.elements < result.elements for t in on_device(call.inputs))
    worst = "broadcast" if small else "plain"
    for tensor in on_device(call.inputs):
        if tensor.elements * 2 < result.elements or len(tensor.shape) != len(result.shape):
            continue
        mine, its = _sequence(tensor, result), _sequence(result, result)
        if mine == its and (_dense(tensor) or tensor.elements < result.elements):
            continue
        if mine[-1:] != its[-1:]:
            return "transposed"
        worst = "rows"
    return worst


def _sequence(tensor: Array, like: Array) -> list[int]:
    """Dimensions from the outermost to the innermost in memory, without those of size 1."""
    dimensions = [d for d, size in enumerate(like.shape) if size > 1 and tensor.shape[d] > 1 and tensor.strides[d]]
    return sorted(dimensions, key=lambda d: (-tensor.strides[d], d))


def _dense(tensor: Array) -> bool:
    """Whether the numbers lie without gaps."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=False) if size)
    return reach <= tensor.elements


def fill(call: Call, chip: Chip) -> Work:
    """Writes and reads nothing: zeros, full, arange."""
    outputs = call.outputs or tuple(call.inputs[position] for position in call.written)
    traffic = sum(t.bytes for t in outputs if not t.on_host)
    return sized("traffic.fill", chip, traffic) if traffic else NOTHING


def reduction(call: Call, chip: Chip) -> Work:
    """Sums, means, norms, extrema: along rows (the innermost dimension), across them, or of everything."""
    source = largest(call.inputs)
    if source is None or not source.elements:
        return NOTHING
    kept = call.outputs[0].elements if call.outputs else 1
    dims = whole_numbers(number(call, "dim"))
    inner = max((d for d, size in enumerate(source.shape) if size > 1), key=lambda d: -source.strides[d], default=0)
    places = {d % max(len(source.shape), 1) for d in dims}
    way = "all" if kept == 1 else "rows" if inner in places else "columns"
    traffic = moved(call)
    bits = source.itemsize * 8
    depth = max(source.elements / max(kept, 1), 1)
    work = sized(f"reduction.{way}.{bits}", chip, traffic, 1, log2(depth) / 2)
    return work._replace(seconds=_across(chip, depth, traffic)) if way == "columns" else work


def _across(chip: Chip, rows: float, traffic: float) -> float:
    """Across rows: blocks of threads share them, a second pass adds what they found, and however few the columns are,
    each row takes its turn (aten/src/ATen/native/cuda/Reduce.cuh)."""
    form = read_yaml("efficiency.yaml")["reduction_across"]
    start = min(form["start_seconds"] + rows * form["start_row_seconds"], form["most_start_seconds"])
    return float(start + hypot(rows * form["row_seconds"], traffic / (chip.bandwidth * form["bandwidth"])))


def normalisation(call: Call, chip: Chip) -> Work:
    """Layer, root-mean-square and group norms, softmax: forward reads and writes; backward of a norm reads gradient and
    input a second time for the gradients of weight and bias.  What is not dense is copied first."""
    short = name_of(call)
    source = largest(call.inputs)
    if source is None or not source.elements:
        return NOTHING
    traffic = float(moved(call))
    launches = 1
    if "norm" in short and short.endswith("backward"):
        launches = 2
        traffic += read_bytes(call)
    elif short == "_safe_softmax":
        launches, traffic = 5, traffic * 2
    channels = "group_norm" in short  # a block of threads works on one of them
    width = source.shape[1 if channels else -1] if len(source.shape) > 1 else source.elements
    if "norm" in short:
        copied = [t for t in on_device(call.inputs) if t.elements == source.elements and not source_is_dense(t)]
        traffic += 4 * sum(tensor.bytes for tensor in copied)
        launches += len(copied)
    bits = source.itemsize * 8
    kind = f".{'long' if width > _WARP_ROW else 'short'}" if "softmax" in short else ""
    return sized(f"normalisation.{short}.{bits}{kind}", chip, traffic, launches, log2(max(width, 1)) / 2)


def source_is_dense(tensor: Array) -> bool:
    """Whether rows follow each other as the shape says (channels-last images count as dense too)."""
    return bool(tensor.strides) and (
        min((s for s in tensor.strides if s), default=1) == tensor.strides[-1] or len(tensor.shape) == 4
    )


def transfer(call: Call, chip: Chip) -> Work:
    """Between host and card."""
    arrives = any(not tensor.on_host for tensor in call.outputs)
    size = max((tensor.bytes for tensor in call.inputs), default=0) or 4  # ``copy_`` names its target too
    family = f"transfer.{'to card' if arrives else 'to host'}"
    return Work(family, (log2(size),), 0.0, "fp32", 0.0, 1, 1.2e-6 + size / 2.0e10)
