"""Batch norm and group norm.

Batch norm over images: channels-first by a block of threads for each channel, channels-last by tiles of pixels.

Three things bound it channels-first: how fast one block gets through a channel (few channels leave multiprocessors
idle), how many blocks each multiprocessor has to run, and traffic. The second read hits the L2 cache if the
channel fits. cuDNN runs it in one kernel for all types but bfloat16; in float16, where an image has an even number of
pixels, by a faster one. PyTorch takes three kernels for a forward in bfloat16 (``own_batch_norm``).

Channels-last, all multiprocessors share the work however few channels there are. cuDNN keeps of the images what its
multiprocessors can hold, and reads the rest twice; PyTorch's kernels (bfloat16) read all of them twice and are also
bound by the arithmetic of running means.

Sources: aten/src/ATen/native/Normalization.cpp (``_select_batch_norm_backend``) and cuda/Normalization.cuh, torch
2.9-2.13; kernels of a ResNet-50 and of a calibration on an H200 (cuDNN 9.19). Constants: ``catalog/efficiency.yaml``.

PyTorch's own batch norm, channels-first: the kernels that run in bfloat16, for which cuDNN has none.

The statistics, and the whole gradient, are computed by one block of 512 threads for each channel. A thread walks over
its share of the channel, one number after the other, and each of them waits for memory; a multiprocessor that holds
several blocks is bound by their arithmetic instead (running means divide), and four is the most that it holds. The
result is written by many small blocks, each of which has to start.

Source: aten/src/ATen/native/cuda/Normalization.cuh, torch 2.11. Constants: ``catalog/efficiency.yaml``.

Group norm: a block of threads for each group of an image, however large it is, then an elementwise kernel.

One group over all channels thus keeps as few multiprocessors busy as there are images.  A block that has a
multiprocessor for itself waits for each number: less where the kernel before has left the input in the L2 cache, which
a cast, as under autocast, does more often than an activation, because it reads half as many bytes.
Blocks that share a multiprocessor wait at the same time, and its divisions bound them.  The gradient has a block for
each channel of an image (a warp where the channel is small), three small kernels, and an elementwise one.

Source: aten/src/ATen/native/cuda/group_norm_kernel.cu (``RowwiseMomentsCUDAKernel``,
``ComputeInternalGradientsCUDAKernel``).  Constants: ``catalog/efficiency.yaml``.
"""

from __future__ import annotations

from math import ceil, hypot, log2, prod
from typing import Any, NamedTuple

from trainatomy.catalog.files import read_yaml
from trainatomy.operators.cost.elementwise import memory_bound
from trainatomy.operators.cost.kernel import NOTHING, Chip, KernelWork, moving_seconds, name_of, number, passes_to
from trainatomy.results.operations import CAST_FROM, Array, Call

_MOST_PAIRS = {"forward": 100_000, "backward": 40_000}
"""Numbers of a channel in 16 bits up to which cuDNN keeps them: it did 56,800 and 32,768, not 130,048 and 48,804."""
_LAST_FAMILY = "channels_last_norm"
"""A family of its own: how far channels-first kernels are from their formula says nothing about these."""


