"""Workspaces of convolutions with groups: the engine that runs one, and its workspace.

Engines:

- *PyTorch's own kernel*: depthwise, contiguous, not transposed, except for some in fp16 (``is_cudnn_depthwise``).
  No workspace.
- *direct*: cuDNN reads the tensors as they are. No workspace.
- *padded*: input, weight and output are copied channels-last, each group padded to a power of two, that of its wider
  side, at least 4.
- *by group*: each group is a convolution of its own, eight at once; each copies its part of input, weight and output
  channels-last, channels filled to 16 bytes.

Both engines that copy split the gradient of the weight into fp32 sums of parts. The copies are exact, the number of
parts is typical, and the engine is chosen by cuDNN's heuristics: mostly as written here.
"""

from __future__ import annotations

from math import prod
from typing import Literal, NamedTuple

import torch

from trainatomy.operators.allocation.cudnn.convolution import HEADER, OF_WIDE, Convolution, Kind
from trainatomy.operators.allocation.plan import ceil_div
from trainatomy.operators.cost.depthwise import is_of_cudnn

Engine = Literal["direct", "padded", "by group"]

_AT_ONCE, _TILE, _MANY_PLACES = 8, 64, 16_000
_DEPTHWISE_PARTS_OF_IMAGE = 8
_NARROWEST, _TOO_WIDE = 4, 32
_MANY_NARROW_PLACES = 200_000
_LARGE_DEPTHWISE_PARTS, _MANY_DEPTHWISE_PLACES, _MANY_DEPTHWISE_TAPS = 32, 10_000, 49
_OF_PARTS, _BYTES_PER_PART = 159, 4


class _Group(NamedTuple):
    """A group: ``inside`` and ``outside`` are its channels, ``wide`` the width that it is padded to."""

    kind: Kind
    one: Convolution
    inside: int
    outside: int
    wide: int

    @property
    def dimensions(self) -> int:
        return len(self.one.data) - 2

    def is_aligned(self, channels: int) -> bool:
        return self.inside % channels == 0 == self.outside % channels


def grouped(kind: Kind, one: Convolution) -> int:
    """Return the bytes of workspace."""
    inside, outside = one.channels, one.weight[0] // one.groups
    if inside == 1 and not (one.channels_last or one.transposed) and not is_cudnn_depthwise(one):
        return 0
    group = _Group(kind, one, inside, outside, padded_width(one))
    if _sums_depthwise(group):
        return one.data[0] * _DEPTHWISE_PARTS_OF_IMAGE * prod(one.weight) * 4
    engine = _engine(group)
    return 0 if engine == "direct" else _padded(group) if engine == "padded" else _by_group(group)


def is_cudnn_depthwise(one: Convolution) -> bool:
    """Return whether cuDNN runs a contiguous depthwise convolution: some in fp16."""
    fp16 = one.dtype == torch.float16
    return is_of_cudnn(one.data, one.weight, one.strides, one.dilation, fp16=fp16)


