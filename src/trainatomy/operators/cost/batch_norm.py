"""Batch norm over images: channels-first by a block of threads for each channel, channels-last by tiles of pixels.

Three things bound it channels-first: how fast one block gets through a channel (few channels leave multiprocessors
idle), how many blocks each multiprocessor has to run, and traffic. The second read hits the L2 cache if the
channel fits. cuDNN runs it in one kernel for all types but bfloat16; in float16, where an image has an even number of
pixels, by a faster one. PyTorch takes three kernels for a forward in bfloat16 (``own_batch_norm``).

Channels-last, all multiprocessors share the work however few channels there are. cuDNN keeps of the images what its
multiprocessors can hold, and reads the rest twice; PyTorch's kernels (bfloat16) read all of them twice and are also
bound by the arithmetic of running means.

Sources: aten/src/ATen/native/Normalization.cpp (``_select_batch_norm_backend``) and cuda/Normalization.cuh, torch
2.9-2.13; kernels of a ResNet-50 and of a calibration on an H200 (cuDNN 9.19). Constants: ``catalog/efficiency.yaml``.
"""

from __future__ import annotations

from math import log2, prod
from typing import Any

from trainatomy.catalog.files import read_yaml
from trainatomy.operators.cost.elementwise import memory_bound
from trainatomy.operators.cost.kernel import NOTHING, Chip, KernelWork, moving_seconds, name_of, number, passes_to
from trainatomy.operators.cost.own_batch_norm import result_seconds, statistics_seconds
from trainatomy.results.operations import Array, Call

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