def batch_norm(call: Call, chip: Chip) -> KernelWork:
    """Return the work of ``native_batch_norm``, ``cudnn_batch_norm`` and their backwards; [N, C, pixels...].

    In inference (no batch statistics) it is one elementwise kernel.
    """
    backward = name_of(call).endswith("backward")
    x = call.inputs[0]
    if not x.elements or len(x.shape) < 2:
        return NOTHING
    if not backward and number(call, "training") == "False":
        return memory_bound(f"traffic.plain.{8 * x.itemsize}.batch_norm", chip, call)
    channels = x.shape[1]
    channel_elements = x.elements // channels
    read = 2 if backward else 1
    fits = (read + 1) * x.bytes < chip.l2_bytes
    moved = ((read if fits else 2 * read) + 1) * x.bytes
    form: dict[str, Any] = read_yaml("efficiency.yaml")["batch_norm"]
    way = "backward" if backward else "forward"
    by_cudnn = _runs_on_cudnn(call)
    last, pairs = len(x.shape) > 3 and x.strides[1] == 1, False
    if last:
        kept = form["last"]["kept_bytes"] * chip.multiprocessors if by_cudnn else 0.0
        moved = int((read + 1) * x.bytes + max(read * x.bytes - kept, 0))
        seconds = _last_seconds(form["last"]["cudnn" if by_cudnn else "own"][way], x, moved, chip)
    elif pairs := by_cudnn and _reads_pairs(x, backward):
        known = form["pairs"][way]
        each = known["block_seconds"] + channel_elements * known["number_seconds"]
        seconds = known["start_seconds"] + max(channels / chip.multiprocessors, 1.0) * each
    elif not by_cudnn and len(x.shape) > 2:
        own = form["own"][way]
        seconds = statistics_seconds(x, backward, chip, own)
        if not backward:
            seconds += own["rest_seconds"] + result_seconds(x, chip, own)
    else:
        known = form[way]
        alone = form["start_seconds"] + channel_elements * known["alone" if fits else "alone_from_memory"]
        crowded = channels / chip.multiprocessors * (form["start_seconds"] + channel_elements * known["crowded"])
        once = (read + 1) * x.bytes
        seconds = max(alone, crowded, moving_seconds(moved, once, form["bandwidth"], chip))
    order = "first pairs" if pairs else "first"
    short = name_of(call).replace("cudnn_", "native_") + ("" if by_cudnn else ".own")
    features = (log2(moved / chip.l2_bytes), log2(channels) / 2)
    launches = 1 if by_cudnn or backward else 3
    passes = passes_to(call, moved, "passes over the images alone")
    size = f"{short}.{8 * x.itemsize}"
    family = f"{_LAST_FAMILY}.{size}" if last else f"normalisation.{size}.{order}"
    return KernelWork(family, features, bytes=moved, launches=launches, seconds=seconds, passes=passes)


def _reads_pairs(x: Array, backward: bool) -> bool:
    """Return whether cuDNN reads two numbers of 16 bits at a time, once, into the memory of a multiprocessor."""
    places = prod(x.shape[2:])
    return (
        x.itemsize == 2
        and places % 2 == 0
        and x.shape[0] * places <= _MOST_PAIRS["backward" if backward else "forward"]
    )


def _last_seconds(known: dict[str, float], x: Array, moved: float, chip: Chip) -> float:
    """Return the time of channels-last kernels: a start, arithmetic of all multiprocessors, and traffic."""
    arithmetic = x.elements * known["element_seconds"] / chip.multiprocessors
    return known["start_seconds"] + arithmetic + moved / (chip.bandwidth * known["bandwidth"])


def _runs_on_cudnn(call: Call) -> bool:
    """Return whether cuDNN runs it: no bfloat16, float16 with weights in fp32 only, images and not rows."""
    x = call.inputs[0]
    weights = [array.dtype for array in call.inputs if len(array.shape) == 1]
    return (
        len(x.shape) >= 3
        and x.dtype != "bfloat16"
        and "bfloat16" not in weights
        and (x.dtype != "float16" or "float32" in weights)
    )


_SIZES = (32, 64, 128, 256, 512)
_THREADS, _HELD, _MOST_HELD = 2048, 4, 32
"""Threads that a multiprocessor holds, and its blocks of 512 and of fewer threads."""
_LEAST_THREADS, _MOST_BLOCKS = 64, 256 * 1024
"""Threads of a block that writes the result, and how many such blocks there are at most."""


class Blocks(NamedTuple):
    """The division of a channel among the threads of its block.

    Attributes:
        turns: Numbers that a thread walks over.
        rounds: Times that the multiprocessors have to be filled with blocks.
        last: Blocks of a multiprocessor in the last round.
    """

    turns: int
    rounds: int
    last: int


def statistics_seconds(x: Array, backward: bool, chip: Chip, form: dict[str, Any]) -> float:
    """Return the time of the kernel with a block for each channel: the statistics, or the whole gradient."""
    blocks = blocks_of(x, chip)
    read = (3 if backward else 2) * x.bytes
    least, span = form["missed"]
    missed = min(max((read / chip.l2_bytes - least) / span, 0.0), 1.0)
    waiting = form["cached"] + (form["from_memory"] - form["cached"]) * missed
    full, rest = (
        form["block_seconds"] + blocks.turns * max(waiting, held * form["crowded"]) for held in (_HELD, blocks.last)
    )
    moved = (3 + 2 * missed if backward else 1) * x.bytes
    further = full - form["first_seconds"]  # the next blocks start while others still run
    return float(max((blocks.rounds - 1) * further + rest, moved / (chip.bandwidth * form["bandwidth"])))


