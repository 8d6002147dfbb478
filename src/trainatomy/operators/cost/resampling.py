"""Interpolation of images and volumes, whose kernels repeat far from their memory traffic.

Channels-first order: a thread computes one place of the result for all images and channels, one plane after the other;
small images of many channels leave most of the GPU idle and wait for memory once for each plane.  In channels-last
order, which cubic interpolation has no kernel for, and for nearest neighbours, a thread computes one number, and its
index arithmetic bounds it.

The gradient adds to the places that each number was read from, by atomic additions.  In 16 bits those of the same place
wait for each other, so that a number of the gradient takes longer the more of them share a place, up to the time of
additions that all go to one; cubic interpolation compares and swaps instead, sixteen times one after the other.
Nearest neighbours are gathered, image after image.

An image that keeps its size is copied: at once where interpolation is linear, plane after plane where it is cubic.

Sources: aten/src/ATen/native/cuda/UpSampleBilinear2d.cu, UpSampleBicubic2d.cu, UpSampleTrilinear3d.cu,
UpSampleNearest2d.cu.  Constants: ``catalog/efficiency.yaml``.

Pooling: a thread for each number, which computes indices and reads a window; gradients gather or add atomically.

Index arithmetic and reads bound these kernels, not traffic.  In three dimensions, and where the window adapts to the
size of the result, a block of 32 x 8 threads covers a plane of the result, so that small planes leave threads idle.

Sources: aten/src/ATen/native/cuda/DilatedMaxPool2d.cu, DilatedMaxPool3d.cu, AveragePool2d.cu, AveragePool3d.cu,
AdaptiveAveragePooling.cu.  Constants: ``catalog/efficiency.yaml``.
"""

from __future__ import annotations

from math import ceil, hypot, log2, prod
from typing import Any

from trainatomy.catalog.files import read_yaml
from trainatomy.operators.cost.elementwise import contiguous_seconds, memory_bound
from trainatomy.operators.cost.kernel import NOTHING, Chip, KernelWork, name_of, number, whole_numbers
from trainatomy.operators.traffic import traffic
from trainatomy.results.operations import Array, Call

_POOLING_BLOCK = (32, 8)
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
    return (
        planes
        * ceil(width / _POOLING_BLOCK[0])
        * _POOLING_BLOCK[0]
        * ceil(height / _POOLING_BLOCK[1])
        * _POOLING_BLOCK[1]
    )


_GRID_BANDWIDTH = 0.5
_CORNERS = {"0": 4, "1": 1, "2": 16}
"""Numbers of an image that a sample is made of, by the mode: bilinear, nearest, bicubic."""
_THREADS, _BLOCK, _WARP = 2048, 1024, 32
"""Threads that a multiprocessor holds, of a block at most, and of a warp."""
_ALIGNED = 2.0
"""Distance between gradients with and without aligned corners, in the logarithm of their numbers."""
_KINDS = {"bilinear2d": "linear", "trilinear3d": "volume", "bicubic2d": "cubic"}


def interpolated(call: Call, chip: Chip) -> KernelWork:
    """Return the work of ``upsample_*`` [N, C, places...] or of its backward."""
    short, moved = name_of(call).removeprefix("upsample_"), traffic(call).bytes
    backward = short.endswith("_backward")
    direction = "backward" if backward else "forward"
    if not moved or not call.outputs:
        return NOTHING
    mode = short.removesuffix("_backward")
    kind = "nearest" if mode.startswith(("nearest", "_nearest")) else _KINDS.get(mode, "linear")
    fine, coarse = (call.inputs[0], call.outputs[0]) if backward else (call.outputs[0], call.inputs[0])
    last = kind in ("nearest", "linear") and len(fine.shape) == 4 and fine.strides[1] == 1
    form: dict[str, Any] = read_yaml("efficiency.yaml")["resampling"]
    moving = form["start_seconds"] * (2 if backward else 1) + moved / (chip.bandwidth * form["bandwidth"])
    copied = form["copied_plane_seconds"].get(kind) if fine.shape == coarse.shape else None
    if copied is not None:
        kind, seconds = f"{kind} copy", max(prod(fine.shape[:2]) * copied[direction], moving)
    elif kind == "cubic":
        seconds = max(_cubic(fine, coarse, chip, form["cubic"], backward=backward), moving)
    else:
        way = _gradient if backward else _result
        seconds = max(way(kind, fine, coarse, last, chip, form), moving)
    order = "last" if last else "first"
    family = f"resampling.{kind}.{direction}.{8 * fine.itemsize}.{order}"
    features: tuple[float, ...] = (log2(max(moved, 1) / chip.l2_bytes), log2(max(prod(fine.shape[:2]), 1)) / 2)
    if backward:
        # how many numbers share a place, and how many of them are of one warp, decide how their additions wait
        aligned = number(call, "align_corners") == "True"
        features = (*features, log2(max(fine.elements / max(coarse.elements, 1), 1)), _ALIGNED * aligned)
    launches = 2 if backward and kind != "nearest" else 1
    beside = 0.0
    if kind == "linear" and not last and not call.inputs[0].is_contiguous:
        beside, launches = contiguous_seconds(chip, call.inputs[0]), launches + 1
    return KernelWork(family, features, bytes=moved, launches=launches, seconds=seconds, beside=beside)


