"""Batch norm over images that lie channel by channel: a block of threads for each channel, which it reads twice.

So three things bound it: how fast one block gets through a channel (few channels leave multiprocessors idle), how many
blocks each multiprocessor has to do, and traffic; what was read once is in the L2 cache the second time if it fits.
cuDNN does it for all but bfloat16, in one kernel; PyTorch itself takes three for a forward in bfloat16.
Sources: aten/src/ATen/native/Normalization.cpp (``_select_batch_norm_backend``) and cuda/Normalization.cuh, torch
2.9-2.13; kernels of a ResNet-50 and of a calibration on an H200 (cuDNN 9.19). Constants: ``facts/efficiency.yaml``.
"""

from __future__ import annotations

from math import log2
from typing import Any

from trainatomy.catalog.files import read_yaml
from trainatomy.operators.cost.traffic import moved, name_of, sized
from trainatomy.operators.cost.work import NOTHING, Chip, Work, number
from trainatomy.results.operations import Call


def batch_norm(call: Call, chip: Chip) -> Work:
    """``native_batch_norm``, ``cudnn_batch_norm`` and their backwards; [images, channels, places...].

    In inference (no batch statistics) it is one kernel over all numbers."""
    backward = name_of(call).endswith("backward")
    x = call.inputs[0]
    if not x.elements or len(x.shape) < 2:
        return NOTHING
    if not backward and number(call, "training") == "False":
        return sized(f"traffic.plain.{8 * x.itemsize}.batch_norm", chip, moved(call))
    channels = x.shape[1]
    of_channel = x.elements // channels
    read = 2 if backward else 1
    fits = (read + 1) * x.bytes < chip.l2_bytes
    traffic = ((read if fits else 2 * read) + 1) * x.bytes
    form: dict[str, Any] = read_yaml("efficiency.yaml")["batch_norm"]
    known = form["backward" if backward else "forward"]
    alone = form["start_seconds"] + of_channel * known["alone" if fits else "alone_from_memory"]
    crowded = channels / chip.multiprocessors * (form["start_seconds"] + of_channel * known["crowded"])
    seconds = max(alone, crowded, traffic / (chip.bandwidth * form["bandwidth"]))
    by_cudnn = _is_cudnns(call)
    short = name_of(call).replace("cudnn_", "native_") + ("" if by_cudnn else ".own")
    features = (log2(traffic / chip.l2_bytes), log2(channels) / 2)
    launches = 1 if by_cudnn or backward else 3
    return Work(f"normalisation.{short}.{8 * x.itemsize}", features, 0.0, "fp32", traffic, launches, seconds)


def _is_cudnns(call: Call) -> bool:
    """Whether cuDNN runs it: no bfloat16, a half with weights in fp32 only, images and not rows."""
    x = call.inputs[0]
    weights = [array.dtype for array in call.inputs if len(array.shape) == 1]
    return (
        len(x.shape) >= 3
        and x.dtype != "bfloat16"
        and "bfloat16" not in weights
        and (x.dtype != "float16" or "float32" in weights)
    )
