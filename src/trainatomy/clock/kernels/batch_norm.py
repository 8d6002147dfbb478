"""Batch norm over images that lie channel by channel: a block of threads for each channel, which it reads twice.

So three things bound it: how fast one block gets through a channel (few channels leave multiprocessors idle), how many
blocks each multiprocessor has to do, and traffic; what was read once is in the L2 cache the second time if it fits.
Sources: aten/src/ATen/native/cuda/Normalization.cuh; kernels of a ResNet-50 and of a calibration on an H200 (cuDNN
9.19).  Constants: ``facts/efficiency.yaml``.
"""

from __future__ import annotations

from math import log2
from typing import Any

from trainatomy.clock.kernels.traffic import moved, name_of, sized
from trainatomy.clock.kernels.work import HALVES, NOTHING, Chip, Work, number
from trainatomy.facts.data import read_yaml
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
    half = x.dtype in HALVES
    short = name_of(call).replace("cudnn_", "native_")
    features = (log2(traffic / chip.l2_bytes), log2(channels) / 2)
    launches = 3 if half and not backward else 1
    return Work(f"normalisation.{short}.{8 * x.itemsize}", features, 0.0, "fp32", traffic, launches, seconds)
