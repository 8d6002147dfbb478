"""Bytes of the copies that cuDNN's engines work on: data, weight and output in channels-last layout, channels padded.

Groups are copied together, each padded to a power of two, or each as a convolution of its own, eight at once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from trainatomy.operators.cost.depthwise import is_of_cudnn

if TYPE_CHECKING:
    from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind

HEADER = 16
_NARROWEST = 4
"""Channels that a group is padded to at least."""
_AT_ONCE = 8
"""Groups that run at once, each as a convolution of its own."""
_MOST_PARTS, _PLACES_OF_PART = 24, 1200
"""Parts of a group's weight gradient at most, and the pixels of each; typical."""
_SUM = 4
"""Bytes of a partial sum."""


def copies(one: Convolution) -> int:
    """Return the bytes of copies of all three tensors, none of tensors that are channels-last."""
    return 0 if one.channels_last else padded(one) if one.groups > 1 else transformed(one)


def transformed(one: Convolution) -> int:
    """Return the bytes of data, weight and output in channels-last layout, channels padded to 16 bytes."""
    inside, outside, total = one.filled(one.channels), one.filled(one.weight[0]), 0
    shapes = ((one.data, one.data[0] * inside), (one.weight, outside * inside), (one.output, one.output[0] * outside))
    for shape, padded in shapes:
        places = math.prod(shape[2:])
        is_same = places == 1 and math.prod(shape) == padded  # of one place, both layouts are the same
        total += 0 if is_same else padded * places
    return total * one.itemsize + HEADER


def padded_width(one: Convolution) -> int:
    """Return the channels that each group is padded to."""
    return max(_NARROWEST, 1 << (max(one.channels, one.weight[0] // one.groups) - 1).bit_length())


def padded(one: Convolution) -> int:
    """Return the bytes of channels-last copies with padded groups."""
    wide = padded_width(one)
    weight = one.groups * wide**2 * one.taps
    data = one.data[0] * one.groups * wide * (math.prod(one.data[2:]) + math.prod(one.output[2:]))
    return (data + weight) * one.itemsize + HEADER


def copied_by_group(kind: Kind, one: Convolution) -> int:
    """Return the bytes where each group is a convolution of its own; its weight is copied where its layout differs."""
    inside, outside = one.channels, one.weight[0] // one.groups
    if one.is_half:
        copies_weight = one.taps > 1 and not (one.channels_last and inside % one.fill == 0)
    else:
        odd = one.taps > 1 and one.taps % 2 == 1
        copies_weight = kind == "weight gradient" or (kind == "input gradient" and odd) or one.taps > 16
    if copies_weight or one.is_half:
        inside, outside = one.filled(inside), one.filled(outside)
    weight = inside * outside * one.taps
    data = one.data[0] * (inside * math.prod(one.data[2:]) + outside * math.prod(one.output[2:]))
    size = (data + (weight if copies_weight else 0)) * one.itemsize + HEADER
    if kind == "weight gradient":
        is_volume = len(one.data) == 5
        parts = 1 if is_volume else min(_MOST_PARTS, max(1, one.places // _PLACES_OF_PART))
        size += (parts - 1) * weight * _SUM + 128
    return min(one.groups, _AT_ONCE) * size


def is_cudnn_depthwise(one: Convolution) -> bool:
    """Return whether cuDNN runs a contiguous depthwise convolution: some in fp16; PyTorch's own kernel runs others."""
    fp16 = one.dtype == torch.float16
    return is_of_cudnn(one.data, one.weight, one.strides, one.dilation, fp16=fp16)