def copied_by_group(kind: Kind, one: Convolution) -> int:
    """Return the bytes where each group is a convolution of its own."""
    return _by_group(_Group(kind, one, one.channels, one.weight[0] // one.groups, padded_width(one)))


def padded_width(one: Convolution) -> int:
    """Return the channels that each group is padded to."""
    return max(_NARROWEST, 1 << (max(one.channels, one.weight[0] // one.groups) - 1).bit_length())


def padded(one: Convolution) -> int:
    """Return the bytes of channels-last copies with padded groups."""
    wide = padded_width(one)
    weight = one.groups * wide**2 * one.taps
    data = one.data[0] * one.groups * wide * (prod(one.data[2:]) + prod(one.output[2:]))
    return (data + weight) * one.itemsize + HEADER


def _sums_depthwise(group: _Group) -> bool:
    """Return whether it is a depthwise weight gradient of 16-bit channels-last tensors.

    It has eight fp32 sums of each image.
    """
    one = group.one
    plain = group.inside == group.outside == 1 and one.is_half and one.channels_last
    enough = one.taps > 9 or one.places > 1000
    return group.kind == "weight gradient" and plain and one.taps > 1 and one.taps % 2 == 1 and enough


def _is_large_depthwise(group: _Group) -> bool:
    """Return whether it is a depthwise weight gradient of large fp32 images in channels-last layout.

    Filters of 7x7 (ConvNeXt) and 8x8 need it; those of 3x3 (Segformer) and 2x2 do not, however large the image.
    """
    one = group.one
    plain = group.inside == group.outside == 1 and not one.is_half and one.channels_last
    many = one.taps >= _MANY_DEPTHWISE_TAPS and one.places > _MANY_DEPTHWISE_PLACES
    return group.kind == "weight gradient" and plain and many


def _engine(group: _Group) -> Engine:
    one = group.one
    if _is_large_depthwise(group):
        return "padded"
    if group.inside == 1:
        multiplied = group.outside > 1 and one.taps < 64 and not one.is_half
        return "padded" if group.kind == "weight gradient" and multiplied else "direct"
    if one.taps == 1 and group.dimensions < 3 and not (one.channels_last and group.kind == "forward"):  # a product
        if group.kind != "forward":
            return "by group"
        return "direct" if not one.is_half or group.inside <= 64 else "by group"
    if group.kind == "forward":
        return _of_half_forward(group) if one.is_half else _of_forward(group)
    if group.kind == "input gradient":
        return _of_half_input_gradient(group) if one.is_half else _of_input_gradient(group)
    return _of_weight_gradient(group)


def _of_forward(group: _Group) -> Engine:
    taps = group.one.taps
    if group.dimensions == 3 or group.inside == group.outside == group.wide <= 64:
        return "padded"
    if (group.outside >= 3 * group.inside and taps < 64) or (group.outside == 1 and 4 < group.inside <= 8):
        return "direct"
    return "padded" if group.inside * taps <= 264 else "by group"


def _of_half_forward(group: _Group) -> Engine:
    taps, terms = group.one.taps, group.inside * group.one.taps
    waste = group.wide**2 / (group.inside * group.outside)
    if taps <= 8 and group.is_aligned(8) and group.inside < group.outside <= 64:
        return "direct"
    if group.dimensions == 3:
        return "padded" if group.wide <= 256 else "by group"
    if (group.inside <= 3 and taps <= 64) or (terms <= 72 and waste > 7):
        return "direct"
    return "by group" if waste > 7 or terms > 1116 else "padded"


def _of_half_input_gradient(group: _Group) -> Engine:
    taps = group.one.taps
    if group.dimensions == 3:
        return "padded" if group.wide <= 256 else "by group"
    if group.outside * taps <= 15:
        return "direct"
    return "by group" if group.wide > 64 or taps > 16 else "padded"


def _of_input_gradient(group: _Group) -> Engine:
    taps, narrow, strided = group.one.taps, min(group.inside, group.outside), max(group.one.strides) > 1
    if group.dimensions == 3:
        return "padded" if group.wide <= 128 else "direct"
    if group.inside == group.outside == group.wide <= 64:
        if not strided:
            return "direct" if group.wide <= _NARROWEST else "padded"
        return "by group" if group.wide >= _TOO_WIDE else "padded"
    if narrow > 3 and group.wide <= 64 and taps <= 25 and not group.is_aligned(4):
        return "padded"
    return "direct" if narrow > 34 or (narrow <= 3 and not strided) else "by group"


def _of_weight_gradient(group: _Group) -> Engine:
    one = group.one
    if not one.is_half:
        if group.wide > 64:
            return "direct" if group.inside <= 28 else "by group"
        if one.products < 23_000_000:
            return "direct"
        return "by group" if one.groups <= 3 or group.wide * one.taps >= 4096 else "padded"
    few = one.channels_last or one.places <= _MANY_NARROW_PLACES
    if group.inside == group.outside == _NARROWEST and group.dimensions == 2 and few:
        return "direct"
    if one.groups > 24:
        return "padded"
    if one.places <= 498:
        return "direct"
    if group.dimensions == 3:
        return "padded" if group.wide <= 128 else "by group"
    return "padded" if group.inside > 2 and one.places > 30_000 and group.wide <= 128 else "by group"


def _padded(group: _Group) -> int:
    one, wide = group.one, group.wide
    weight, copies = one.groups * wide**2 * one.taps, padded(one)
    if group.kind != "weight gradient":
        return copies + (OF_WIDE if one.places > _MANY_PLACES and wide > 4 else 0)
    merged = max(wide, _TILE)  # narrow groups share a tile
    tiles = ceil_div(one.groups * wide, merged) * one.taps * (merged // _TILE) ** 2
    if _is_large_depthwise(group):
        return copies + _LARGE_DEPTHWISE_PARTS * weight * 4 + _OF_PARTS + 3 * _BYTES_PER_PART * tiles
    parts = one.multiprocessors // tiles
    if parts < 2 or one.places < 1600:
        return copies
    if not one.is_half and wide < _TILE:
        parts = min(parts, 4)
    return copies + (parts - 1) * tiles * _TILE**2 * 4 + _OF_PARTS + _BYTES_PER_PART * parts * tiles


def _by_group(group: _Group) -> int:
    one = group.one
    if one.is_half:
        copies_weight = one.taps > 1 and not (one.channels_last and group.inside % 8 == 0)
    else:
        odd = one.taps > 1 and one.taps % 2 == 1
        of_gradient = group.kind == "weight gradient" or (group.kind == "input gradient" and odd)
        copies_weight = of_gradient or one.taps > 16
    filled = copies_weight or one.is_half
    inside, outside = (one.filled(count) if filled else count for count in (group.inside, group.outside))
    weight = inside * outside * one.taps
    data = one.data[0] * (inside * prod(one.data[2:]) + outside * prod(one.output[2:]))
    each = (data + (weight if copies_weight else 0)) * one.itemsize + HEADER
    if group.kind == "weight gradient":
        parts = 1 if group.dimensions == 3 else min(24, max(1, one.places // 1200))
        each += (parts - 1) * weight * 4 + 128
    return min(one.groups, _AT_ONCE) * each