def _result(kind: str, fine: Array, coarse: Array, last: bool, chip: Chip, form: dict[str, Any]) -> float:
    """Return the time of the result: of each plane, or of each number."""
    if kind == "nearest" or last:
        each = form["index_seconds"]["nearest" if kind == "nearest" else "last"]
        return float(fine.elements * each / chip.multiprocessors)
    plane = float(form["plane_seconds"][kind])
    if kind == "linear":
        plane = _pixel_seconds(fine, form) if prod(coarse.shape[2:]) == 1 else plane * _missed(fine, coarse, chip, form)
    return _turns(fine, chip) * plane


def _pixel_seconds(fine: Array, form: dict[str, Any]) -> float:
    """Return the time of a plane of one pixel, which stays in the multiprocessor's cache: its wait, or its work."""
    share = min(prod(fine.shape[2:]) / _BLOCK, 1.0)
    return hypot(form["one_pixel_plane"]["waiting"], form["one_pixel_plane"]["block"] * share)


def _missed(fine: Array, coarse: Array, chip: Chip, form: dict[str, Any]) -> float:
    """Return the time of a plane over that of one for which the GPU's cache has no room."""
    kept, gone = form["cached"]["sizes"]
    share = min(max(((fine.bytes + coarse.bytes) / chip.l2_bytes - kept) / (gone - kept), 0.0), 1.0)
    least: float = form["cached"]["share"]
    return float(least + (1 - least) * share)


def _gradient(kind: str, fine: Array, coarse: Array, last: bool, chip: Chip, form: dict[str, Any]) -> float:
    """Return the time of the gradient: atomic additions, or gathers of nearest neighbours."""
    half = fine.itemsize < 4
    if kind == "nearest":
        window = fine.elements / max(coarse.elements, 1)
        threads = max(prod(coarse.shape[1:]) / (_THREADS * chip.multiprocessors), 1.0)
        return float(coarse.shape[0] * threads * (form["gather_seconds"] + window * form["gather_read_seconds"]))
    waiting = form["plane_backward_seconds"].get(kind, 0.0) if half else form["plane_seconds"][kind]
    if kind != "linear":
        return _turns(fine, chip) * float(waiting)
    known = form["atomic_seconds"]
    sharing = fine.elements / max(coarse.elements, 1)
    if last:  # numbers that lie side by side are of other channels, and add to other places
        start, shared = known["last"]["start"], known["last"]["half" if half else "single"]
        each = start + shared * (sharing / fine.shape[1]) ** 0.5
    else:
        start, shared = known["half" if half else "single"]
        one_pixel = prod(coarse.shape[2:]) == 1 and not half  # all four places of a number are one
        if one_pixel:
            many = form["one_pixel"]["many"]
            sharing = max(sharing, many * (sharing / many) ** form["one_pixel"]["power"]) * form["one_pixel"]["times"]
        each = start + 1 / (1 / (shared * sharing) + 1 / known["one_place"])
        if fine.shape[-1] % _WARP and not half and not one_pixel:  # the threads of a warp are of several rows
            each *= 1 + known["crossing"] / fine.shape[-1]
        waiting = form["one_pixel"]["waiting"] if one_pixel else 0.0
        return float(waiting + fine.elements * each / chip.multiprocessors)
    return float(fine.elements * each / chip.multiprocessors)


def _cubic(fine: Array, coarse: Array, chip: Chip, form: dict[str, Any], *, backward: bool) -> float:
    """Return the time of cubic interpolation, or of its gradient: of planes one after the other, or of all numbers."""
    pixels, sharing = prod(fine.shape[2:]), fine.elements / max(coarse.elements, 1)
    if backward and fine.itemsize < 4:
        known = form["half_backward"]
        plane = max(known["least"], known["shared"] * sharing ** known["power"])
    else:
        known = form["backward" if backward else "forward"]
        plane = known["start"] + known["pixel"] * min(pixels, known["most_pixels"]) + known["sharing"] * sharing
    return max(prod(fine.shape[:2]) * float(plane), fine.elements * float(known["number"]) / chip.multiprocessors)