def result_seconds(x: Array, chip: Chip, form: dict[str, Any]) -> float:
    """Return the time of the kernel that writes the result of a forward."""
    batch, channels, places = x.shape[0], x.shape[1], prod(x.shape[2:])
    threads = max(_threads(places // 4), min(_threads(places), _LEAST_THREADS))
    samples = max(_LEAST_THREADS // threads, 1)
    rows = max(1, min(_MOST_BLOCKS // channels, ceil(batch / samples)))
    turns = ceil(batch / (rows * samples)) * ceil(places / threads)
    held = min(_MOST_HELD, _THREADS // (threads * samples)) * chip.multiprocessors
    waves = max(1.0, channels * rows / held)
    working = waves * (form["result_block_seconds"] + turns * form["result_seconds"])
    return float(max(working, 2 * x.bytes / (chip.bandwidth * form["result_bandwidth"])))


def blocks_of(x: Array, chip: Chip) -> Blocks:
    """Return how the numbers of a channel are divided."""
    batch, channels, places = x.shape[0], x.shape[1], prod(x.shape[2:])
    threads = _threads(places)
    turns = ceil(batch / max(_SIZES[-1] // threads, 1)) * ceil(places / threads)
    rounds = ceil(channels / (chip.multiprocessors * _HELD))
    left = channels - (rounds - 1) * chip.multiprocessors * _HELD
    return Blocks(turns, rounds, ceil(left / chip.multiprocessors))


def _threads(places: int) -> int:
    return next((size for size in _SIZES if places <= size), _SIZES[-1])


_WIDE = 512
"""Numbers from which on a block has 512 threads instead of one warp."""
_HELD_BLOCKS = {"block": 4, "warp": 32}
"""Blocks that a multiprocessor holds."""


def group_norm(call: Call, chip: Chip) -> KernelWork:
    """Return the work of ``native_group_norm`` or its backward, [N, C, places...]."""
    backward = name_of(call).endswith("backward")
    x = call.inputs[1 if backward else 0]
    if not x.elements or len(x.shape) < 2:
        return NOTHING
    form: dict[str, Any] = read_yaml("efficiency.yaml")["group_norm"]
    images, channels = x.shape[:2]
    blocks = images * (channels if backward else max(int(number(call, "group", "1")), 1))
    length = x.elements / blocks
    size = "block" if length >= _WIDE else "warp"
    read = (2 if backward else 1) * x.bytes
    if backward or size == "warp":
        start, each = form["backward" if backward else "forward"][size]
        rounds = max(blocks / (_HELD_BLOCKS[size] * chip.multiprocessors), 1.0)
        computing = rounds * (start + length * each)
    else:
        since = x.bytes + x.elements * int(number(call, CAST_FROM, str(x.itemsize)))
        computing = _moments_seconds(blocks, length, since, chip, form["forward"]["block"])
    statistics = max(computing, moving_seconds(read, read, form["bandwidth"], chip))
    moved = 2 * read + x.bytes
    kernels = form["kernel_seconds"] * (4 if backward else 2)
    seconds = statistics + kernels + moving_seconds(read + x.bytes, x.bytes, form["bandwidth"], chip)
    family = f"normalisation.{name_of(call)}.{8 * x.itemsize}"
    features = (log2(moved / chip.l2_bytes), log2(length) / 2, log2(blocks) / 2)
    passes = passes_to(call, moved, "a second read, to normalise")
    return KernelWork(family, features, bytes=moved, launches=5 if backward else 3, seconds=seconds, passes=passes)


def _moments_seconds(blocks: int, length: float, since: int, chip: Chip, form: dict[str, Any]) -> float:
    """Return the time of the mean and the variance of each group, by the multiprocessor that has the most blocks.

    Args:
        blocks: Groups of all images.
        length: Numbers of a group.
        since: Bytes that the kernel before has read and written, the input among them.
        chip: The GPU.
        form: The constants.
    """
    kept, gone = form["missed"]
    missed = min(max((since / chip.l2_bytes - kept) / (gone - kept), 0.0), 1.0)
    waiting = form["cached"] + missed * (form["from_memory"] - form["cached"])
    turns = ceil(blocks / chip.multiprocessors)
    held = min(turns, _HELD_BLOCKS["block"])
    number_seconds = hypot(waiting, held * form["crowded"])
    return float(turns / held * (form["start_seconds"] + held * form["further_seconds"] + length * number_seconds))
