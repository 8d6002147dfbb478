"""How much workspace cuDNN takes for a convolution: layouts that its engines change, and sums that they split.

Shapes: input [N, C, ...], weight [K, C/groups, R, S], output [N, K, ...].  cuDNN's heuristics (``cudnn.benchmark``
off) choose an engine; which one, and what it needs, is documented nowhere.  Read off an H200 (cuDNN 9.19, torch 2.11,
fp32 with TF32, fp16, bf16), and assumed for other cards with tensor cores:

- Engines work on channels-last data.  What is contiguous (NCHW) is transformed in the workspace, input, weight and
  output once each, with 16 bytes more; a 1x1 weight is the same in both layouts.  Channels that do not fill 16 bytes
  are padded to it, in the gradient of the weight always, in forward for 16-bit types alone.
- fp32 forward with short sums (C·R·S of at most 576) writes contiguous output itself; with a strided 1x1 filter
  only where the output has many places (seen with 12,544 and 25,088, not with 6,272 and fewer; the bound between is
  assumed).  fp32 patches that do not overlap (stride = filter) need nothing.
- A 1x1 convolution without strides or padding is one matrix product for each image if an image's rows fill 16 bytes;
  the gradient of the weight then holds one fp32 sum for each image.
- The gradient of the weight is summed in as many parts as fit on the multiprocessors at once, ⌊multiprocessors /
  tiles⌋.

Exact for ResNet's 3x3 and vision transformers' patches.  Left out: parts of K > 256 (up to a sixth of the workspace),
the number of parts of padded images (54 to 116 of the weight, 66 here) and of 1x1 weights (within a part), buffers
below 512 bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from trainatomy.world.kernels.arguments import ceil_div, round_up

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

Kind = Literal["forward", "input gradient", "weight gradient"]

_FILL = 16
_HEADER = 16
_SHORT_SUM = 576
_OF_STRIDES = 131
_OF_PARTS, _BYTES_PER_PART = 159, 4
_OF_PADDED_PARTS = 128
_MOST_SPLIT_ROWS = 256


@dataclass(frozen=True, slots=True)
class Convolution:
    """One call: shapes, type and layout, ``strides`` and ``padding`` by dimension."""

    data: torch.Size
    weight: torch.Size
    output: torch.Size
    dtype: torch.dtype
    strides: Sequence[int]
    padding: Sequence[int]
    channels_last: bool
    multiprocessors: int

    @property
    def key(self) -> Hashable:
        """Equal for calls that cuDNN is asked about once."""
        shapes = self.data, self.weight, self.output
        return shapes, self.dtype, tuple(self.strides), tuple(self.padding), self.channels_last

    def workspace(self, kind: Kind) -> int:
        """Bytes that ``kind`` takes."""
        if self._products_by_image():
            by_image = kind == "weight gradient"
            return self.data[0] * self.weight.numel() * 4 if by_image else 0
        transformed = self._transformed(kind)
        if kind == "weight gradient":
            return transformed + self._parts()
        return transformed + (_OF_STRIDES if kind == "input gradient" and self._strided() and self._filled() else 0)

    def _pointwise(self) -> bool:
        return math.prod(self.weight[2:]) == 1

    def _strided(self) -> bool:
        return any(stride > 1 for stride in self.strides)

    def _filled(self) -> bool:
        """Channels fill 16 bytes."""
        return self.weight[1] * self.dtype.itemsize % _FILL == 0

    def _patches(self) -> bool:
        """Filters do not overlap."""
        return not self._pointwise() and list(self.strides) == list(self.weight[2:])

    def _products_by_image(self) -> bool:
        plain = self._pointwise() and not self._strided() and not any(self.padding) and not self.channels_last
        return plain and math.prod(self.data[2:]) * self.dtype.itemsize % _FILL == 0

    def _transformed(self, kind: Kind) -> int:
        """Bytes of what changes its layout; of channels-last tensors, what is padded or has too few channels."""
        filled, half = self._filled(), self.dtype.itemsize == 2
        if self.channels_last and filled:
            return 0
        if kind == "forward" and not half and self._patches() and not self.channels_last:
            return 0
        channels = self._padded_channels(kind)
        data = self.data[0] * channels * math.prod(self.data[2:])
        weight = 0 if self._pointwise() else self._padded_weight(channels)
        keeps_output = self.channels_last and (half or kind == "forward") and kind != "input gradient"
        short = filled and self._sum_length() <= _SHORT_SUM
        writes_output = kind == "forward" and not half and short and (not self._pointwise() or self._many_places())
        if writes_output:
            weight = self.weight.numel()
        output = 0 if keeps_output or writes_output else self.output.numel()
        return (data + weight + output) * self.dtype.itemsize + _HEADER

    def _many_places(self) -> bool:
        """Tiles of 128 places of the output would occupy half of the multiprocessors."""
        places = self.output[0] * math.prod(self.output[2:])
        return 2 * ceil_div(places, 128) >= self.multiprocessors

    def _padded_channels(self, kind: Kind) -> int:
        """C of the transformed input."""
        channels, half = self.data[1], self.dtype.itemsize == 2
        if self._filled() or kind == "input gradient" or (kind == "forward" and not half):
            return channels
        overlapping_fp16 = kind == "forward" and self.dtype == torch.float16 and not self._patches()
        return round_up(channels, 4 if overlapping_fp16 else _FILL // self.dtype.itemsize)

    def _padded_weight(self, channels: int) -> int:
        if channels == self.data[1]:
            return self.weight.numel()
        return self.weight[0] * channels * math.prod(self.weight[2:])

    def _sum_length(self) -> int:
        return math.prod(self.weight[1:])

    def _parts(self) -> int:
        """Bytes of the partial sums of the weight's gradient."""
        if not self._filled():
            return self._padded_parts()
        rows, columns, half = self.weight[0], self._sum_length(), self.dtype.itemsize == 2
        if self._pointwise():
            parts = self.multiprocessors // (ceil_div(rows, 128) * ceil_div(columns, 64))
            return parts * self.weight.numel() * 4 if parts > 1 and not half else 0
        if rows > _MOST_SPLIT_ROWS:
            return 0
        tiles = ceil_div(columns, 64)
        parts = self.multiprocessors // tiles
        kept = parts - 1 if half else parts
        return kept * self.weight.numel() * 4 + _OF_PARTS + _BYTES_PER_PART * parts * tiles if parts > 1 else 0

    def _padded_parts(self) -> int:
        size = self.dtype.itemsize
        weight = self._padded_weight(self._padded_channels("weight gradient")) * size
        tiles = ceil_div(self.weight[0], 64) * ceil_div(weight // self.weight[0], 512)
        parts = self.multiprocessors // tiles
        if parts <= 1:
            return _OF_PADDED_PARTS if size == 4 else 0
        return parts * weight + _OF_PADDED_PARTS