def _turns(fine: Array, chip: Chip) -> float:
    """Return how many planes a thread goes through, times the rounds of threads."""
    return prod(fine.shape[:2]) * max(prod(fine.shape[2:]) / (_THREADS * chip.multiprocessors), 1.0)


def sampled(call: Call, chip: Chip) -> KernelWork:
    """Return the work of sampling images by a grid, or of its gradient: a thread for a place takes channel by channel.

    Each channel waits for memory, and a warp reads as many lines of the multiprocessor's cache, one after the other, as
    its places lie in.  The gradient adds to these places, for which the GPU's cache takes sector after sector
    (aten/src/ATen/native/cuda/GridSampler.cu).
    """
    backward = "backward" in call.name
    image, result = (call.inputs[1], call.inputs[0]) if backward else (call.inputs[0], call.outputs[0])
    size, direction = "half" if image.itemsize == 2 else "single", "backward" if backward else "forward"
    form: dict[str, Any] = read_yaml("efficiency.yaml")["grid"][direction]
    corners = _CORNERS.get(number(call, "interpolation_mode"), 4)
    turns = max(result.elements / result.shape[1] / (_THREADS * chip.multiprocessors), 1.0)
    pieces = corners * pieces_of_a_warp(image, result, form["piece_bytes"])
    cycles = form["warp_cycles"][size] + pieces * form["piece_cycles"]
    working = result.elements / _WARP * cycles / chip.issue_rate
    waiting = turns * result.shape[1] * form["channel_seconds"][size]
    moving = traffic(call).bytes / (chip.bandwidth * _GRID_BANDWIDTH)
    seconds = form["start_seconds"] + max(waiting + working, moving)
    return memory_bound(f"grid.{size}.{name_of(call)}", chip, call, launches=1 + backward)._replace(seconds=seconds)


def pieces_of_a_warp(image: Array, result: Array, piece_bytes: int) -> float:
    """Return in how many pieces of memory the places lie that the threads of a warp read at once.

    Where the grid has as many rows as the image has pixels, the rows are thought to follow the pixels, as the queries
    of deformable attention do; else each row goes across the image, as that of a warped image does.

    Args:
        image: The images [N, C, height, width].
        result: The samples [N, C, rows, places of a row].
        piece_bytes: Bytes of a piece, a line or a sector of a cache.
    """
    rows, places = result.shape[-2:]
    pixels, width = prod(image.shape[2:]), image.shape[-1]
    follow = rows >= pixels
    beginnings = min(places, _WARP) if follow else 1
    pixel = min(image.strides[-1] * image.itemsize / piece_bytes, 1.0)
    neighbour = min(pixel * max(1.0 if follow else width / places, 1.0), 1.0)
    touched, known = beginnings + (_WARP - beginnings) * neighbour, max(pixels * pixel, 1.0)
    return float(known * (1 - (1 - 1 / known) ** touched))


def patches(call: Call, chip: Chip) -> KernelWork:
    """Return the work of cutting images into patches, image after image, or of adding patches up, all at once.

    A thread goes over the places of a patch, or over the patches that overlap; patches that are not contiguous are
    copied before (aten/src/ATen/native/cuda/Im2Col.cu and Col2Im.cu).
    """
    image, result = call.inputs[0], call.outputs[0]
    form: dict[str, float] = read_yaml("efficiency.yaml")["patches"]
    kernel, stride = whole_numbers(number(call, "kernel_size")), whole_numbers(number(call, "stride"))
    places = prod(kernel) if kernel else 1
    moving = traffic(call).bytes / (chip.bandwidth * form["bandwidth"])
    if name_of(call) == "im2col":
        images, threads = image.shape[0] if len(image.shape) == 4 else 1, result.elements / places
        each = form["start_seconds"] + places * form["place_seconds"]
        working = threads * places * form["number_seconds"] / chip.multiprocessors
        seconds, launches = images * each + max(working, moving), images + 1
    else:
        overlap = prod(ceil(a / b) for a, b in zip(kernel, stride, strict=False))
        working = result.elements * (form["start_cycles"] + overlap * form["overlap_cycles"]) / chip.issue_rate
        seconds, launches = form["start_seconds"] + max(working, moving), 1
    copied = contiguous_seconds(chip, image) if name_of(call) == "col2im" and not image.is_contiguous else 0.0
    work = memory_bound(f"patches.{name_of(call)}", chip, call, launches=launches + bool(copied))
    return work._replace(seconds=seconds, beside=copied)
