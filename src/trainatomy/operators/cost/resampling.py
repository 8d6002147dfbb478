"""Bilinear and bicubic interpolation of images in channels-first order.

A thread computes one pixel of the result for all images and channels, one plane after the other.  Small images of many
channels thus leave most of the GPU idle and wait for memory once for each plane.  Images in channels-last order have a
thread for each number.

Source: aten/src/ATen/native/cuda/UpSampleBilinear2d.cu (``upsample_bilinear2d_out_frame``).
"""

from __future__ import annotations

from math import ceil, prod

from trainatomy.catalog.files import read_yaml
from trainatomy.operators.cost.elementwise import pointwise
from trainatomy.operators.cost.kernel import Chip, KernelWork, efficiency_of
from trainatomy.results.operations import Call

_THREADS = 2048
"""Threads that a multiprocessor holds."""


def interpolated(call: Call, chip: Chip) -> KernelWork:
    """Return the work of ``upsample_bilinear2d`` or ``upsample_bicubic2d`` [N, C, H, W]."""
    work = pointwise(call, chip)
    source = call.inputs[0]
    if not work.launches or source.strides[1] == 1 or len(call.outputs) != 1:
        return work
    planes, pixels = prod(source.shape[:2]), prod(call.outputs[0].shape[2:])
    turns = planes * ceil(pixels / (_THREADS * chip.multiprocessors))
    efficiency = efficiency_of(work.family)
    moving = efficiency.kernel_seconds + work.bytes / (chip.bandwidth * efficiency.share)
    waiting = turns * float(read_yaml("efficiency.yaml")["resampling"]["plane_seconds"])
    return work if waiting <= moving else work._replace(family="resampling", features=(), seconds=waiting)
